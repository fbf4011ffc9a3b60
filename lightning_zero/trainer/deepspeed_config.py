"""Apply a DeepSpeed configuration to the Trainer, the loss scaler and the optimizers.

A contradiction between it and the Trainer or the module raises a ``ValueError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_zero.deepspeed import Config
from lightning_zero.trainer.internals import unwrapped

if TYPE_CHECKING:
    import lightning.pytorch as pl


def apply(
    config: Config, trainer: pl.Trainer, module: pl.LightningModule, scaler: GradScaler | None
) -> None:
    """Set the Trainer's and the scaler's values, and warn once about keys without effect."""
    for name, default in (("gradient_clip_val", None), ("accumulate_grad_batches", 1)):
        given = getattr(trainer, name)
        wanted = config.trainer_value(name, given, default)
        if wanted != given and not module.automatic_optimization:
            raise ValueError(
                f"The DeepSpeed configuration sets {name}={wanted}, but the module uses manual"
                " optimization. Implement it in `training_step`, and remove the key."
            )
        setattr(trainer, name, wanted)
    if scaler is not None:
        scaler.load_state_dict({**scaler.state_dict(), **config.scaler})
        config.scaler.clear()
    if config.warnings:
        rank_zero_warn("\n".join(config.warnings))
        config.warnings.clear()


def optimizers_of(config: Config, module: pl.LightningModule) -> list[Optimizer]:
    """Build the configured optimizer; none if that is left to the module."""
    if config.optimizer is None:
        return []
    if is_overridden("configure_optimizers", module):
        rank_zero_info(
            "The optimizer is that of the DeepSpeed configuration; configure_optimizers is not"
            " called."
        )
    return [config.optimizer.build(module.parameters())]


def schedulers_of(
    config: Config,
    trainer: pl.Trainer,
    optimizers: list[Optimizer],
    given: list[LRSchedulerConfig],
) -> list[LRSchedulerConfig]:
    """Build the configured scheduler; return those ``given`` if that is left to the module."""
    if config.scheduler is None:
        return given
    if len(optimizers) != 1:
        raise ValueError(
            "The DeepSpeed configuration has a scheduler block, which requires one optimizer, but"
            f" configure_optimizers returns {len(optimizers)}. Remove the block."
        )
    if given:
        rank_zero_info(
            "The scheduler is that of the DeepSpeed configuration; configure_optimizers'"
            f" {type(given[0].scheduler).__name__} is not used."
        )
        for group in optimizers[0].param_groups:  # a warm-up has changed the rate by now
            group["lr"] = group.pop("initial_lr", group["lr"])
    scheduler = config.scheduler.build(
        unwrapped(optimizers[0]), lambda: trainer.estimated_stepping_batches
    )
    return [LRSchedulerConfig(scheduler, interval="step")]
