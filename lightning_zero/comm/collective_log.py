"""The collectives that this rank has begun, and the one it waits for.

Every transfer is logged, so logging takes only a few calls and no message; the watchdog reads the
log from another thread.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from types import FrameType
from typing import Any, NamedTuple


class CollectiveId(NamedTuple):
    """One collective.

    Attributes:
        name: Its name, as shown in errors.
        channel: Collectives of one channel are told apart by their order; by default its name.
        number: Its number in its channel, from 1.
    """

    name: str
    channel: str
    number: int


class Wait(NamedTuple):
    """A wait for a collective.

    Attributes:
        collective: The collective.
        number: The number of the wait.
        since: Its start by ``time.monotonic``.
        frame: The function that waits.
    """

    collective: CollectiveId
    number: int
    since: float
    frame: FrameType


class CollectiveLog:
    """The collectives of this rank.

    Attributes:
        step: Optimizer steps that have ended.
        events: What has happened since the last sync point that must happen in the same order on
            all ranks.
        untagged: The last collective that only its order identifies, if there was one.
        explain: Called with the error of a collective that failed; may raise a better one.
        verdict: The error that ended the run on all ranks.
        is_over: Whether the connections are given up, so that every collective raises the verdict.
            Until then, collectives that the others have begun too still end.
        begun: How many collectives of each channel have begun.
        waiting: The wait that is under way, if any.
    """

    def __init__(self) -> None:
        self.step = 0
        self.events: list[str] = []
        self.untagged: CollectiveId | None = None
        self.explain: Callable[[BaseException], None] = lambda _: None
        self.verdict = ""
        self.is_over = False
        self.begun: Counter[str] = Counter()
        self.waiting: Wait | None = None
        self._numbers = itertools.count(1)

    def begin(self, name: str, channel: str = "") -> CollectiveId:
        """Note that this rank begins a collective."""
        if self.is_over:
            raise RuntimeError(self.verdict)
        channel = channel or name
        self.begun[channel] += 1
        return CollectiveId(name, channel, self.begun[channel])

    def begin_untagged(self, name: str, channel: str) -> CollectiveId:
        """Note that this rank begins a collective that only its order identifies."""
        collective = self.untagged = self.begin(name, channel)
        self.events.append(name)
        return collective

    def wait(self, collective: CollectiveId, works: Iterable[Any]) -> None:
        """Wait for ``works``, which end when the others have begun the collective too.

        Like :meth:`wait_for`, whose context would cost six calls for every message.
        """
        if self.is_over:
            # Gloo may wait forever for works after one has failed.
            raise RuntimeError(self.verdict)
        self.waiting = Wait(collective, next(self._numbers), monotonic(), sys._getframe(1))
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self.explain(error)
            raise
        finally:
            self.waiting = None

    @contextlib.contextmanager
    def wait_for(self, collective: CollectiveId) -> Iterator[None]:
        """Mark code that waits for the others.

        Raises:
            RuntimeError: Ranks wait for each other in different places.
        """
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals["__name__"] in ("contextlib", __name__):
            frame = frame.f_back
        self.waiting = Wait(collective, next(self._numbers), monotonic(), frame)
        try:
            with self.explained():
                yield
        finally:
            self.waiting = None

    @contextlib.contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Begin a collective and mark code that waits for it."""
        with self.wait_for(self.begin(name)):
            yield

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Mark code that may find another rank gone: its errors are passed to :attr:`explain`."""
        try:
            yield
        except RuntimeError as error:
            self.explain(error)
            raise
