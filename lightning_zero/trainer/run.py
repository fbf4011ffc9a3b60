"""The state of a strategy that begins anew with each call of the Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_zero.checkpoint import Saver
from lightning_zero.comm import Communicator
from lightning_zero.trainer.callbacks import AdaptedCallbacks
from lightning_zero.trainer.signals import Signals


class Removable(Protocol):
    """Anything that stands in for something of the user's or of Lightning's."""

    def remove(self) -> None:
        """Give back what was there before."""


@dataclass
class Run:
    """The state of a strategy for one call of ``fit``, ``validate``, ``test`` or ``predict``.

    It outlives the teardown, after which checkpoints can still be saved, until the next call.

    Attributes:
        comm: The ranks.
        saver: Writes checkpoints.
        callbacks: The Trainer's callbacks, as long as they are adapted.
        signals: Answers signals on all ranks together, in ``fit``.
        stand_ins: Removed at teardown, the first one first.
        is_set_up: Whether weights can be loaded at once.
        pending: A checkpoint that was read before, and whether its names must be exact.
        path: The checkpoint that was read last.
        has_agreed_to_load: Whether the ranks know that all load a checkpoint, or none does.
        has_failed: Whether an exception ends the run.
    """

    comm: Communicator
    saver: Saver
    callbacks: AdaptedCallbacks | None = None
    signals: Signals | None = None
    stand_ins: list[Removable] = field(default_factory=list)
    is_set_up: bool = False
    pending: tuple[Mapping[str, Any], bool] | None = None
    path: str = ""
    has_agreed_to_load: bool = False
    has_failed: bool = False
