"""Ranks that wait for each other in different places, found out within seconds instead of never.

Collectives are **meetings**: all ranks come, each in its own time. If one rank runs a unit that
another skips, they come to different meetings, and both would wait until the process group's time
limit, many minutes later. So a thread on each rank looks, once a second, how long the rank has been
waiting. After :data:`PATIENCE` seconds it tells the others through the store, which needs no
meeting::

    rank 0 is at "the gradients of blocks.3", the 12th of that kind, and has begun these: {...}

That nobody can go on is then not a guess. It is **proven** when every rank waits at the same time,
each for a meeting that some other waiting rank has not begun. A rank that computes, loads data or
writes a file may take as long as it likes: while one rank does anything at all, nothing is said.

The proven ranks give up their connections, so that what waits in them returns, and each raises an
error that says where every rank is.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

PATIENCE = 2.0
"""Seconds of waiting before a rank tells the others where it is."""

FOREIGN_PATIENCE = 10.0
"""The same for collectives that are not ours. Who has begun them is not known; that a rank which
has computed nothing for so long waits in vain is a guess."""

TICK = 0.5
"""Seconds between two looks."""

FOREIGN = "torch.distributed."


class Meeting(NamedTuple):
    """One collective.

    Attributes:
        place: Its name, to show.
        channel: Where nothing but the order tells collectives apart; by default its name.
        number: The how manyth of its channel.
    """

    place: str
    channel: str
    number: int


@dataclass(frozen=True)
class Whereabouts:
    """What a waiting rank tells the others.

    Attributes:
        place: The meeting it waits for; empty if it has left.
        channel: As in `Meeting`.
        number: As in `Meeting`.
        step: Optimizer steps that it has ended.
        caller: Where the user's code called what waits.
        wait: A number that changes when the rank goes on.
        look: A number that grows with every look.
        begun: How many meetings of each channel it has begun.
    """

    place: str
    channel: str
    number: int
    step: int
    caller: str
    wait: int
    look: int
    begun: dict[str, int] = field(repr=False)

    @property
    def is_foreign(self) -> bool:
        """Whether the meeting is not one of the engine's."""
        return self.place.startswith(FOREIGN)

    def __str__(self) -> str:
        if not self.place:
            return f"has ended its training after step {self.step}"
        where = f" (called at {self.caller})" if self.caller else ""
        return f"waits in step {self.step} for {self.place}{where}"


