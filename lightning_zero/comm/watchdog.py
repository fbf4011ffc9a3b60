"""A watchdog that ends a run on all ranks, with one error, when one of them cannot go on.

Three things end a run; in each case every rank raises the same text, the **verdict**.

1. **The ranks have diverged.** If one rank runs a unit that another skips, they wait in different
   collectives, and both would wait until the process group's timeout. So a thread on each rank
   checks four times a second how long the rank has been waiting, and after two seconds reports to
   the others where::

       rank 0 is at "the gradients of blocks.3", the 12th of that kind, and has begun these: {...}

   A deadlock is then not guessed but **proven**: all ranks are waiting at the same time, each for
   a collective that some other waiting rank has not begun. A rank that computes, loads data or
   writes a file may take as long as it likes. One that its device blocks, behind a message that
   another rank never sends, looks like one that computes. It is told by its **course**, the order
   of what it has begun, or by its last message: if another rank has not begun that, and waits.
2. **A rank has failed**: before an exception ends its run, it announces this to the others. An
   exception that the user catches ends nothing, and only ranks that are waiting are interrupted.
3. **A connection has broken** without an announcement. The rank that notices, or the thread of a
   device's backend, calls the roll: the threads answer where their ranks are, and a rank that does
   not answer is gone.

Waiting ranks then give up their connections, so that the waits raise. A rank may also be blocked
by its device, in a copy to the host behind a collective that never ends, which looks like work. So
a rank that has not ended :data:`GRACE_SECONDS` after the verdict aborts its devices' groups.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from math import inf
from multiprocessing.util import Finalize
from time import monotonic, sleep

import torch.distributed as dist

from lightning_zero.comm.collective_log import CollectiveLog
from lightning_zero.comm.observer import Observer
from lightning_zero.comm.process_groups import is_of_connection
from lightning_zero.comm.reports import Reports, Whereabouts
from lightning_zero.comm.verdicts import (
    diverged,
    lost,
    patience_with,
    stays,
    wait_for_each_other,
)

log = logging.getLogger(__name__)

TICK = 0.25
"""Seconds between looks."""

GRACE_SECONDS = 5.0
"""How long after a verdict a rank that waits nowhere keeps the groups of its devices."""

FAREWELL_SECONDS = 1.0
"""How long rank 0, whose exit may end the store, stays so that others can read the verdict."""

CLOSING_SECONDS = 5.0
"""The same at the end of a run that went well, so that the others can end their watch."""


class Watchdog:
    """A watch over this rank's waits, kept by a background thread.

    Args:
        collectives: The log of this rank.
        reports: The ranks' reports; without them nothing is watched.
        give_up: Makes pending waits on connections raise; called from the thread.
        give_up_devices: The same for connections of devices only.
        failure: Returns what has failed on a device, if anything.
    """

    def __init__(
        self,
        collectives: CollectiveLog,
        reports: Reports | None = None,
        give_up: Callable[[], None] = lambda: None,
        give_up_devices: Callable[[], None] = lambda: None,
        failure: Callable[[], str] = str,
    ) -> None:
        self._log = collectives
        self._observer = Observer(collectives)
        self._reports = reports
        self._give_up, self._give_up_devices = give_up, give_up_devices
        self._failure = failure
        self._read_at: float | None = None  # when the verdict was read, until devices are given up
        # The owner may be collected as garbage, and leave, at any place of any thread, also while
        # that thread looks: it may then hold this lock, and may hold those of logging.
        self._mutex = threading.RLock()
        self._suspects: dict[int, Whereabouts] = {}
        self._has_reported = self._has_left = False
        self._reads_after = 0.0
        if reports is not None:
            collectives.explain = self.explain
            _watchdogs[id(self)] = self
            _start_to_look()

    @property
    def has_given_up(self) -> bool:
        """Return whether this rank's connections can no longer be used."""
        return bool(self._log.verdict)

    def describe(self, place: str) -> str:
        """Return a description of this rank at ``place``."""
        return str(self._observer.at(place))

    # -- the end of a run ------------------------------------------------------------------------

    def explain(self, error: BaseException) -> None:
        """Raise the verdict if ``error`` is of a broken connection; do nothing for other errors."""
        verdict = self._verdict_on(error)
        if verdict:
            raise RuntimeError(verdict) from error

    def _verdict_on(self, error: BaseException) -> str:
        reports = self._reports
        if reports is None or not is_of_connection(error):
            return ""
        here = self._observer.describe
        try:
            if not reports.look(here) and not self._has_left:
                answers = reports.call_roll(here)
                if not reports.verdict:
                    reports.publish(lost(answers, error, reports.board.world_size))
        except RuntimeError:
            # The store is gone, and so is rank 0, which hosts it unless torchrun's agent does.
            reports.verdict = reports.verdict or lost({}, error, 1)
        gives_up = bool(reports.verdict) and not self.has_given_up
        self._log.verdict = reports.verdict  # first: a rank that its device lets go must raise it
        if gives_up:
            # What a device still sends would never arrive, and the process could not exit.
            self._give_up_devices()
        return reports.verdict

    def end(self, error: BaseException) -> None:
        """End the run on all ranks because ``error`` ends it on this one.

        A broken connection's error is on its way to the user: the verdict replaces its text.
        """
        if verdict := self._verdict_on(error):
            error.__cause__, error.args = RuntimeError(*error.args), (verdict,)
        elif self._reports is not None and not self._has_left and not self.has_given_up:
            with contextlib.suppress(RuntimeError):
                self._reports.publish(self._observer.fate(self._reports.board.rank, error))

    def pardon(self) -> None:
        """Stop watching: an error ends the run, but all ranks are alive and end it together."""
        self.forget()
        if self._reports is not None:
            self._reports.verdict = ""

    def leave(self, *, is_exiting: bool = False) -> None:
        """Report that this rank begins no more collectives, and stop watching it.

        Collectives that it begins afterwards, with others that have left too, are not watched. If
        the process ``is_exiting`` and may host the store, the others stop to watch as well.
        """
        if self._reports is None or self._has_left:
            return
        self.forget()
        with self._mutex:
            self._has_left = True
            if self._reports.is_over:
                return  # and the store with it
            with contextlib.suppress(RuntimeError):
                is_host = self._reports.board.rank == 0
                if self._reports.verdict and is_host:
                    self._reports.wait_for_readers(FAREWELL_SECONDS)
                self._say_goodbye(self._reports)
                if is_exiting and is_host and not self._reports.verdict:
                    self._reports.close(CLOSING_SECONDS)

    def _say_goodbye(self, reports: Reports) -> None:
        reports.put(self._observer.at(""))
        reports.answer(str(self._observer.at("")))
        reports.board.put("left")

    def forget(self) -> None:
        """Stop watching."""
        _watchdogs.pop(id(self), None)

    # -- the thread ------------------------------------------------------------------------------

    def look(self) -> None:
        """Report this rank's place if it has waited for long, and compare it with the others'."""
        proven = ""
        with self._mutex:
            if not self._has_left and self._reports is not None:
                proven = self._look(self._reports)
                if self._has_left:
                    self._say_goodbye(self._reports)
        # Not within the lock, which a rank that leaves takes: to give up devices may last.
        if self._reports is not None and not self._has_left and not self._reports.verdict:
            failed = self._failure()
            proven = self._verdict_on(dist.DistBackendError(failed)) if failed else proven
        if proven:
            log.error("%s", proven)

    def _look(self, reports: Reports) -> str:
        """Look, and return the verdict if it is this rank that has proven it."""
        here = self._observer.look()
        if reports.look(self._observer.describe):
            self._obey(here, reports.verdict)
            return ""
        if reports.is_over and (here is None or here.is_blocked):
            self.forget()
            reports.board.put("left")
            return ""
        if here is None or here.seconds < patience_with(here):
            if self._has_reported:
                reports.put(None)
            self._has_reported, self._suspects, self._reads_after = False, {}, 0.0
            return ""
        with contextlib.suppress(RuntimeError):
            reports.put(here)
        self._has_reported = True
        if here.seconds < self._reads_after and not self._suspects:
            return ""
        if everyone := reports.get():
            self._reads_after = 2 * here.seconds  # they are as many as there are ranks
        if any(self._log.course.parts_from(other.course) for other in everyone.values()):
            return reports.publish(diverged(everyone))
        if not wait_for_each_other(everyone):
            self._suspects = {}
        elif not self._suspects:
            self._suspects = everyone
        elif all(stays(self._suspects[rank], now) for rank, now in everyone.items()):
            return reports.publish(diverged(everyone))
        elif any(self._suspects[rank].wait != now.wait for rank, now in everyone.items()):
            self._suspects = {}
        return ""

    def _obey(self, here: Whereabouts | None, verdict: str) -> None:
        """Make this rank's waits raise, also those that only its device knows of."""
        if here is not None and not here.is_blocked and here.seconds > TICK:
            self._log.verdict = verdict
            self._give_up()
        elif self._read_at is None:
            self._read_at = monotonic()
        elif monotonic() - self._read_at > GRACE_SECONDS:
            self._read_at = inf
            self._log.verdict = verdict
            self._give_up_devices()


