"""Signals to requeue the job (SLURM's) and to end, answered by all ranks at one place.

A signal comes in the middle of a step, and on each rank in the middle of something else. Lightning
answers it there and then: it saves a checkpoint and queues the job again, or informs the other
ranks that the training ends. Both need all ranks, so here each only notes the signal, and they
answer it at the begin of a batch:

1. At its next batch a rank publishes in the store, which needs nobody to take part, how many
   optimizer steps it has made.
2. When all have, they answer at the first batch after one more step than the latest had made.

In that step each rank has received something of every other that was sent after the other had
published. So at that batch all ranks know all numbers, and no rank has passed it.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any

from lightning_zero.comm import Control
from lightning_zero.engine import Replacements
from lightning_zero.trainer import internals

log = logging.getLogger(__name__)


class Signals:
    """Stands in for the Trainer's own answers to signals, from now until :meth:`remove`.

    Args:
        trainer: Whose signal handlers are registered later.
        control: The ranks.
    """

    def __init__(self, trainer: Any, control: Control) -> None:
        self._noted = [_Requeue(trainer, control), _End(trainer, control)]
        self._replaced = Replacements()
        self._control = control
        loop = trainer.fit_loop.epoch_loop
        if hasattr(loop, internals.ASKS_FOR_END):
            self._replaced.wrap(loop, internals.ASKS_FOR_END, self._ask)

    def _ask(self, inner: Callable[[], None]) -> None:
        with self._control.log.at("the begin of a batch"):
            inner()

    def answer(self) -> None:
        """At the begin of a batch: answer what has come to all ranks in time."""
        for noted in self._noted:
            if noted.number is not None:
                noted.answer_if_due()

    def remove(self) -> None:
        """Let the Trainer answer by itself again."""
        self._replaced.remove()
        for noted in self._noted:
            noted.remove()


class _Noted:
    """One kind of signal, noted until all ranks can answer it.

    Attributes:
        number: The signal that has come; ``None`` before.
    """

    handler: str
    """Lightning's method that answers it."""

    def __init__(self, trainer: Any, control: Control) -> None:
        self.number: int | None = None
        self.trainer = trainer
        self.num_answers = 0
        self._control = control
        self._has_published = False
        self._replaced = Replacements()
        connector = internals.signal_connector(trainer)
        self._answer = self._replaced.put(connector, self.handler, self.note)

    def note(self, number: int, frame: Any) -> None:
        """Called wherever the signal finds this rank."""
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
                "Rank %d was sent %s, but the training ended before all ranks had been sent it and"
                " had made another step. It was not answered.",
                self._control.rank,
                signal.Signals(self.number).name,
            )


class _Requeue(_Noted):
    """SLURM's signal that the job will be requeued."""

    handler = internals.ANSWERS_REQUEUE


class _End(_Noted):
    """The signal to end."""

    handler = internals.ANSWERS_END

    def note(self, number: int, frame: Any) -> None:
        """Pass it on to the ranks that this process started, which nobody else may know of."""
        if self.number is not None or self.num_answers:
            return
        self.number = number
        launcher = self.trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(number)
