"""A callback that logs the traffic of a training step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_zero.comm import sum_of
from lightning_zero.trainer.strategy import ZeROStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl


class TrafficMonitor(Callback):
    """Logs the elements, bytes and collectives that a rank sends per optimizer step.

    The logged values are ``traffic/gather_bytes`` (weights), ``traffic/reduce_bytes`` (gradients)
    and the same for elements and collectives. They hold for every rank, except for times, which are
    rank 0's. With hybrid sharding they count traffic within a copy, and
    ``traffic/replicate_gather_bytes`` and so on count traffic between copies.

    With offload, ``traffic/up_bytes`` (weights) and ``traffic/down_bytes`` (gradients) pass between
    a device and its host, and ``traffic/read_bytes`` and ``traffic/write_bytes`` (states) between
    memory and files, at ``traffic/read_speed`` and ``traffic/write_speed`` bytes per second.
    ``traffic/stepping_share`` is the share of the time since the previous step that the optimizer's
    step took, ``traffic/waiting_share`` the share that it waited for files. Details are in
    ``trainer.strategy.traffic`` and ``trainer.strategy.step_times``.

    Args:
        every_n_steps: Interval between logged steps, in optimizer steps.

    Raises:
        TypeError: The trainer's strategy is not ``ZeROStrategy``.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if every_n_steps < 1:
            raise ValueError(f"Expected every_n_steps >= 1, got {every_n_steps}.")
        self.every_n_steps = every_n_steps
        self._last_logged = 0

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_logged = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, ZeROStrategy):
            raise TypeError(f"TrafficMonitor needs ZeROStrategy, got {type(strategy).__name__}.")
        step = trainer.global_step
        # There may be several batches per step.
        if step % self.every_n_steps or step == self._last_logged or not strategy.traffic:
            return
        self._last_logged = step
        values = {
            f"traffic/{verb.replace(' ', '_')}_{unit}": float(value)
            for verb in dict.fromkeys(["gather", "reduce", *(v for _, v in strategy.traffic)])
            for unit, value in sum_of(strategy.traffic, verb)._asdict().items()
        }
        if (times := strategy.step_times).seconds:
            of_files = ("read_speed", "write_speed", "waiting_share")
            names = ("stepping_share", *(of_files if times.reading or times.writing else ()))
            values |= {f"traffic/{name}": getattr(times, name) for name in names}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)