class Watch:
    """Knows where this rank waits, and asks where the others do.

    Args:
        rank: This process's number.
        world_size: Number of ranks.
        store: The process group's store, for this watch alone; ``None`` watches nothing.
        prefix: What its keys begin with, the same on every rank.
        give_up: Makes what waits in a connection raise; called from another thread.

    Attributes:
        before: Called with a meeting's place before this rank comes to it; what the meeting needs
            is allocated then, and nothing is sent yet.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        *,
        store: Any = None,
        prefix: str = "",
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.step = 0
        self.verdict = ""
        self.before: Callable[[str], None] | None = None
        self._store = store
        self._prefix = prefix
        self._give_up = give_up
        self._begun: Counter[str] = Counter()
        self._waits = itertools.count(1)
        self._waiting: tuple[Meeting, int, float] | None = None
        self._thread = threading.get_ident()
        self._looks = 0
        self._is_told = self._is_busy = False
        self._mutex = threading.Lock()
        self._foreign: tuple[tuple[int, int, int], int, float] | None = None
        self._suspects: dict[int, Whereabouts] = {}
        self._has_left = False
        if store is not None and world_size > 1:
            with _lock:
                _watches.add(self)
            _start_to_look()

    # -- what the rank says of itself ------------------------------------------------------------

    def begin(self, place: str, channel: str = "") -> Meeting:
        """Note that this rank has come to a meeting, unless something is to be said before."""
        if self.before is not None:
            self.before(place)
        return self.come(place, channel)

    def come(self, place: str, channel: str = "") -> Meeting:
        """Note that this rank has come to a meeting of which nobody is told before."""
        channel = channel or place
        self._begun[channel] += 1
        return Meeting(place, channel, self._begun[channel])

    def wait(self, meeting: Meeting, works: Iterable[Any]) -> None:
        """Wait for ``works``, which end when the others have come.

        As in :meth:`waiting`, whose context would cost six calls for every message.
        """
        self._waiting = (meeting, next(self._waits), time.monotonic())
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._explain(error)
            raise
        finally:
            self._waiting = None

    @contextlib.contextmanager
    def waiting(self, meeting: Meeting) -> Iterator[None]:
        """Code that waits for the others to come.

        Raises:
            RuntimeError: Ranks wait for each other in different places.
        """
        self._waiting = (meeting, next(self._waits), time.monotonic())
        try:
            yield
        except RuntimeError as error:
            self._explain(error)
            raise
        finally:
            self._waiting = None

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Begin a meeting and wait for it."""
        with self.waiting(self.begin(place)):
            yield

    def describe(self, place: str) -> str:
        """Where this rank is, in words."""
        caller = _caller(sys._current_frames().get(self._thread))
        return str(Whereabouts(place, place, 0, self.step, caller, 0, 0, {}))

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Code that sends and receives as it goes on, and never counts as waiting."""
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def leave(self) -> None:
        """Note that this rank comes to no more meetings; it is not watched any longer.

        What it does afterwards with the others, who have left as well, is nobody's concern here.
        """
        if self._store is None or self._has_left:
            return
        self.forget()
        with self._mutex:
            self._has_left = True
            self._tell(Whereabouts("", "", 0, self.step, "", 0, 0, dict(self._begun)))

    def forget(self) -> None:
        """Look no more."""
        with _lock:
            _watches.discard(self)

    def _explain(self, error: RuntimeError) -> None:
        """Raise the verdict, if there is one, instead of a connection's own words."""
        if self._store is None:
            return
        # Whoever finds out first closes the others' connections before they have found out.
        with contextlib.suppress(RuntimeError):
            if not self.verdict and self._store.check([self._key("verdict")]):
                self.verdict = self._store.get(self._key("verdict")).decode()
        if self.verdict:
            raise RuntimeError(self.verdict) from error

    # -- what the thread does --------------------------------------------------------------------

    def look(self) -> None:
        """See whether this rank waits, and if so whether it does in vain."""
        with self._mutex:
            if not self._has_left:
                self._look()

    def _look(self) -> None:
        here = self._whereabouts()
        if here is None:
            if self._is_told:
                # Never deleted: a rank that has seen the key would wait for it.
                self._store.set(self._key(self.rank), "")
                self._is_told = False
            self._suspects = {}
            return
        self._tell(here)
        self._is_told = True
        everyone = self._everyone()
        if self.verdict or not _is_proven(everyone):
            self._suspects = {}
        elif not self._suspects:
            self._suspects = everyone
        elif all(_is_still(self._suspects[rank], now) for rank, now in everyone.items()):
            self._pronounce(everyone)
        elif any(self._suspects[rank].wait != now.wait for rank, now in everyone.items()):
            self._suspects = {}

    def _whereabouts(self) -> Whereabouts | None:
        """Where this rank has waited for long; ``None`` if it has not."""
        self._looks += 1
        waiting = self._waiting
        if waiting is not None:
            meeting, wait, since = waiting
            if time.monotonic() - since < PATIENCE:
                return None
            frame = sys._current_frames().get(self._thread)
            return Whereabouts(
                *meeting, self.step, _caller(frame), wait, self._looks, dict(self._begun)
            )
        frame = sys._current_frames().get(self._thread)
        is_foreign = frame and frame.f_code.co_filename.endswith("distributed_c10d.py")
        if frame is None or not is_foreign or self._is_busy:
            self._foreign = None
            return None
        # A thread that sends and receives in a loop is in the same place at every look, but has
        # used the processor in between.
        where = (id(frame), frame.f_lasti, _milliseconds_used(self._thread))
        if self._foreign is None or self._foreign[0] != where:
            self._foreign = (where, -next(self._waits), time.monotonic())
        _, wait, since = self._foreign
        if time.monotonic() - since < FOREIGN_PATIENCE:
            return None
        place = FOREIGN + frame.f_code.co_name
        return Whereabouts(
            place, place, 0, self.step, _caller(frame), wait, self._looks, dict(self._begun)
        )

    def _everyone(self) -> dict[int, Whereabouts]:
        """What every rank tells; empty if one tells nothing."""
        keys = [self._key(rank) for rank in range(self.world_size)]
        if not self._store.check(keys):
            return {}
        told = self._store.multi_get(keys) if self._store.has_extended_api() else None
        values = told or [self._store.get(key) for key in keys]
        if not all(values):
            return {}
        return {rank: Whereabouts(**json.loads(value)) for rank, value in enumerate(values)}

    def _pronounce(self, everyone: dict[int, Whereabouts]) -> None:
        self.verdict = parted([str(here) for here in everyone.values()])
        log.error("%s", self.verdict)
        self._store.set(self._key("verdict"), self.verdict)
        self._give_up()

    def _tell(self, here: Whereabouts) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(self._key(self.rank), json.dumps(asdict(here)))

    def _key(self, name: int | str) -> str:
        return f"{self._prefix}/{name}"


