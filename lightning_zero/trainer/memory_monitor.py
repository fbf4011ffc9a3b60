"""A callback that measures each rank's memory in training, beside its prediction."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_zero.comm import StepTimes
from lightning_zero.engine import Engine
from lightning_zero.memory import (
    AWAY_ROWS,
    KINDS,
    Estimate,
    ModelPlan,
    estimate_of,
    format_bytes,
    format_ranks,
    rest_table,
    table,
    write_report,
)
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
    """Measures memory by kind through a step, logs it, and compares it with the prediction.

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
        report: Folder for ``memory.json`` and ``memory.html``, which are written when training
            ends; the page has pictures if matplotlib is installed.
        predict: Compare with the estimate for this model, its optimizers and its first batch.

    Attributes:
        measured: Bytes by kind at each point, the maximum over all steps and ranks.
        predicted: The estimate for this rank.
        times: Times of this rank's steps with offload, without the first step.
    """

    def __init__(self, *, report: str | Path | None = None, predict: bool = True) -> None:
        self.report = None if report is None else Path(report)
        self.predict = predict
        self.measured: dict[str, dict[str, int]] = {}
        self.predicted: Estimate | None = None
        self.times = StepTimes()
        self._own: dict[str, int] = {}
        self._subject = "a rank"
        self._most = _zeros()
        self._is_logged = False

    # -- the points ------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_subject": None}  # its optimizers

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._most = _zeros()
        self._subject, self.predicted, self._own = "a rank", None, {}
        self.times = StepTimes()
        self._look("setup", trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.predict and self.predicted is None:
            self._foresee(trainer, batch)

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
        if point == "step" and (engine := _engine_of(trainer)) is not None:
            # Freed by now: take the maximum.
            held[_STAGING] = engine.comm.transport.ledger.most_staged
        most = self._most[POINTS.index(point)]
        torch.maximum(most, torch.tensor([held.get(kind, 0) for kind in _ROWS]), out=most)
        self._is_logged = False
        if point == "step":
            self._own = held

    # -- the prediction --------------------------------------------------------------------------

    def _foresee(self, trainer: pl.Trainer, batch: Any) -> None:
        strategy, engine = trainer.strategy, _engine_of(trainer)
        if not isinstance(strategy, ZeROStrategy) or engine is None:
            self.predict = False
            return
        chosen, mesh = strategy.settings, engine.comm.mesh
        settings: dict[str, Any] = {
            "num_microbatches": trainer.accumulate_grad_batches,
            "shard": mesh.shard.size if mesh.replicate.size > 1 else "all",
            "shares_memory": engine.comm.transport.reads_peers,
        }
        for given, what in ((batch, "activations"), (None, "memory")):
            try:
                subject = ModelPlan.of_engine(
                    engine,
                    [internals.unwrapped(optimizer) for optimizer in trainer.optimizers],
                    precision=str(strategy.precision_plugin.precision),
                    batch=given,
                )
                self.predicted = estimate_of(
                    subject,
                    chosen.stage,
                    mesh.data.size,
                    rank=mesh.data.rank,
                    offload=engine.sharded.settings.offload,
                    **settings,
                )
                self._subject = subject.describe()
                return
            except ValueError as error:
                rank_zero_warn(f"MemoryMonitor cannot predict {what}: {error}")
        self.predict = False

    @property
    def differences(self) -> list[str]:
        """One sentence for each kind whose bytes between steps differ from the prediction."""
        if self.predicted is None or not self._own:
            return []
        found = {k: self._own.get(k, 0) - count for k, count in self.predicted.rests.items()}
        return [
            f"{kind}: {format_bytes(abs(n))} {'more' if n > 0 else 'less'} than predicted."
            for kind, n in found.items()
            if n
        ]

    # -- what is shown ---------------------------------------------------------------------------

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        # On the device only to be reduced: each copy there would wait for the device.
        most = strategy.reduce(self._most.to(strategy.root_device, copy=True), reduce_op="max")
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
        self._is_logged = True

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._is_logged:
            self.on_train_epoch_end(trainer, pl_module)
        if self._own:
            # Since the last measurement, hooks of the module may have changed what is held.
            self._own = {**held_by(trainer), _STAGING: self._own.get(_STAGING, 0)}
        if (engine := _engine_of(trainer)) is not None:
            self.times = engine.comm.transport.ledger.total_times
        rank_zero_info(self.text(trainer.world_size))
        if self.report is not None and trainer.is_global_zero:
            write_report(
                self.report,
                subject=self._subject,
                measured=self.measured,
                held=self._own,
                predicted=self.predicted,
                times=self.times,
            )

    def text(self, world_size: int) -> str:
        """Return the tables of measured and predicted bytes."""
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
        return "\n".join([*lines, *self._explained()])

    def _explained(self) -> list[str]:
        if self.predicted is None or not self._own:
            return []
        lines = [
            "This rank between steps, predicted and measured:",
            rest_table({"predicted": self.predicted.rests, "measured": self._own}),
            *self.differences,
        ]
        of_steps = [one.host for one in self.predicted.snapshots if one.phase == "step"]
        if staged := max((host.get("staging", 0) for host in of_steps), default=0):
            lines.append(
                f"The optimizer's step was predicted to stage at most {format_bytes(staged)} on the"
                f" host; it staged {format_bytes(self._own.get(_STAGING, 0))}."
            )
        peak = self.predicted.peak
        lines.append(
            f"Predicted peak within a step: {format_bytes(peak.total)}, {peak.label}: "
            + ", ".join(f"{k} {format_bytes(n)}" for k, n in peak.kinds.items() if n)
            + "."
        )
        return lines


def _zeros() -> Tensor:
    """Return bytes ``[points, rows]``, as exact integers."""
    return torch.zeros(len(POINTS), len(_ROWS), dtype=torch.int64)


def _engine_of(trainer: pl.Trainer) -> Engine | None:
    return trainer.strategy.engine if isinstance(trainer.strategy, ZeROStrategy) else None


def held_by(trainer: pl.Trainer) -> dict[str, int]:
    """Return the bytes that this rank holds now, by kind."""
    if isinstance(trainer.strategy, ZeROStrategy):
        return trainer.strategy.memory()
    module = trainer.lightning_module
    states = [
        value
        for optimizer in trainer.optimizers
        for state in internals.unwrapped(optimizer).state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return {
        "weights": sum(parameter.nbytes for parameter in module.parameters()),
        "gradients": sum(grad.nbytes for grad in grads),
        "states": sum(value.nbytes for value in states),
        "buffers": sum(buffer.nbytes for buffer in module.buffers()),
    }


def allocated_on(device: torch.device) -> dict[str, int]:
    """Return the figures of an accelerator's allocator, or else this process's resident memory.

    Peaks are those since the last call and are reset here, so that an old spike does not show at
    every later point.
    """
    allocator = torch.get_device_module(device)
    if not hasattr(allocator, "memory_stats"):
        return {"resident": _resident()}
    stats = allocator.memory_stats(device)
    allocator.reset_peak_memory_stats(device)
    reserved, peak = stats["reserved_bytes.all.peak"], stats["allocated_bytes.all.peak"]
    return {
        "allocated": stats["allocated_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
        "peak": peak,
        "fragmentation": reserved - peak,
    }


def _resident() -> int:
    """Return this process's resident bytes, or their peak if only that is known."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
