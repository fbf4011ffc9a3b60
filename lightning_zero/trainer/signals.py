"""Signals to requeue the job (SLURM) and to end it, answered by all ranks at the same batch.

A signal arrives in the middle of a step, and at a different place on each rank. Lightning answers
it right there: it saves a checkpoint and requeues the job, or tells the other ranks that training
ends. Both need all ranks, so here a rank only notes the signal. Its next message at a sync point,
such as that at the end of each backward pass, tells the others, and all answer it together at the
start of the next batch.
"""

from __future__ import annotations

import functools
import logging
import signal
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zero.comm import Control
from lightning_zero.engine import Replacements
from lightning_zero.trainer import internals

log = logging.getLogger(__name__)

_KINDS = (internals.ANSWERS_REQUEUE, signal.SIGUSR1), (internals.ANSWERS_END, signal.SIGTERM)
"""Lightning's methods that answer a signal, and the signals that they usually answer."""


class Signals:
    """Answers to signals that replace the Trainer's own until :meth:`remove`.

    Args:
        trainer: A Trainer that has not registered its signal handlers yet.
        control: Exchanges decisions between the ranks.
    """

    def __init__(self, trainer: Any, control: Control) -> None:
        self._trainer, self._control = trainer, control
        self._received, self._answered = [0, 0], [0, 0]
        self._replaced = Replacements()
        connector = internals.signal_connector(trainer)
        self._answers = [getattr(connector, name) for name, _ in _KINDS]
        for kind, (name, _) in enumerate(_KINDS):
            self._replaced.wrap(connector, name, functools.partial(self._note, kind))
        loop = trainer.fit_loop.epoch_loop
        if hasattr(loop, internals.ASKS_FOR_END):
            self._replaced.wrap(loop, internals.ASKS_FOR_END, lambda _: self._end_if_answered())

    def _note(self, kind: int, _: Any, number: int, frame: Any) -> None:
        """Note the signal, wherever it interrupts this rank."""
        self._received[kind] += 1
        # Not one that comes after the others' has been answered.
        if self._received[kind] == self._answered[kind] + 1:
            self._control.channel.notices[kind] = min(self._received[kind], 255)
            launcher = self._trainer.strategy.launcher
            if _KINDS[kind][0] == internals.ANSWERS_END and launcher is not None:
                launcher.kill(number)  # to ranks that only this process may know of

    def _end_if_answered(self) -> None:
        # All ranks have answered at the same batch, so none needs to ask another, and a device is
        # not drained at each batch to read its answer.
        if self._trainer.received_sigterm:
            raise SIGTERMException

    def answer(self) -> None:
        """Answer, at the start of a batch, the signals that any rank has received."""
        for kind, number in enumerate(self._control.channel.noticed):
            if number > self._answered[kind]:
                self._answered[kind] = number
                self._answers[kind](_KINDS[kind][1], None)

    def remove(self) -> None:
        """Give the Trainer its own handlers back."""
        self._replaced.remove()
        for kind, (_, usual) in enumerate(_KINDS):
            if self._received[kind] > self._answered[kind]:
                log.warning(
                    "Rank %d received %s, but training ended before the next sync point of all"
                    " ranks. It was ignored.",
                    self._control.rank,
                    usual.name,
                )
