"""Detects mismatched collectives within seconds.

If one rank runs a unit that another skips, they wait in different collectives, and both would wait
until the process group's time limit, many minutes later. So a thread on each rank looks, twice a
second, how long the rank has been waiting. After :data:`PATIENCE` seconds it reports to the others
through the store, which needs no collective::

    rank 0 is at "the gradients of blocks.3", the 12th of that kind, and has begun these: {...}

That no rank can go on is then not a guess. It is **proven** when every rank waits at the same time,
each for a collective that some other waiting rank has not begun. A rank that computes, loads data
or writes a file may take as long as it likes: while one rank does anything at all, no error comes.

The ranks then give up their connections, so that what waits in them returns, and each raises an
error that names every rank's place.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

from lightning_zero.comm.collective_log import CollectiveLog

log = logging.getLogger(__name__)

PATIENCE = 2.0
"""Seconds of waiting before a rank reports where it is."""

FOREIGN_PATIENCE = 10.0
"""The same for collectives that are not ours. Who has begun them is not known; that a rank which
has computed nothing for so long waits in vain is a guess."""

TICK = 0.5
"""Seconds between two looks."""

FOREIGN = "torch.distributed."


@dataclass(frozen=True)
class Whereabouts:
    """A waiting rank's report to the others.

    Attributes:
        place: The collective it waits for; empty if it has left.
        channel: As in `CollectiveId`.
        number: As in `CollectiveId`.
        step: Optimizer steps that it has ended.
        caller: Where the user's code called what waits.
        wait: A number that changes when the rank goes on.
        look: A number that grows with every look.
        begun: How many collectives of each channel it has begun.
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
        """Return whether the collective is not one of the engine's."""
        return self.place.startswith(FOREIGN)

    def __str__(self) -> str:
        if not self.place:
            return f"has ended its training after step {self.step}"
        where = f" (called at {self.caller})" if self.caller else ""
        return f"waits in step {self.step} for {self.place}{where}"


class Reports:
    """The ranks' reports in the process group's store.

    Args:
        store: A connection of its own.
        prefix: The beginning of its keys, the same on every rank.
        rank: This process's number.
        world_size: Number of ranks.

    Attributes:
        verdict: The error that ended the run, as far as this rank knows.
    """

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int) -> None:
        self.verdict = ""
        self._store, self._prefix = store, prefix
        self._rank, self._world_size = rank, world_size

    def put(self, here: Whereabouts | None) -> None:
        """Replace this rank's report; ``None`` takes it back."""
        # Never deleted: a rank that has seen the key would wait for it.
        report = "" if here is None else json.dumps(asdict(here))
        self._store.set(self._key(self._rank), report)

    def get(self) -> dict[int, Whereabouts]:
        """Return every rank's report; empty if one has none."""
        keys = [self._key(rank) for rank in range(self._world_size)]
        if not self._store.check(keys):
            return {}
        several = self._store.multi_get(keys) if self._store.has_extended_api() else None
        values = several or [self._store.get(key) for key in keys]
        if not all(values):
            return {}
        return {rank: Whereabouts(**json.loads(value)) for rank, value in enumerate(values)}

    def publish_verdict(self, verdict: str) -> None:
        """End the run of all ranks with an error."""
        self.verdict = verdict
        self._store.set(self._key("verdict"), verdict)

    def explain(self, error: RuntimeError) -> None:
        """Raise the verdict, if there is one, instead of a connection's own words."""
        # The first rank with a verdict closes the others' connections before they have found it.
        with contextlib.suppress(RuntimeError):
            if not self.verdict and self._store.check([self._key("verdict")]):
                self.verdict = self._store.get(self._key("verdict")).decode()
        if self.verdict:
            raise RuntimeError(self.verdict) from error

    def _key(self, name: int | str) -> str:
        return f"{self._prefix}/{name}"


class Observer:
    """This rank's place, as another thread sees it.

    Args:
        collectives: The log of this rank.
    """

    def __init__(self, collectives: CollectiveLog) -> None:
        self._log = collectives
        self._looks = 0
        self._foreign: tuple[tuple[int, int, int], int, float] | None = None

    def whereabouts(self) -> Whereabouts | None:
        """Return where this rank has waited for long; ``None`` if it has not."""
        self._looks += 1
        waiting = self._log.waiting
        if waiting is not None:
            collective, number, since = waiting
            if time.monotonic() - since < PATIENCE:
                return None
            return self._here(*collective, wait=number)
        frame = sys._current_frames().get(self._log.thread)
        is_foreign = frame and frame.f_code.co_filename.endswith("distributed_c10d.py")
        if frame is None or not is_foreign or self._log.is_busy:
            self._foreign = None
            return None
        # A thread that sends and receives in a loop is in the same place at every look, but has
        # used the processor in between.
        where = (id(frame), frame.f_lasti, _milliseconds_used(self._log.thread))
        if self._foreign is None or self._foreign[0] != where:
            self._foreign = (where, -self._log.next_wait(), time.monotonic())
        _, wait, since = self._foreign
        if time.monotonic() - since < FOREIGN_PATIENCE:
            return None
        place = FOREIGN + frame.f_code.co_name
        return self._here(place, place, 0, wait=wait)

    def now(self, place: str) -> Whereabouts:
        """Return this rank's report from ``place``, however long it has been there."""
        return self._here(place, place, 0, wait=0)

    def last(self) -> Whereabouts:
        """Return the report of a rank that leaves."""
        return Whereabouts("", "", 0, self._log.step, "", 0, 0, dict(self._log.begun))

    def _here(self, place: str, channel: str, number: int, *, wait: int) -> Whereabouts:
        caller = _caller(sys._current_frames().get(self._log.thread))
        begun = dict(self._log.begun)
        return Whereabouts(place, channel, number, self._log.step, caller, wait, self._looks, begun)


