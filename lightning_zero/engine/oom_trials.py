"""Trial steps that may fail on one rank without leaving the others waiting for it.

A search for the largest batch runs steps until memory is exhausted, on one rank sooner than on the
others, which would then wait for its next message forever. In a trial, the ranks therefore ask each
other before every message, over a separate channel, whether all still go on::

    rank 0   ask  gather  ask  gather  out of memory: say so
    rank 1   ask  gather  ask  gather                 ask: raises as if it were its own

The memory for a message is allocated before the ranks ask. So all ranks have sent the same
messages, nothing is left over, and the next trial may begin. A rank that fails within a context
that ends with a message (``gathered(..., modify=True)``) asks as well: if all others come to the
same message, it is sent; otherwise that rank's error ends the trial there.

Messages that user code sends through ``torch.distributed`` itself are not covered: if another rank
waits there, the watchdog ends the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lightning_zero.engine.engine import Engine

_GOES_ON, _OUT_OF_MEMORY, _FAILED = 0, 1, 2


class OomTrials:
    """Runs of a function that succeed on all ranks or on none; all ranks construct it together."""

    def __init__(self, engine: Engine, is_out_of_memory: Callable[[BaseException], bool]) -> None:
        self._engine = engine
        self._channel = engine.comm.control.separate()
        self._is_out_of_memory = is_out_of_memory
        self._verdict = _GOES_ON
        self._handled: BaseException | None = None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function``, on all ranks.

        Raises:
            RuntimeError: Another rank failed; the message says how.
            Exception: The function's own.
        """
        self._verdict, self._handled = _GOES_ON, sys.exc_info()[1]
        log = self._engine.comm.control.log
        try:
            log.before = self._ask
            try:
                result = function(*args, **kwargs)
                self._ask("the end of a trial")
                return result
            finally:
                log.before = None
        except Exception as error:
            mine = self._kind(error)
            if self._verdict == _GOES_ON:
                self._agree(mine)
            self._engine.reset()
            if self._verdict != mine:
                # This rank ran out of memory, but another one failed for another reason.
                raise self._error() from error
            raise

    def _ask(self, place: str) -> None:
        """Before a message: raise if another rank failed, or this one did and not all are here."""
        error = sys.exc_info()[1]
        fails = isinstance(error, Exception) and error is not self._handled
        failing = self._kind(error) if fails else _GOES_ON
        if self._verdict == _GOES_ON:
            self._agree(_GOES_ON, failing, place)
        if self._verdict != _GOES_ON:
            raise error if error is not None and failing == self._verdict else self._error()

    def _kind(self, error: BaseException | None) -> int:
        return _OUT_OF_MEMORY if error and self._is_out_of_memory(error) else _FAILED

    def _error(self) -> RuntimeError:
        if self._verdict == _OUT_OF_MEMORY:
            # Lightning's tuner recognizes memory errors by these words.
            return RuntimeError("Another rank ran out of memory: CUDA out of memory.")
        return RuntimeError("Another rank failed in this trial; see its error for the reason.")

    def _agree(self, mine: int, failing: int = _GOES_ON, place: str = "") -> None:
        """Agree on the worst outcome of all ranks; this one's is ``mine``.

        If not all ranks are at the same ``place``, where a message is due, it is ``failing``.
        """
        log = self._engine.comm.control.log
        with log.wait_for(log.note("an agreement on whether to continue a trial")):
            outcomes = self._channel.gather_objects((mine, failing, place))
        self._verdict = max(outcome for outcome, _, _ in outcomes)
        if len({place for _, _, place in outcomes}) > 1:
            self._verdict = max(self._verdict, *(failing for _, failing, _ in outcomes))
