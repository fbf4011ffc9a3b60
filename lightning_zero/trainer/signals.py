"""Signals to requeue the job (SLURM) and to end it, answered by all ranks at the same batch.

A signal arrives in the middle of a step, and at a different place on each rank. Lightning answers
it right there: it saves a checkpoint and requeues the job, or tells the other ranks that training
ends. Both need all ranks, so here a rank only notes the signal, and all answer it together at the
start of a batch:

1. At its next batch, a rank publishes how many optimizer steps it has taken, in the store, which
   needs no other rank to take part.
2. When all have published, they answer at the first batch after more steps than any published.

In the step before that batch, each rank receives data that every other sent after publishing. So
all ranks know all numbers by then, and no rank has passed the batch.
"""

from __future__ import annotations

import logging
import signal
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zero.comm import Control
from lightning_zero.engine import Replacements
from lightning_zero.trainer import internals

log = logging.getLogger(__name__)


class Signals:
    """Answers to signals that replace the Trainer's own until :meth:`remove`.

    Args:
        trainer: A Trainer that has not registered its signal handlers yet.
        control: Exchanges decisions between the ranks.
    """

    def __init__(self, trainer: Any, control: Control) -> None:
        self._noted = [_Requeue(trainer, control), _End(trainer, control)]
        self._replaced = Replacements()
        self._trainer = trainer
        loop = trainer.fit_loop.epoch_loop
        if hasattr(loop, internals.ASKS_FOR_END):
            self._replaced.wrap(loop, internals.ASKS_FOR_END, lambda _: self._end_if_answered())

    def _end_if_answered(self) -> None:
        # All ranks have answered at the same batch, so none needs to ask another, and a device is
        # not drained at each batch to read its answer.
        if self._trainer.received_sigterm:
            raise SIGTERMException

    def answer(self) -> None:
        """Answer, at the start of a batch, the signals that are due."""
        for noted in self._noted:
            if noted.number is not None:
                noted.answer_if_due()

    def remove(self) -> None:
        """Give the Trainer its own handlers back."""
        self._replaced.remove()
        for noted in self._noted:
            noted.remove()


class _Noted:
    """One kind of signal, noted until all ranks can answer it.

    Attributes:
        number: The signal that was noted, or ``None``.
    """

    handler: str
    """The name of Lightning's method that answers it."""

    def __init__(self, trainer: Any, control: Control) -> None:
        self.number: int | None = None
        self.trainer = trainer
        self.num_answers = 0
        self._control = control
        self._has_published = False
        self._replaced = Replacements()
        connector = internals.signal_connector(trainer)
        self._answer = getattr(connector, self.handler)
        self._replaced.wrap(connector, self.handler, lambda _, *args: self.note(*args))

    def note(self, number: int, frame: Any) -> None:
        """Note the signal, wherever it interrupts this rank."""
        self.number = number

    def answer_if_due(self) -> None:
        """Answer at this batch if all ranks do."""
        if not self._is_due():
            return
        number, self.number = self.number, None
        self._has_published = False
        self.num_answers += 1
        self._answer(number, None)

    def _is_due(self) -> bool:
        name, step = f"{self.handler}/{self.num_answers}", self.trainer.global_step
        if not self._has_published:
            self._control.board.put(name, str(step))
            self._has_published = True
        steps = self._control.board.get(name)
        return steps is not None and (len(steps) == 1 or step > max(map(int, steps)))

    def remove(self) -> None:
        self._replaced.remove()
        if self.number is not None:
            log.warning(
                "Rank %d received %s, but training ended before all ranks had received it and taken"
                " another step. It was ignored.",
                self._control.rank,
                signal.Signals(self.number).name,
            )


class _Requeue(_Noted):
    """SLURM's signal to requeue the job."""

    handler = internals.ANSWERS_REQUEUE


class _End(_Noted):
    """The signal to end."""

    handler = internals.ANSWERS_END

    def note(self, number: int, frame: Any) -> None:
        """Note the signal, and pass it on to ranks that only this process may know of."""
        if self.number is not None or self.num_answers:
            return
        self.number = number
        launcher = self.trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(number)
