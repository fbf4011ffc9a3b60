"""What the callback measures, logs and explains, in real runs."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import prodigyopt
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import MemoryMonitor
from lightning_zero.trainer import memory_monitor
from lightning_zero.trainer.memory_monitor import POINTS, allocated_on
from tests.oracle.models import Transformer, next_token_loss, tokens
from tests.oracle.projects import make_strategy, make_trainer


class Project(LightningModule):
    """A user's module around a small Transformer."""

    def __init__(
        self, *, is_data_dependent: bool = False, surprises: bool = False, optimizer: str = "adamw"
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.net = Transformer()
        self.is_data_dependent = is_data_dependent
        if surprises:
            # Never used, and so never stepped.
            self.unused = nn.ParameterList([torch.ones(256), torch.ones(64)])
            self.register_buffer("seen", torch.zeros(4))

    def on_train_batch_end(self, *args: Any) -> None:
        if hasattr(self, "seen"):
            self.seen = torch.cat([self.seen, self.seen[:4]])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.is_data_dependent:
            batch["x"][batch["x"] > 100].nonzero()
        loss = next_token_loss(self.net, batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", next_token_loss(self.net, batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters()),
    "muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2]),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "prodigy": lambda m: prodigyopt.Prodigy(m.parameters()),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), max_iter=1),
}


def is_block(module: nn.Module) -> bool:
    return type(module).__name__ == "TransformerBlock"


def fit(
    folder: str,
    strategy: str | int,
    precision: str = "32-true",
    monitor: Callable[..., MemoryMonitor] = MemoryMonitor,
    **changes: Any,
) -> tuple[MemoryMonitor, list[str]]:
    """Train four batches; returns the monitor and the names that were logged."""
    callback = monitor(report=folder)
    world, logger = dist.get_world_size(), CSVLogger(folder)
    trainer = make_trainer(
        make_strategy(strategy, units=is_block), precision=precision, logger=logger,
        max_epochs=changes.pop("epochs", 1), callbacks=[callback], num_sanity_val_steps=1,
    )  # fmt: skip
    data = [tokens(13, 6)(4, seed) for seed in range(4 * world)]
    loader = DataLoader(data, batch_size=None)
    trainer.fit(Project(**changes), loader, DataLoader(data[:world], batch_size=None))
    names = set()
    metrics = Path(logger.log_dir) / "metrics.csv"
    if trainer.is_global_zero:
        names = set(metrics.read_text().splitlines()[0].split(","))
    return callback, sorted(names)


def run(folder: str, strategy: str | int, precision: str = "32-true", **changes: Any) -> dict:
    """Fit, and return what a test looks at."""
    monitor, names = fit(folder, strategy, precision, **changes)
    predicted = monitor.predicted
    return {
        "measured": monitor.measured,
        "names": names,
        "text": monitor.text(dist.get_world_size()),
        "resting": predicted and predicted.resting,
        "most": predicted and predicted.most,
        "own": monitor._own,
        "kept": predicted and predicted.snapshots[-1].kinds["unreduced"],
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
    step = first["measured"]["step"]
    for kind in ("weights", "gradients", "master", "states", "buffers"):
        assert step[kind] == max(result["resting"][kind] for result in results), kind
    assert step["gathered"] == 0
    assert 0 < step["unreduced"] <= first["kept"], "reduce buffers, which peers may still read"
    assert (first["measured"]["forward"]["gathered"] > 0) == (stage == 3)
    assert first["measured"]["forward"]["gathered"] <= first["most"]["gathered"]
    assert first["most"]["activations"] > 0
    assert "memory/backward/gradients" in first["names"]
    assert "memory/validation/weights" in first["names"]


def run_others(folder: str) -> list[dict[str, Any]]:
    names = [(3, "muon"), (1, "adafactor"), (3, "prodigy")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unforeseen = run(folder, 3, optimizer="lbfgs")
    assert unforeseen["resting"] is None
    told = any("LBFGS's state cannot be predicted" in str(w.message) for w in caught)
    assert told == (dist.get_rank() == 0)
    return [run(folder, stage, optimizer=name) for stage, name in names]


def test_states_of_whole_parameters_are_predicted(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(2).run(run_others, str(tmp_path)):
        for result in found:
            own, foreseen = result["own"]["states"], result["resting"]["states"]
            # Prodigy keeps no copy of a parameter that begins as zeros.
            assert 0 < own <= foreseen <= 1.01 * own


def test_the_table_explains_itself(ranks: Any, tmp_path: Path) -> None:
    text = ranks(2).run(run, str(tmp_path), 3)[0]["text"]
    lines = text.splitlines()
    assert lines[1].split() == ["setup", "forward", "backward", "step", "validation"]
    rows = [line.split()[0] for line in lines[2:]]
    for row in ("weights", "states", "total", "change", "resident"):
        assert row in rows
    assert "Predicted peak within a step: " in text
    facts = json.loads((tmp_path / "memory.json").read_text())
    assert facts["held"]["states"] == facts["predicted"]["resting"]["states"]
    page = (tmp_path / "memory.html").read_text()
    assert page.count("<svg") == 1
    assert "http-equiv" not in page
    assert "<script" not in page


def count_logged(folder: str) -> int:
    """Count the lines of the log that tell of memory, after two epochs."""
    fit(folder, 3, monitor=partial(MemoryMonitor, predict=False), epochs=2)
    dist.barrier()  # rank 0 has written
    with next(Path(folder).glob("**/metrics.csv")).open() as file:
        return sum(bool(row["memory/setup/weights"]) for row in csv.DictReader(file))


def test_every_epoch_is_logged_once(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(count_logged, str(tmp_path)) == [2, 2]


def differences(result: dict) -> dict[str, str]:
    """Return what the table says of each kind that differs."""
    lines = [line for line in result["text"].splitlines() if line.endswith(" than predicted.")]
    found = dict(line.split(": ", 1) for line in lines)
    off = {kind for kind, count in result["resting"].items() if result["own"][kind] != count}
    assert set(found) == off
    return found


def test_what_differs_is_told(ranks: Any, tmp_path: Path) -> None:
    """Parameters that no loss reaches, all of them on rank 1, and a buffer that grows."""
    first, second = map(differences, ranks(2).run(run, str(tmp_path), 3, surprises=True))
    buffers = "64 B more than predicted."
    assert first == {"buffers": buffers}
    assert second == {"buffers": buffers, "states": "2.57 kB less than predicted."}
    facts = json.loads((tmp_path / "memory.json").read_text())
    assert facts["held"]["buffers"] - facts["predicted"]["resting"]["buffers"] == 64


def test_other_strategies_are_counted(ranks: Any, tmp_path: Path) -> None:
    result = ranks(2).run(run, str(tmp_path), "ddp")[0]
    numel = sum(parameter.numel() for parameter in Transformer().parameters())
    step = result["measured"]["step"]
    assert step["weights"] == 4 * numel
    assert result["measured"]["backward"]["gradients"] == 4 * numel
    assert step["states"] >= 8 * numel
    assert result["resting"] is None


def test_a_step_that_needs_data_is_predicted_without_activations(
    ranks: Any, tmp_path: Path
) -> None:
    result = ranks(1).run(warned, str(tmp_path))[0]
    assert result["most"]["activations"] == 0
    assert result["measured"]["step"]["states"] == result["resting"]["states"]


def warned(folder: str) -> dict:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(folder, 3, is_data_dependent=True)
    assert any("Project does not run on tensors without data" in str(w.message) for w in caught)
    return result


def reduce_over_ranks(folder: str) -> dict[str, dict[str, int]]:
    rank = dist.get_rank()

    def held_by(trainer: Trainer) -> dict[str, int]:
        held = [{}, {"weights": 2**53 + 1 + rank, "states": 5 - rank}, {"weights": 7}]
        return held[min(trainer.global_step, 2)]

    with (
        mock.patch.object(memory_monitor, "held_by", held_by),
        mock.patch.object(memory_monitor, "allocated_on", return_value={}),
    ):
        return fit(folder, "ddp", monitor=partial(MemoryMonitor, predict=False))[0].measured


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
