"""Steps that one rank may fail at without leaving the others waiting for it.

A search for the largest batch runs steps until memory is exhausted, on one rank sooner than on
another; the others would then wait for its next message for ever. In a trial the ranks therefore
ask each other before every message, on a channel of its own, whether all still go on::

    rank 0   ask  gather  ask  gather  out of memory: say so
    rank 1   ask  gather  ask  gather                 ask: raises as if it were its own

Whatever a message needs memory for is allocated before it is asked for. So every message that one
rank has sent all have sent, nothing is left over, and the next trial may begin. A rank that fails
within a context whose end is a message (``gathered(..., modify=True)``) asks as well: if all others
come to the same message it is sent, and otherwise that rank's error ends the trial there.

What user code sends by ``torch.distributed`` itself is not asked for: if another rank waits there,
the watch ends the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lightning_zero.engine.engine import Engine

_GOES_ON, _OUT_OF_MEMORY, _FAILED = 0, 1, 2


class OomTrials:
    """Runs of a function that succeed on all ranks or on none, which construct it together."""

    def __init__(self, engine: Engine, is_out_of_memory: Callable[[BaseException], bool]) -> None:
        self._engine = engine
        self._channel = engine.comm.control.separate()
        self._is_out_of_memory = is_out_of_memory
        self._verdict = _GOES_ON
        self._handled: BaseException | None = None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function``; all ranks do.

        Raises:
            RuntimeError: Another rank failed, and this says how.
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
                # Memory ended here, but something else went wrong elsewhere.
                raise self._error() from error
            raise

    def _ask(self, place: str) -> None:
        """Before a message: raise if another rank failed, or if this one did and is alone here."""
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
            # Lightning's tuner knows memory errors by these words.
            return RuntimeError("Another rank ran out of memory: CUDA out of memory.")
        return RuntimeError("Another rank failed in this trial; its own error says why.")

    def _agree(self, mine: int, failing: int = _GOES_ON, place: str = "") -> None:
        """Agree on the worst outcome of all ranks, of which this one's is ``mine``.

        It would be ``failing``, were it not for the message at ``place`` that must come before.
        """
        log = self._engine.comm.control.log
        with log.wait_for(log.note("an agreement on whether all ranks go on with a trial")):
            outcomes = self._channel.gather_objects((mine, failing, place))
        self._verdict = max(outcome for outcome, _, _ in outcomes)
        if len({place for _, _, place in outcomes}) > 1:
            self._verdict = max(self._verdict, *(failing for _, failing, _ in outcomes))