def parted(places: Sequence[str]) -> str:
    """What to tell the user of ranks that are in different places."""
    where = "; ".join(f"rank {rank} {place}" for rank, place in enumerate(places))
    return (
        f"The ranks have parted: {where}. Every rank must run the same units, backward passes and"
        " steps. If the ranks' data differ in length, or one rank takes a branch that others do"
        " not, let all take part: run the same modules on every rank, with a repeated batch or one"
        " whose loss is multiplied by 0; gather weights beforehand (`with"
        " lightning_zero.gathered(module):`); or, without gradients, run the modules in `with"
        " lightning_zero.join(module):`."
    )


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_lock = threading.Lock()
_process = 0


def _start_to_look() -> None:
    """Start the thread that looks for all watches, once in each process."""
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        threading.Thread(target=_look_now_and_then, name="zero.watch", daemon=True).start()


def _look_now_and_then() -> None:
    while True:
        time.sleep(TICK)
        _look_at_all()


def _look_at_all() -> None:
    with _lock:
        watches = list(_watches)
    for watch in watches:
        try:
            watch.look()
        except Exception as error:
            # The store's host has ended, mostly, and with it the training.
            log.debug("Ranks are not watched any longer: %s", error)
            watch.forget()


def _is_proven(everyone: dict[int, Whereabouts]) -> bool:
    """Whether each rank waits for a meeting that another waiting rank has not begun."""
    ours = [here for here in everyone.values() if here.place and not here.is_foreign]
    return bool(ours) and all(
        any(other.begun.get(here.channel, 0) < here.number for other in everyone.values())
        for here in ours
    )


def _is_still(before: Whereabouts, now: Whereabouts) -> bool:
    """Whether a rank was in the same place during the whole of the time between two looks.

    The look that was told first may be an old one; the next may have been taken before the first
    was read; the one after it was surely not.
    """
    return before.wait == now.wait and (not now.place or now.look >= before.look + 2)


def _milliseconds_used(thread: int) -> int:
    """The processor time of a thread of this process, where the system tells it."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0
    return int(1000 * time.clock_gettime(time.pthread_getcpuclockid(thread)))


def _caller(frame: FrameType | None) -> str:
    """The innermost line that is neither torch's, Lightning's nor ours."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "").partition(".")[0]
        if name not in _NOT_CALLERS:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


_NOT_CALLERS = {
    "torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric",
    "lightning_zero", "contextlib", "threading", "functools",
}  # fmt: skip