class Watchdog:
    """Compares this rank's place with the others', in a thread of its own.

    Args:
        collectives: The log of this rank.
        reports: The ranks' reports; without them nothing is watched.
        give_up: Makes what waits in a connection raise; called from the thread.
    """

    def __init__(
        self,
        collectives: CollectiveLog,
        reports: Reports | None = None,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._observer = Observer(collectives)
        self._reports = reports
        self._give_up = give_up
        self._mutex = threading.Lock()
        self._suspects: dict[int, Whereabouts] = {}
        self._has_reported = self._has_left = False
        if reports is not None:
            collectives.explain = reports.explain
            with _lock:
                _watchdogs.add(self)
            _start_to_look()

    @property
    def verdict(self) -> str:
        """The error that ended the run, or nothing."""
        return "" if self._reports is None else self._reports.verdict

    def end_here(self, verdict: str) -> None:
        """Note an error that every rank has found for itself."""
        if self._reports is not None:
            self._reports.verdict = verdict

    def describe(self, place: str) -> str:
        """Return this rank's place in words."""
        return str(self._observer.now(place))

    def leave(self) -> None:
        """Report that this rank begins no more collectives, and watch it no longer.

        Collectives that it begins afterwards, with others that have left as well, are not ours.
        """
        if self._reports is None or self._has_left:
            return
        self.forget()
        with self._mutex:
            self._has_left = True
            with contextlib.suppress(RuntimeError):
                self._reports.put(self._observer.last())

    def forget(self) -> None:
        """Look no more."""
        with _lock:
            _watchdogs.discard(self)

    def look(self) -> None:
        """Report this rank's place if it has waited for long, and compare it with the others'."""
        with self._mutex:
            if not self._has_left and self._reports is not None:
                self._look(self._reports)

    def _look(self, reports: Reports) -> None:
        here = self._observer.whereabouts()
        if here is None:
            if self._has_reported:
                reports.put(None)
                self._has_reported = False
            self._suspects = {}
            return
        with contextlib.suppress(RuntimeError):
            reports.put(here)
        self._has_reported = True
        everyone = reports.get()
        if reports.verdict or not _is_proven(everyone):
            self._suspects = {}
        elif not self._suspects:
            self._suspects = everyone
        elif all(_is_still(self._suspects[rank], now) for rank, now in everyone.items()):
            self._pronounce(everyone, reports)
        elif any(self._suspects[rank].wait != now.wait for rank, now in everyone.items()):
            self._suspects = {}

    def _pronounce(self, everyone: dict[int, Whereabouts], reports: Reports) -> None:
        verdict = parted([str(here) for here in everyone.values()])
        log.error("%s", verdict)
        reports.publish_verdict(verdict)
        self._give_up()


def parted(places: Sequence[str]) -> str:
    """Return the error for ranks that are in different places."""
    where = "; ".join(f"rank {rank} {place}" for rank, place in enumerate(places))
    return (
        f"The ranks have parted: {where}. Every rank must run the same units, backward passes and"
        " steps. If the ranks' data differ in length, or one rank takes a branch that others do"
        " not, let all take part: run the same modules on every rank, with a repeated batch or one"
        " whose loss is multiplied by 0; gather weights beforehand (`with"
        " lightning_zero.gathered(module):`); or, without gradients, run the modules in `with"
        " lightning_zero.join(module):`."
    )


_watchdogs: weakref.WeakSet[Watchdog] = weakref.WeakSet()
_lock = threading.Lock()
_process = 0


def _start_to_look() -> None:
    """Start the thread of all watchdogs, once in each process."""
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        threading.Thread(target=_look_now_and_then, name="zero.watchdog", daemon=True).start()


def _look_now_and_then() -> None:
    while True:
        time.sleep(TICK)
        _look_at_all()


def _look_at_all() -> None:
    with _lock:
        watchdogs = list(_watchdogs)
    for watchdog in watchdogs:
        try:
            watchdog.look()
        except Exception as error:
            # The store's host has ended, mostly, and with it the training.
            log.debug("Ranks are not watched any longer: %s", error)
            watchdog.forget()


def _is_proven(everyone: dict[int, Whereabouts]) -> bool:
    """Return whether each rank waits for a collective that another waiting rank has not begun."""
    ours = [here for here in everyone.values() if here.place and not here.is_foreign]
    return bool(ours) and all(
        any(other.begun.get(here.channel, 0) < here.number for other in everyone.values())
        for here in ours
    )


def _is_still(before: Whereabouts, now: Whereabouts) -> bool:
    """Return whether a rank was in the same place all the time between two looks.

    The look that was reported first may be an old one; the next may have been taken before the
    first was read; the one after it was surely not.
    """
    return before.wait == now.wait and (not now.place or now.look >= before.look + 2)


def _milliseconds_used(thread: int) -> int:
    """Return the processor time of a thread of this process, where the system has it."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0
    return int(1000 * time.clock_gettime(time.pthread_getcpuclockid(thread)))


def _caller(frame: FrameType | None) -> str:
    """Return the innermost line that is neither torch's, Lightning's nor ours."""
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