_watchdogs: weakref.WeakValueDictionary[int, Watchdog] = weakref.WeakValueDictionary()
"""By id. Unlike the iteration of a weak set, ``valuerefs`` needs no lock, which a collected owner
might wait for in the thread that holds it."""
_process = 0


def _watched() -> list[Watchdog]:
    return [found for one in _watchdogs.valuerefs() if (found := one()) is not None]


def _start_to_look() -> None:
    """Start the thread that all watchdogs share, once per process."""
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        atexit.unregister(_say_farewell)
        atexit.register(_say_farewell)
        # What multiprocessing forks ends without the above; others leave once.
        Finalize(None, _say_farewell, exitpriority=0)
        threading.Thread(target=_look_now_and_then, name="zero.watchdog", daemon=True).start()


def _say_farewell() -> None:
    """Leave when this process ends, and end the run on all ranks if an exception ends it."""
    error: BaseException | None = getattr(sys, "last_value", None)
    for watchdog in _watched():
        if error is not None:
            watchdog.end(error)
        watchdog.leave(is_exiting=True)


def _look_now_and_then() -> None:
    while True:
        sleep(TICK)
        _look_at_all()


def _look_at_all() -> None:
    # A function of its own: between looks, no local variable may keep a watchdog alive.
    for watchdog in _watched():
        try:
            watchdog.look()
        except Exception as error:
            # Usually the process that hosts the store has exited, and training with it.
            level = logging.DEBUG if isinstance(error, RuntimeError) else logging.ERROR
            log.log(level, "Ranks are no longer watched: %s", error)
            watchdog.forget()
