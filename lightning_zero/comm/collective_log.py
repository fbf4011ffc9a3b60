"""The collectives that this rank has begun, and the one it waits for.

Every transfer is logged, so logging takes only a few calls and no message; the watchdog reads the
log from another thread.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import Any, NamedTuple


class CollectiveId(NamedTuple):
    """One collective.

    Attributes:
        place: Its name, as shown in errors.
        channel: Collectives of one channel are told apart by their order; by default its name.
        number: Its number in its channel, from 1.
    """

    place: str
    channel: str
    number: int


class CollectiveLog:
    """The collectives of this rank.

    Attributes:
        step: Optimizer steps that have ended.
        explain: Called with the error of a collective that failed; may raise a better one.
        verdict: The error that ended the run on all ranks: every collective raises it.
        begun: How many collectives of each channel have begun.
        waiting: The collective that is waited for, the number of the wait, and its start by
            ``time.monotonic``.
        is_busy: Whether the rank is in a loop of sends and receives, which is not waiting.
        thread: The thread that waits.
    """

    def __init__(self) -> None:
        self.step = 0
        self.explain: Callable[[BaseException], None] = lambda _: None
        self.verdict = ""
        self.begun: Counter[str] = Counter()
        self.waiting: tuple[CollectiveId, int, float] | None = None
        self.is_busy = False
        self.thread = threading.get_ident()
        self._numbers = itertools.count(1)

    def begin(self, place: str, channel: str = "") -> CollectiveId:
        """Note that this rank begins a collective."""
        if self.verdict:
            raise RuntimeError(self.verdict)
        channel = channel or place
        self.begun[channel] += 1
        return CollectiveId(place, channel, self.begun[channel])

    def wait(self, collective: CollectiveId, works: Iterable[Any]) -> None:
        """Wait for ``works``, which end when the others have begun the collective too.

        Like :meth:`wait_for`, whose context would cost six calls for every message.
        """
        if self.verdict:
            # Gloo may wait forever for works after one has failed.
            raise RuntimeError(self.verdict)
        self.waiting = (collective, next(self._numbers), monotonic())
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
        self.waiting = (collective, next(self._numbers), monotonic())
        try:
            with self.explained():
                yield
        finally:
            self.waiting = None

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Begin a collective and mark code that waits for it."""
        with self.wait_for(self.begin(place)):
            yield

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Mark a loop of sends and receives, which does not count as waiting."""
        self.is_busy = True
        try:
            with self.explained():
                yield
        finally:
            self.is_busy = False

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Mark code that may find another rank gone: its errors are passed to :attr:`explain`."""
        try:
            yield
        except RuntimeError as error:
            self.explain(error)
            raise
