"""SLURM's signal to make room, answered by all ranks at one place.

The signal comes in the middle of a step, and on each rank in the middle of something else.
Lightning answers it there and then: it saves a checkpoint and queues the job again. Here all ranks
save together, so each only notes the signal, and they answer it at the begin of a batch:

1. At its next batch a rank tells the others through the store, which needs nobody to take part, how
   many optimizer steps it has made.
2. When all have told, they answer at the first batch after one more step than the latest had made.

In that step each rank has received something of every other that was sent after the other had told.
So at that batch all ranks know what all have told, and no rank has passed it.
"""

from __future__ import annotations

import logging
from typing import Any

from lightning_zero.comm import Comm

log = logging.getLogger(__name__)


class Requeue:
    """Stands in for the Trainer's own answer to the signal, from now until :meth:`remove`.

    Args:
        trainer: Whose signal handlers are registered later.
        comm: The ranks.
    """

    def __init__(self, trainer: Any, comm: Comm) -> None:
        self._trainer = trainer
        self._comm = comm
        self._num_answered = 0
        self._signal: int | None = None
        self._has_told = False
        self._answer = trainer._signal_connector._slurm_sigusr_handler_fn
        trainer._signal_connector._slurm_sigusr_handler_fn = self._note

    def _note(self, signal: int, frame: Any) -> None:
        self._signal = signal

    def answer_if_due(self) -> None:
        """At the begin of a batch: answer the signal, if it has come to all ranks in time."""
        if self._signal is None or not self._is_due():
            return
        signal, self._signal = self._signal, None
        self._has_told = False
        self._num_answered += 1
        self._answer(signal, None)

    def _is_due(self) -> bool:
        name, step = f"requeue/{self._num_answered}", self._trainer.global_step
        if not self._has_told:
            self._comm.post(name, str(step))
            self._has_told = True
        told = self._comm.posted(name)
        return told is not None and (len(told) == 1 or step > max(map(int, told)))

    def remove(self) -> None:
        """Let the Trainer answer by itself again."""
        del self._trainer._signal_connector._slurm_sigusr_handler_fn
        if self._signal is not None:
            log.warning(
                "Rank %d was told to make room, but the training ended before all ranks had been"
                " told and had made another step: no checkpoint was saved for the next job, and the"
                " job was not queued again.",
                self._comm.rank,
            )
