"""The state that a strategy keeps for one call of the Trainer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_zero.comm import Communicator
from lightning_zero.engine import Engine
from lightning_zero.fabric import Checkpoints
from lightning_zero.trainer.callbacks import AdaptedCallbacks
from lightning_zero.trainer.precision import ZeROPrecision
from lightning_zero.trainer.signals import Signals

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)


@dataclass
class Run:
    """The state of a strategy for one call of ``fit``, ``validate``, ``test`` or ``predict``.

    Kept beyond teardown until the next call, because checkpoints can still be saved in between.

    Attributes:
        comm: Connects the ranks.
        checkpoints: Saves and loads.
        callbacks: The Trainer's callbacks while they are adapted.
        signals: Answers signals on all ranks together, in ``fit``.
        stand_ins: Undoes replacements at teardown, last one first.
        is_set_up: Whether weights can be loaded at once.
        pending: Weights read before setup, and whether names must match exactly.
        path: The checkpoint read last.
        has_agreed_to_load: Whether the ranks agreed that all load a checkpoint, or none does.
        has_failed: Whether an exception ends the run.
        restores: Whether to make the module whole at the end.
    """

    comm: Communicator
    checkpoints: Checkpoints
    callbacks: AdaptedCallbacks | None = None
    signals: Signals | None = None
    stand_ins: ExitStack = field(default_factory=ExitStack)
    is_set_up: bool = False
    pending: tuple[Mapping[str, Any], bool] | None = None
    path: str = ""
    has_agreed_to_load: bool = False
    has_failed: bool = False
    restores: bool = True

    def may_gather(self, engine: Engine) -> bool:
        """Return whether weights can be made whole; warn if an exception prevents that."""
        if not self.has_failed:
            return True
        if self.comm.control.world_size > 1:
            log.warning(
                "An exception ended the run. The parameters stay sharded, as whole weights need all"
                " ranks. Resume from a checkpoint."
            )
            return False
        if engine.is_torn:
            log.warning(
                "An optimizer step or a load was interrupted halfway, so whole weights would mix"
                " new and old values. The parameters stay sharded. Resume from a checkpoint."
            )
        return not engine.is_torn


def facts_of(trainer: pl.Trainer, precision: ZeROPrecision) -> dict[str, dict[str, Any]]:
    """Return what must be equal on all ranks besides the model and the settings."""
    names = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
    facts = {
        "The Trainer": {
            "function": trainer.state.fn,
            "precision": str(precision.precision),
            **{name: getattr(trainer, name) for name in names},
            "accumulation schedules": [
                callback.scheduling
                for callback in callbacks_of(trainer)
                if isinstance(callback, GradientAccumulationScheduler)
            ],
        },
    }
    if precision.scaler is not None:
        facts["The loss scaler"] = dict(vars(precision.scaler))
    return facts


def callbacks_of(trainer: pl.Trainer) -> list[Any]:
    """Return the Trainer's callbacks, an attribute that its type lacks."""
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]
