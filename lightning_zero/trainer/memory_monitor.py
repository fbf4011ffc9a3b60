"""A callback that measures each rank's memory in training."""

from __future__ import annotations

import json
import mmap
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_zero.comm import StepTimes
from lightning_zero.memory import AWAY_ROWS, KINDS, format_ranks, table
from lightning_zero.plan import whole_tensors
from lightning_zero.tensors import bytes_held, tensors_in
from lightning_zero.trainer import internals
from lightning_zero.trainer.strategy import ZeROStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl

POINTS = ("setup", "forward", "backward", "step", "validation")
"""When the monitor measures: at setup, and after each of the other parts."""

ALLOCATOR = ("allocated", "reserved", "peak", "fragmentation", "resident")
"""Figures of the allocator and the operating system, beside the kinds that the engine counts."""

_COUNTED = tuple(kind for kind in KINDS if kind != "activations")
_STAGING = "host staging"
_ROWS = (*_COUNTED, *AWAY_ROWS, _STAGING, *ALLOCATOR)


class MemoryMonitor(Callback):
    """Measures memory by kind through a step and logs it.

    At setup, after forward, backward and the optimizer step, and in validation, the monitor reads
    the bytes of each kind, which the engine counts exactly, and the allocator's figures: on an
    accelerator allocated, reserved and peak bytes and the fragmentation (peak reserved minus peak
    allocated, both since the previous point, as each point resets the allocator's peaks), on the
    CPU the process's resident memory. The maximum over all ranks is logged as
    ``memory/<point>/<kind>`` and printed as a table when training ends.

    Under strategies other than ``ZeROStrategy``, the kinds are weights, gradients, optimizer states
    and buffers. With offload, the speed of files and the share of time spent in optimizer steps on
    the host follow the table; ``host staging`` is the memory that the optimizer's step took there
    for states on their way between files.

    Args:
        report: Folder for ``memory.json``, which is written when training ends.

    Attributes:
        measured: Bytes by kind at each point, the maximum over all steps and ranks.
        times: Times of this rank's steps with offload, without the first step.
    """

    def __init__(self, *, report: str | Path | None = None) -> None:
        self.report = None if report is None else Path(report)
        self.measured: dict[str, dict[str, int]] = {}
        self.times = StepTimes()
        self._most: defaultdict[str, Counter[str]] = defaultdict(Counter)

    # -- the points ------------------------------------------------------------------------------

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._most.clear()
        self.times = StepTimes()
        self._look("setup", trainer)

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        self._look("forward", trainer)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look("backward", trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        self._look("step", trainer)

    @override
    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if not trainer.sanity_checking:
            self._look("validation", trainer)

    def _look(self, point: str, trainer: pl.Trainer) -> None:
        held = {**held_by(trainer), **allocated_on(trainer.strategy.root_device)}
        if point == "step" and isinstance(trainer.strategy, ZeROStrategy):
            assert trainer.strategy.engine is not None
            ledger = trainer.strategy.engine.comm.transport.ledger
            # Freed by now: take the maximum.
            held[_STAGING], self.times = ledger.most_staged, ledger.total_times
        self._most[point] |= Counter(held)

    # -- what is shown ---------------------------------------------------------------------------

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        own = [[self._most[point][kind] for kind in _ROWS] for point in POINTS]
        most = strategy.reduce(torch.tensor(own, device=strategy.root_device), reduce_op="max")
        self.measured = {
            point: dict(zip(_ROWS, row, strict=True))
            for point, row in zip(POINTS, most.tolist(), strict=True)
            if any(row)
        }
        for logger in trainer.loggers:
            logger.log_metrics(
                {
                    f"memory/{point}/{kind}": count
                    for point, kinds in self.measured.items()
                    for kind, count in kinds.items()
                    if count
                },
                step=trainer.global_step,
            )

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        rank_zero_info(self.text(trainer.world_size))
        if self.report is not None and trainer.is_global_zero:
            self.report.mkdir(parents=True, exist_ok=True)
            facts = {"measured": self.measured, "times": self.times._asdict()}
            (self.report / "memory.json").write_text(json.dumps(facts, indent=1) + "\n")

    def text(self, world_size: int) -> str:
        """Return the table of measured bytes."""
        totals: dict[str, dict[str, int | None]] = {}
        before = 0
        for point, kinds in self.measured.items():
            total = sum(kinds[kind] for kind in _COUNTED)
            totals[point] = {**kinds, "total": total, "change": total - before}
            before = total
        lines = [
            "Memory of a rank after each part of a step, the maximum over"
            f" {format_ranks(world_size)}:",
            table(totals, [*_COUNTED, "total", "change", *AWAY_ROWS, _STAGING, *ALLOCATOR]),
        ]
        if self.times.seconds:
            lines.append(f"On this rank, {self.times.describe()}")
        return "\n".join(lines)


def held_by(trainer: pl.Trainer) -> dict[str, int]:
    """Return the bytes that this rank holds now, by kind."""
    if isinstance(trainer.strategy, ZeROStrategy):
        return trainer.strategy.memory()
    module = trainer.lightning_module
    states = [[*internals.unwrapped(one).state.values()] for one in trainer.optimizers]
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return {
        "weights": sum(parameter.nbytes for parameter in module.parameters()),
        "gradients": sum(grad.nbytes for grad in grads),
        "states": sum(value.nbytes for value in tensors_in(states)),
        "buffers": sum(map(bytes_held, whole_tensors(module))),
    }


def allocated_on(device: torch.device) -> dict[str, int]:
    """Return the figures of an accelerator's allocator, or else this process's resident bytes.

    Peaks are those since the last call and are reset here, so that an old spike does not show at
    every later point.
    """
    allocator = torch.get_device_module(device)
    if not hasattr(allocator, "memory_stats"):
        pages = Path("/proc/self/statm")  # Linux has it
        own = pages.read_text().split()[1] if pages.exists() else 0
        return {"resident": int(own) * mmap.PAGESIZE}
    stats = allocator.memory_stats(device)
    allocator.reset_peak_memory_stats(device)
    reserved, peak = stats["reserved_bytes.all.peak"], stats["allocated_bytes.all.peak"]
    return {
        "allocated": stats["allocated_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
        "peak": peak,
        "fragmentation": reserved - peak,
    }
