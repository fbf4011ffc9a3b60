"""Steps that one rank may fail at without leaving the others waiting for it.

A search for the largest batch runs steps until memory is exhausted, on one rank sooner than on
another; the others would then wait for its next message for ever. In a trial the ranks therefore
ask each other before every message, on a channel of its own, whether all still go on::

    rank 0   ask  gather  ask  gather  out of memory: tell
    rank 1   ask  gather  ask  gather                 ask: raises as if it were its own

Every message that one rank has sent all have sent, so nothing is left over, and the next trial may
begin. What user code sends by ``torch.distributed`` itself is not asked for: if another rank waits
there, the watch ends the run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_zero.engine import Engine

_GOES_ON, _OUT_OF_MEMORY, _FAILED = 0, 1, 2
_MESSAGES = ("gather", "reduce", "broadcast", "sum", "max", "broadcast_object", "gather_objects")


class Trials:
    """Runs of a function that succeed on all ranks or fail on all ranks.

    All ranks construct it together.

    Args:
        engine: Whose step is given up when a run fails.
        is_out_of_memory: Whether an error says that memory is exhausted.
    """

    def __init__(
        self,
        engine: Engine,
        is_out_of_memory: Callable[[BaseException], bool],
    ) -> None:
        self._engine = engine
        self._channel = engine.comm.apart()
        self._is_out_of_memory = is_out_of_memory
        self._verdict = _GOES_ON
        self._is_running = False

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function``; all ranks do.

        Raises:
            RuntimeError: Another rank failed, and this is the word for what befell it.
            Exception: The function's own.
        """
        self._verdict = _GOES_ON
        try:
            with self._asking():
                result = function(*args, **kwargs)
                self.ask()
                return result
        except Exception as error:
            mine = self._verdict
            if mine == _GOES_ON:
                mine = _OUT_OF_MEMORY if self._is_out_of_memory(error) else _FAILED
                self._agree(mine)
            self._engine.reset()
            if self._verdict != mine:
                # Memory ended here, but something else went wrong elsewhere.
                raise self._word() from error
            raise

    @contextmanager
    def _asking(self) -> Iterator[None]:
        comm = self._engine.comm
        talking = [(comm, name) for name in _MESSAGES] + [(comm.meetings, "call")]
        for talker, name in talking:
            setattr(talker, name, functools.partial(self._asked, getattr(talker, name)))
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
            for talker, name in talking:
                delattr(talker, name)

    def _asked(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.ask()
        return method(*args, **kwargs)

    def ask(self) -> None:
        """Before a message past the engine: raise if another rank failed in a run that goes on."""
        if not self._is_running:
            return
        if self._verdict == _GOES_ON:
            self._agree(_GOES_ON)
        if self._verdict != _GOES_ON:
            raise self._word()

    def _word(self) -> RuntimeError:
        if self._verdict == _OUT_OF_MEMORY:
            # Lightning's tuner knows memory errors by these words.
            return RuntimeError("Another rank ran out of memory: CUDA out of memory.")
        return RuntimeError("Another rank failed in this trial; its own error says why.")

    def _agree(self, mine: int) -> None:
        with self._engine.comm.watch.at("a word on whether all ranks go on with a trial"):
            self._verdict = max(self._channel.gather_objects(mine))
