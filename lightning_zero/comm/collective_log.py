"""The collectives that this rank has begun, and the one it waits for.

Every transfer is logged, so logging takes only a few calls and no message; the watchdog reads the
log from another thread.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import zlib
from collections import Counter, deque
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


_MOST_AHEAD = 4096
"""Events by which a rank may be ahead of another and still tell whether their courses part."""


class Milestone(NamedTuple):
    """How far a rank has come on its course.

    Attributes:
        era: Grows when ranks that had parted go on.
        number: How many events it has met.
        checksum: A checksum of all these events, in their order.
    """

    era: int = 0
    number: int = 0
    checksum: int = 0


class Course:
    """The events that all ranks meet in one order: sync points, and messages without tags.

    Of two ranks, one may have come further; the other's last milestone is then one of its own. If
    it is not, they have met different events, and one may wait for a message that never comes.
    """

    def __init__(self, era: int = 0) -> None:
        self.last = Milestone(era)
        self._milestones = deque([self.last], _MOST_AHEAD)

    def note(self, event: str) -> None:
        """Note an event; by the next sync point all ranks must have noted the same, in order."""
        era, number, checksum = self.last
        self.last = Milestone(era, number + 1, zlib.crc32(event.encode(), checksum))
        self._milestones.append(self.last)

    def parts_from(self, other: Milestone) -> bool:
        """Return whether a rank that has met ``other`` is known to have met other events."""
        milestones = self._milestones.copy()  # at once: this thread only looks on
        here = milestones[0]
        if other.era != here.era or not here.number <= other.number <= milestones[-1].number:
            return False
        return milestones[other.number - here.number] != other


class CollectiveLog:
    """The collectives of this rank.

    Attributes:
        step: Optimizer steps that have ended.
        course: The events that this rank has met.
        untagged: The last collective that only its order tells from others, if there was one.
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
        self.course = Course()
        self.untagged: CollectiveId | None = None
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

    def begin_untagged(self, place: str, channel: str) -> CollectiveId:
        """Note that this rank begins a collective that only its order tells from others."""
        collective = self.untagged = self.begin(place, channel)
        self.course.note(place)
        return collective

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
