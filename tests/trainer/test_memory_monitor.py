"""What the callback measures, logs and explains, in real runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger

from lightning_zero import MemoryMonitor, estimate
from lightning_zero.plan import Settings
from lightning_zero.trainer.memory_monitor import POINTS, allocated_on
from tests.oracle.models import Block
from tests.oracle.projects import Regression, make_trainer, rows


def run(folder: str, strategy: str | int) -> Any:
    """Two epochs; returns what was measured, the table and the lines that were logged."""
    monitor, logger = MemoryMonitor(report=folder), CSVLogger(folder)
    options: dict[str, Any] = {"logger": logger, "max_epochs": 2, "callbacks": [monitor]}
    precision = "bf16-mixed" if strategy == 3 else None
    trainer = make_trainer(strategy, precision=precision, num_sanity_val_steps=1, **options)
    trainer.fit(Regression(), rows(), rows(4))
    trainer.strategy.barrier()  # rank 0 has written
    with next(Path(folder).glob("**/metrics.csv")).open() as file:
        return monitor.measured, monitor.text(dist.get_world_size()), list(csv.DictReader(file))


def test_measured_is_predicted_logged_and_reported(ranks: Any, tmp_path: Path) -> None:
    (measured, text, lines), (others, *_) = ranks(2).run(run, str(tmp_path), 3)
    assert list(measured) == list(POINTS)
    assert others == measured
    how: dict[str, Any] = {"world_size": 2, "precision": "bf16-mixed"}
    settings = Settings(3, units={Block})
    predicted = [estimate(Regression(), settings, rank=rank, **how).resting for rank in range(2)]
    for kind in ("weights", "gradients", "master", "states", "buffers"):
        assert measured["step"][kind] == max(one[kind] for one in predicted), kind
    assert measured["step"]["gathered"] == 0 < measured["forward"]["gathered"]
    assert {"memory/backward/gradients", "memory/validation/weights"} <= lines[0].keys()
    assert sum(bool(line["memory/setup/weights"]) for line in lines) == 2, "once in each epoch"
    _, head, *table = text.splitlines()
    assert head.split() == ["setup", "forward", "backward", "step", "validation"]
    names = {row.split()[0] for row in table}
    assert names >= {"weights", "states", "total", "change", "resident"}
    facts = json.loads((tmp_path / "memory.json").read_text())
    assert facts["measured"]["step"]["states"] > 0


def test_other_strategies_are_counted(ranks: Any, tmp_path: Path) -> None:
    measured, *_ = ranks(2).run(run, str(tmp_path), "ddp")[0]
    numel = sum(parameter.numel() for parameter in Regression().parameters())
    assert measured["step"]["weights"] == 4 * numel
    assert measured["backward"]["gradients"] == 4 * numel
    assert measured["step"]["states"] >= 8 * numel


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


def test_fragmentation_is_that_of_each_part_of_a_step(mocker: Any) -> None:
    allocator, device, module = Allocator(), torch.device("cuda", 0), torch.cuda
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
