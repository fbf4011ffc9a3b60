"""What the callback measures, logs and explains, in real runs."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import MemoryMonitor, ZeROStrategy
from lightning_zero.monitor import POINTS, MostBytes, allocated_on
from tests.models import Transformer, next_token_loss, tokens


class Project(LightningModule):
    """A user's module around a small Transformer."""

    def __init__(self, *, is_data_dependent: bool = False) -> None:
        super().__init__()
        self.net = Transformer()
        self.is_data_dependent = is_data_dependent

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.is_data_dependent:
            batch["x"][batch["x"] > 100].nonzero()
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
    folder: str, strategy: str | int, precision: str = "32-true", **changes: Any
) -> tuple[MemoryMonitor, list[str]]:
    """Train four batches; returns the monitor and the names that were logged."""
    monitor = MemoryMonitor(report=folder)
    world = dist.get_world_size()
    zero: Any = strategy
    if isinstance(strategy, int):
        zero = ZeROStrategy(strategy, units=is_block)
    logger = CSVLogger(folder)
    trainer = Trainer(
        strategy=zero, accelerator="cpu", devices=world, precision=precision, max_epochs=1,
        logger=logger, callbacks=[monitor], enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, log_every_n_steps=1, num_sanity_val_steps=1,
    )  # fmt: skip
    data = [tokens(13, 6)(4, seed) for seed in range(4 * world)]
    loader = DataLoader(data, batch_size=None)
    trainer.fit(Project(**changes), loader, DataLoader(data[:world], batch_size=None))
    names = set()
    metrics = Path(logger.log_dir) / "metrics.csv"
    if trainer.is_global_zero:
        names = set(metrics.read_text().splitlines()[0].split(","))
    return monitor, sorted(names)


def run(folder: str, strategy: str | int, precision: str = "32-true", **changes: Any) -> dict:
    """What a test looks at."""
    monitor, names = fit(folder, strategy, precision, **changes)
    predicted = monitor.predicted
    return {
        "measured": monitor.measured,
        "names": names,
        "text": monitor.text(dist.get_world_size()),
        "resting": predicted and predicted.resting,
        "most": predicted and predicted.most,
    }


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_measured_is_predicted(ranks: Any, tmp_path: Path, stage: int, precision: str) -> None:
    results = ranks(2).run(run, str(tmp_path), stage, precision)
    first = results[0]
    assert list(first["measured"]) == list(POINTS)
    assert all(result["measured"] == first["measured"] for result in results)
    step = first["measured"]["step"]
    for kind in ("weights", "gradients", "master", "states", "buffers"):
        assert step[kind] == max(result["resting"][kind] for result in results), kind
    assert step["gathered"] == 0
    assert (first["measured"]["forward"]["gathered"] > 0) == (stage == 3)
    assert first["measured"]["forward"]["gathered"] <= first["most"]["gathered"]
    assert first["most"]["activations"] > 0
    assert "memory/backward/gradients" in first["names"]
    assert "memory/validation/weights" in first["names"]


def test_the_table_explains_itself(ranks: Any, tmp_path: Path) -> None:
    text = ranks(2).run(run, str(tmp_path), 3)[0]["text"]
    lines = text.splitlines()
    assert lines[1].split() == ["setup", "forward", "backward", "step", "validation"]
    rows = [line.split()[0] for line in lines[2:]]
    for row in ("weights", "states", "total", "change", "resident"):
        assert row in rows
    assert "Within a step" in text
    facts = json.loads((tmp_path / "memory.json").read_text())
    assert [row["strategy"] for row in facts["stages"]] == ["ddp", "zero1", "zero2", "zero3"]
    assert facts["held"]["states"] == facts["predicted"]["resting"]["states"]
    page = (tmp_path / "memory.html").read_text()
    assert page.count("<svg") == 2
    assert "http-equiv" not in page
    assert "<script" not in page


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


def reduce_over_ranks() -> dict[str, dict[str, int]]:
    most = MostBytes()
    rank = dist.get_rank()
    most.update("step", {"weights": 2**53 + 1 + rank, "states": 5 - rank})
    most.update("step", {"weights": 7})
    return most.compute()


def test_the_most_over_ranks_is_exact(ranks: Any) -> None:
    for result in ranks(3).run(reduce_over_ranks):
        assert result["step"]["weights"] == 2**53 + 3
        assert result["step"]["states"] == 5
        assert list(result) == ["step"]


class Allocator:
    """What ``torch.cuda`` says of a device, by its documentation, without a device."""

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


def test_fragmentation_is_that_of_each_part_of_a_step(mocker: Any) -> None:
    allocator, device = Allocator(), torch.device("cuda", 0)
    mocker.patch.object(torch.cuda, "memory_stats", allocator.memory_stats)
    mocker.patch.object(torch.cuda, "reset_peak_memory_stats", allocator.reset_peak_memory_stats)
    allocator.hold(allocated=60, reserved=100)
    allocator.hold(allocated=30, reserved=100)
    expected = {"allocated": 30, "reserved": 100, "peak": 60, "fragmentation": 40}
    assert allocated_on(device) == expected
    allocator.hold(allocated=90, reserved=110)
    allocator.hold(allocated=20, reserved=50)
    expected = {"allocated": 20, "reserved": 50, "peak": 90, "fragmentation": 20}
    assert allocated_on(device) == expected
    assert allocated_on(device)["fragmentation"] == 30, "an earlier peak lived on"
