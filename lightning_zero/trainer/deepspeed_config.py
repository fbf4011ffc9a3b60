"""Demands of a DeepSpeed configuration on the Trainer, the loss scaler and the optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from lightning_zero.deepspeed import Config
from lightning_zero.optimizer import LossScaler
from lightning_zero.trainer.internals import unwrapped

if TYPE_CHECKING:
    import lightning.pytorch as pl


@dataclass(frozen=True)
class Demands:
    """The demands of a DeepSpeed configuration in one call of ``fit``.

    A contradiction between them and the Trainer or the module raises a ``ValueError``.
    """

    config: Config
    trainer: pl.Trainer
    module: pl.LightningModule

    def act(self, scaler: LossScaler | None) -> None:
        """Set the Trainer's and the scaler's values, and warn once about keys without effect."""
        config = self.config
        for name, default in (("gradient_clip_val", None), ("accumulate_grad_batches", 1)):
            given = getattr(self.trainer, name)
            wanted = config.trainer_value(name, given, default)
            if wanted != given and not self.module.automatic_optimization:
                raise ValueError(
                    f"The DeepSpeed configuration sets {name}={wanted}, but the module uses manual"
                    " optimization. Implement it in `training_step`, and remove the key."
                )
            setattr(self.trainer, name, wanted)
        if scaler is not None:
            for name, value in config.scaler.items():
                setattr(scaler, name, value)
            config.scaler.clear()
        if config.warnings:
            rank_zero_warn("\n".join(config.warnings))
            config.warnings.clear()

    def optimizers(self) -> list[Optimizer]:
        """Build the configured optimizer; none if that is left to the module."""
        if self.config.optimizer is None:
            return []
        if is_overridden("configure_optimizers", self.module):
            rank_zero_info(
                "The optimizer is that of the DeepSpeed configuration; configure_optimizers is not"
                " called."
            )
        return [self.config.optimizer.build(self.module.parameters())]

    def schedulers(
        self, optimizers: list[Optimizer], given: list[LRSchedulerConfig]
    ) -> list[LRSchedulerConfig]:
        """Build the configured scheduler; return those ``given`` if that is left to the module."""
        if self.config.scheduler is None:
            return given
        if len(optimizers) != 1:
            raise ValueError(
                "The DeepSpeed configuration has a scheduler block, which requires one optimizer,"
                f" but configure_optimizers returns {len(optimizers)}. Remove the block."
            )
        if given:
            rank_zero_info(
                "The scheduler is that of the DeepSpeed configuration; configure_optimizers'"
                f" {type(given[0].scheduler).__name__} is not used."
            )
            for group in optimizers[0].param_groups:  # a warm-up has changed the rate by now
                group["lr"] = group.pop("initial_lr", group["lr"])
        scheduler = self.config.scheduler.build(
            unwrapped(optimizers[0]), lambda: self.trainer.estimated_stepping_batches
        )
        return [LRSchedulerConfig(scheduler, interval="step")]
