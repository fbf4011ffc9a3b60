"""Signals to make room (SLURM's) and to end, answered by all ranks at one place.

A signal comes in the middle of a step, and on each rank in the middle of something else. Lightning
answers it there and then: it saves a checkpoint and queues the job again, or tells the other ranks
that the training ends. Both need all ranks, so here each only notes the signal, and they answer it
at the begin of a batch:

1. At its next batch a rank tells the others through the store, which needs nobody to take part, how
   many optimizer steps it has made.
2. When all have told, they answer at the first batch after one more step than the latest had made.

In that step each rank has received something of every other that was sent after the other had told.
So at that batch all ranks know what all have told, and no rank has passed it.
"""

from __future__ import annotations

import logging
import signal
from typing import Any

from lightning_zero.comm import Comm

log = logging.getLogger(__name__)


class Signals:
    """Stands in for the Trainer's own answers to signals, from now until :meth:`remove`.

    Args:
        trainer: Whose signal handlers are registered later.
        comm: The ranks.
    """

    def __init__(self, trainer: Any, comm: Comm) -> None:
        self._noted = [_Requeue(trainer, comm), _End(trainer, comm)]

    def answer(self) -> None:
        """At the begin of a batch: answer what has come to all ranks in time."""
        for noted in self._noted:
            if noted.number is not None:
                noted.answer_if_due()

    def remove(self) -> None:
        """Let the Trainer answer by itself again."""
        for noted in self._noted:
            noted.remove()


class _Noted:
    """One kind of signal, noted until all ranks can answer it.

    Attributes:
        number: The signal that has come; ``None`` before.
    """

    handler: str
    """The method of Lightning's that answers it."""

    def __init__(self, trainer: Any, comm: Comm) -> None:
        self.number: int | None = None
        self.trainer = trainer
        self.num_answers = 0
        self._comm = comm
        self._has_told = False
        self._connector = trainer._signal_connector
        self._answer = getattr(self._connector, self.handler)
        setattr(self._connector, self.handler, self.note)

    def note(self, number: int, frame: Any) -> None:
        """Called wherever the signal finds this rank."""
        self.number = number

    def answer_if_due(self) -> None:
        """Answer at this batch if all ranks do."""
        if not self._is_due():
            return
        number, self.number = self.number, None
        self._has_told = False
        self.num_answers += 1
        self._answer(number, None)

    def _is_due(self) -> bool:
        name, step = f"{self.handler}/{self.num_answers}", self.trainer.global_step
        if not self._has_told:
            self._comm.post(name, str(step))
            self._has_told = True
        told = self._comm.posted(name)
        return told is not None and (len(told) == 1 or step > max(map(int, told)))

    def remove(self) -> None:
        delattr(self._connector, self.handler)
        if self.number is not None:
            log.warning(
                "Rank %d was sent %s, but the training ended before all ranks had been sent it and"
                " had made another step. It was not answered.",
                self._comm.rank,
                signal.Signals(self.number).name,
            )


class _Requeue(_Noted):
    """SLURM's signal to make room."""

    handler = "_slurm_sigusr_handler_fn"


class _End(_Noted):
    """The signal to end."""

    handler = "_sigterm_notifier_fn"

    def note(self, number: int, frame: Any) -> None:
        """Pass it on to the ranks that this process started, which nobody else may know of."""
        if self.number is not None or self.num_answers:
            return
        self.number = number
        launcher = self.trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(number)
