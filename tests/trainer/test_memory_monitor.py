"""What the callback measures, logs and explains, in real runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import MemoryMonitor, estimate
from lightning_zero.plan import Settings
from lightning_zero.trainer import memory_monitor
from lightning_zero.trainer.memory_monitor import POINTS, allocated_on
from tests.oracle.models import Transformer, next_token_loss, tokens
from tests.oracle.projects import make_strategy, make_trainer


class Project(LightningModule):
    """A user's module around a small Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Transformer()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = next_token_loss(self.net, batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", next_token_loss(self.net, batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def is_block(module: nn.Module) -> bool:
    return type(module).__name__ == "TransformerBlock"


def fit(
    folder: str,
    strategy: str | int,
    precision: str = "32-true",
    **changes: Any,
) -> tuple[MemoryMonitor, list[str]]:
    """Train four batches; returns the monitor and the names that were logged."""
    callback = MemoryMonitor(report=folder)
    world, logger = dist.get_world_size(), CSVLogger(folder)
    trainer = make_trainer(
        make_strategy(strategy, units=is_block), precision=precision, logger=logger,
        max_epochs=changes.pop("epochs", 1), callbacks=[callback], num_sanity_val_steps=1,
    )  # fmt: skip
    data = [tokens(13, 6)(4, seed) for seed in range(4 * world)]
    loader = DataLoader(data, batch_size=None)
    trainer.fit(Project(), loader, DataLoader(data[:world], batch_size=None))
    names = set()
    metrics = Path(logger.log_dir) / "metrics.csv"
    if trainer.is_global_zero:
        names = set(metrics.read_text().splitlines()[0].split(","))
    return callback, sorted(names)


def run(folder: str, strategy: str | int, precision: str = "32-true", **changes: Any) -> dict:
    """Fit, and return what a test looks at."""
    monitor, names = fit(folder, strategy, precision, **changes)
    return {
        "measured": monitor.measured,
        "names": names,
        "text": monitor.text(dist.get_world_size()),
    }


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (1, "32-true"),
        (3, "32-true"),
        (2, "bf16-mixed"),
        (3, "bf16-mixed"),
        (1, "bf16-true"),
        (3, "bf16-true"),
    ],
)
def test_measured_is_predicted(ranks: Any, tmp_path: Path, stage: int, precision: str) -> None:
    results = ranks(2).run(run, str(tmp_path), stage, precision)
    first = results[0]
    assert list(first["measured"]) == list(POINTS)
    assert all(result["measured"] == first["measured"] for result in results)
    predicted = [
        estimate(
            Project(), Settings(stage, units=is_block), world_size=2, rank=rank, precision=precision
        )
        for rank in range(2)
    ]
    step = first["measured"]["step"]
    for kind in ("weights", "gradients", "master", "states", "buffers"):
        assert step[kind] == max(one.resting[kind] for one in predicted), kind
    assert step["gathered"] == 0
    assert (first["measured"]["forward"]["gathered"] > 0) == (stage == 3)
    assert "memory/backward/gradients" in first["names"]
    assert "memory/validation/weights" in first["names"]


def test_the_table_explains_itself(ranks: Any, tmp_path: Path) -> None:
    text = ranks(2).run(run, str(tmp_path), 3)[0]["text"]
    lines = text.splitlines()
    assert lines[1].split() == ["setup", "forward", "backward", "step", "validation"]
    rows = [line.split()[0] for line in lines[2:]]
    for row in ("weights", "states", "total", "change", "resident"):
        assert row in rows
    facts = json.loads((tmp_path / "memory.json").read_text())
    assert facts["measured"]["step"]["states"] > 0


def count_logged(folder: str) -> int:
    """Count the lines of the log that tell of memory, after two epochs."""
    fit(folder, 3, epochs=2)
    dist.barrier()  # rank 0 has written
    with next(Path(folder).glob("**/metrics.csv")).open() as file:
        return sum(bool(row["memory/setup/weights"]) for row in csv.DictReader(file))


def test_every_epoch_is_logged_once(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(count_logged, str(tmp_path)) == [2, 2]


def test_other_strategies_are_counted(ranks: Any, tmp_path: Path) -> None:
    result = ranks(2).run(run, str(tmp_path), "ddp")[0]
    numel = sum(parameter.numel() for parameter in Transformer().parameters())
    step = result["measured"]["step"]
    assert step["weights"] == 4 * numel
    assert result["measured"]["backward"]["gradients"] == 4 * numel
    assert step["states"] >= 8 * numel


def reduce_over_ranks(folder: str) -> dict[str, dict[str, int]]:
    rank = dist.get_rank()

    def held_by(trainer: Trainer) -> dict[str, int]:
        held = [{}, {"weights": 2**53 + 1 + rank, "states": 5 - rank}, {"weights": 7}]
        return held[min(trainer.global_step, 2)]

    with (
        mock.patch.object(memory_monitor, "held_by", held_by),
        mock.patch.object(memory_monitor, "allocated_on", return_value={}),
    ):
        return fit(folder, "ddp")[0].measured


def test_the_most_over_ranks_is_exact(ranks: Any, tmp_path: Path) -> None:
    for result in ranks(3).run(reduce_over_ranks, str(tmp_path)):
        assert result["step"]["weights"] == 2**53 + 3
        assert result["step"]["states"] == 5
        assert "setup" not in result


class Allocator:
    """The answers of torch about a device's allocator, by its documentation, without a device."""

    def __init__(self) -> None:
        self.now = {"allocated_bytes": 0, "reserved_bytes": 0}
        self.most = dict(self.now)

    def hold(self, *, allocated: int, reserved: int) -> None:
        self.now = {"allocated_bytes": allocated, "reserved_bytes": reserved}
        self.most = {name: max(count, self.most[name]) for name, count in self.now.items()}

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {f"{name}.all.current": count for name, count in self.now.items()} | {
            f"{name}.all.peak": count for name, count in self.most.items()
        }

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.most = dict(self.now)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_fragmentation_is_that_of_each_part_of_a_step(mocker: Any, kind: str) -> None:
    allocator, device = Allocator(), torch.device(kind, 0)
    module = getattr(torch, kind)
    mocker.patch.object(module, "memory_stats", allocator.memory_stats)
    mocker.patch.object(module, "reset_peak_memory_stats", allocator.reset_peak_memory_stats)
    allocator.hold(allocated=60, reserved=100)
    allocator.hold(allocated=30, reserved=100)
    expected = {"allocated": 30, "reserved": 100, "peak": 60, "fragmentation": 40}
    assert allocated_on(device) == expected
    allocator.hold(allocated=90, reserved=110)
    allocator.hold(allocated=20, reserved=50)
    expected = {"allocated": 20, "reserved": 50, "peak": 90, "fragmentation": 20}
    assert allocated_on(device) == expected
    assert allocated_on(device)["fragmentation"] == 30, "an earlier peak lived on"
