"""A watchdog that ends a run on all ranks, with one error, when one of them cannot go on.

Ranks fail in five ways, and each is found in one::

    a rank raises         it writes the error under `end` before it exits
    a rank is killed      its peers' connections break; the first to notice writes `end`
    a host is lost        connections to it do not break, but those of `hosts` end after a while
    ranks come to         each message of a sync point begins with a checksum of what its rank has
    different sync points done since the last; all ranks compare it there (`control`)
    ranks wait for        each writes where it waits under `place`; whoever reads a deadlock
    different collectives writes `end`

There are two kinds of notes in the store::

    end       the error that ends the run; the first to write wins
    place/r   where rank r waits; empty while it goes on; "left" when it needs nothing more

A thread of each rank looks at them four times a second::

    main thread                 watchdog's thread                         store

    begin, wait ── log ──────>  waits for 2 s? ──── report ───────────>  place/r
                                all have reported? <─── all places ────  place/*
                                  a deadlock? ───── the error ────────>  end
                                has the run ended? <────────────────────  end
    the wait raises <────────── gives up all connections
    raises the error

A deadlock is not guessed but **proven**: all ranks wait at the same time, each for a collective
that another of them has not begun. A rank that computes, loads data or writes a file may take as
long as it likes: it has not reported. On a device, messages are only queued, and the host may be
blocked anywhere behind one that never ends. So a rank that begins nothing for 5 s reports the last
message that it has queued, as if it waited for that; the proof is the same.

A rank that waits when the run ends gives up its connections at once, so that the wait raises. One
that computes raises at its next collective; if it waits in a collective of the user's own, which no
log knows, it gives up its connections :data:`GRACE_SECONDS` later.

The process of rank 0 usually hosts the store, which the others' threads ask until they have left
the run. So it exits last: it tells them that it is about to exit and waits until all have left.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from multiprocessing.util import Finalize
from time import monotonic, sleep
from types import FrameType
from typing import Any

import torch.distributed as dist

from lightning_zero.comm import process_groups
from lightning_zero.comm.collective_log import CollectiveLog
from lightning_zero.comm.hosts import Lifelines, ending_when_silent

OVER = "over"
"""The note under ``end`` of a host that exits after a successful run."""

_SECONDS_BETWEEN_LOOKS = 0.02

_stores: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Report:
    """The place of a rank that has not gone on for long, or has left.

    Attributes:
        name: The collective that it waits for; empty if it has left.
        channel: As in `CollectiveId`.
        number: As in `CollectiveId`.
        step: Optimizer steps that it has ended.
        caller: The line of the user's code that led to the wait; empty for a rank that waits
            nowhere, whose device may wait for the collective.
        wait: A number that changes when the rank goes on.
        look: A number that grows with every look.
        seconds: For how long it had waited when its thread looked.
        begun: How many collectives of each channel it has begun.
        queued: The number and name of its last collective without a tag, if there was one.
    """

    name: str
    channel: str
    number: int
    step: int
    caller: str = ""
    wait: int = 0
    look: int = 0
    seconds: float = 0.0
    begun: dict[str, int] = field(default_factory=dict)
    queued: Sequence[Any] = (0, "")

    def __str__(self) -> str:
        if not self.name:
            return f"has left the run after step {self.step}"
        if not self.caller:
            return f"is in step {self.step}, after {self.name}"
        return f"waits in step {self.step} for {self.name} (called at {self.caller})"


class Reports:
    """The notes of all ranks, of two kinds: each rank's place, and the end of the run.

    Args:
        store: The store.
        prefix: The beginning of the keys, the same on every rank.
        rank: This process's number.
        world_size: Number of ranks.
    """

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._end = store, f"{prefix}/end"
        self._places = [f"{prefix}/place/{rank}" for rank in range(world_size)]

    def put(self, report: Report | None) -> None:
        """Replace this rank's report; ``None`` withdraws it."""
        # Never deleted: a rank that has seen the key would wait for it.
        note = "" if report is None else json.dumps(asdict(report))
        self._store.set(self._places[self.rank], note)

    def get(self) -> dict[int, Report]:
        """Return the reports of all ranks that have one, by rank."""
        keys = self._places
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        several = self._store.multi_get(keys) if keys and self._store.has_extended_api() else None
        notes = zip(keys, several or map(self._store.get, keys), strict=True)
        found = {self._places.index(key): note.decode() for key, note in notes}
        return {rank: Report(**json.loads(note)) for rank, note in found.items() if note}

    def publish(self, end: str) -> str:
        """End the run on all ranks with an error, unless it has ended; return how it ends."""
        return str(self._store.compare_set(self._end, "", end).decode())

    @property
    def end(self) -> str:
        """The error that ends the run, :data:`OVER`, or ``""``; usually one request."""
        return self._store.get(self._end).decode() if self._store.check([self._end]) else ""

    def wait_until_left(self, seconds: float) -> None:
        """Wait at most ``seconds`` until all ranks have left."""
        deadline = monotonic() + seconds
        while monotonic() < deadline:
            reports = self.get()
            if len(reports) == self.world_size and not any(one.name for one in reports.values()):
                return
            sleep(_SECONDS_BETWEEN_LOOKS)


def own_store() -> Any:
    """Return a separate connection to the store: one blocked by a wait serves no other request."""
    world = dist.group.WORLD
    if world not in _stores:
        store = process_groups.default_store()
        with ending_when_silent():
            _stores[world] = store.clone() if hasattr(store, "clone") else store
    return _stores[world]


log = logging.getLogger(__name__)

TICK = 0.25
"""Seconds between looks."""

PATIENCE = 2.0
"""Seconds of waiting before a rank reports where it is."""

QUIET_SECONDS = 5.0
"""Seconds after which a rank that begins nothing may be blocked by its device."""

GRACE_SECONDS = 5.0
"""How long after the end a rank that waits nowhere keeps its connections."""

EXIT_SECONDS = 1.0, 5.0
"""How long rank 0 waits at its exit for ranks that have not left, after an error and without."""

TOUCH = "access between steps to the weights of"
GRADIENT = "access to a gradient"
"""Places at which ranks usually diverge because only some of them run the code."""

_CURES = {
    TOUCH: (
        "Between steps, code that reads or changes a sharded parameter gathers its unit, which"
        " needs all ranks. Run that code on every rank, or first gather on every rank:"
        " `with lightning_zero.gathered(module):`."
    ),
    GRADIENT: (
        "Gradients are sharded, so reading one needs all ranks. Before code that only some ranks"
        " run, call `lightning_zero.full_grad(parameter)` for a whole gradient or"
        " `lightning_zero.grad_norm(module)` for the norm on every rank."
    ),
    "": (
        "Every rank must run the same units, backward passes and steps. If the ranks have different"
        " amounts of data, or one rank takes a branch that others do not, run the same modules on"
        " every rank, with a repeated batch or a loss multiplied by 0; gather the weights first"
        " (`with lightning_zero.gathered(module):`); or, without gradients, run the modules in"
        " `with lightning_zero.join(module):`."
    ),
}
"""What to do, by the first of these keys that a rank's place contains."""


def diverged(places: Mapping[int, object]) -> str:
    """Return the error for ranks in different places, by rank."""
    where = "; ".join(f"rank {rank} {place}" for rank, place in sorted(places.items()))
    cure = next(cure for what, cure in _CURES.items() if what in where)
    return f"The ranks have diverged: {where}. {cure}"


def lost(places: Mapping[int, object], error: BaseException, world_size: int) -> str:
    """Return the error for a broken connection, with the places of the ranks that have one."""
    where = "".join(f"; rank {rank} {place}" for rank, place in sorted(places.items()))
    silent = [str(rank) for rank in range(world_size) if rank not in places]
    ranks = f"; no report from rank{'s' * (len(silent) > 1)} {', '.join(silent)}" if silent else ""
    return (
        f"A connection between ranks has failed ({str(error).splitlines()[0]}). A rank was killed,"
        " ran out of memory, or exited without an error: the launcher's output or the system log"
        f" names it{where}{ranks}."
    )


def failed(rank: int, step: int, error: BaseException) -> str:
    """Return the error on all ranks for the failure of ``rank`` with ``error``."""
    lines = list(traceback.walk_tb(error.__traceback__))
    users = [(frame, line) for frame, line in lines if not _is_library(frame)] or lines[-1:]
    where = "".join(f" at {frame.f_code.co_filename}:{line}" for frame, line in users[-1:])
    text = next(iter(str(error).splitlines()), "")
    what = f"{type(error).__name__}{text and ': '}{text}"
    return (
        f"Rank {rank} failed in step {step}{where}: {what}\n"
        "The other ranks, which were waiting for it, stop too."
    )


def are_stuck(everyone: Mapping[int, Report]) -> bool:
    """Return whether each rank waits for a collective that another waiting rank has not begun."""
    waiting = [report for report in everyone.values() if report.name]
    names: dict[int, str] = {}
    for number, name in (one.queued for one in everyone.values()):
        if names.setdefault(number, name) != name:
            return True  # two messages without tags have met, so neither ends
    return bool(waiting) and all(
        any(other.begun.get(one.channel, 0) < one.number for other in everyone.values())
        for one in waiting
    )


def stays(before: Report, now: Report) -> bool:
    """Return whether a rank stayed in the same place between two reports.

    The first report may be old, and the next look may have been taken before it was read; the look
    after that cannot have been.
    """
    return before.wait == now.wait and (not now.name or now.look >= before.look + 2)


class Watchdog:
    """A watch over this rank's waits, kept by a background thread.

    Args:
        collectives: The log of this rank.
        reports: The ranks' notes; without them nothing is watched.

    Attributes:
        lifelines: The connections that end with a lost host.
    """

    def __init__(self, collectives: CollectiveLog, reports: Reports | None = None) -> None:
        self._log, self._reports = collectives, reports
        self.lifelines: Lifelines | None = None
        self._ended_at: float | None = None
        # The owner may be collected as garbage, and leave, at any place of any thread, also while
        # that thread looks: it may then hold this lock, and may hold those of logging.
        self._mutex = threading.RLock()
        self._suspects: dict[int, Report] = {}
        self._has_reported = self._has_left = False
        self._reads_after = 0.0
        self._looks = 0
        # The collectives begun, and since which look and time there are no more.
        self._quiet = (0, 0, 0.0)
        if reports is not None:
            collectives.explain = self.explain
            _start_to_look()
            _watchdogs[id(self)] = self

    # -- where this rank is ----------------------------------------------------------------------

    def place(self) -> Report | None:
        """Return where this rank waits or may be blocked; ``None`` if neither."""
        self._looks += 1
        before, first_look, since = self._quiet
        if (count := sum(dict(self._log.begun).values())) != before:
            first_look, since = self._looks, monotonic()
        self._quiet = count, first_look, since
        if (waiting := self._log.waiting) is not None:
            collective, caller = waiting.collective, _caller(waiting.frame)
            number, began = waiting.number, waiting.since
        elif self._log.untagged is not None and monotonic() - since > QUIET_SECONDS:
            collective, caller, number, began = self._log.untagged, "", -first_look, since
        else:
            return None
        last = self._log.untagged
        return Report(
            *collective, self._log.step, caller, wait=number, look=self._looks,
            seconds=monotonic() - began, begun=dict(self._log.begun),
            queued=(0, "") if last is None else (last.number, last.name),
        )  # fmt: skip

    def describe(self, name: str) -> str:
        """Return a description of this rank, which waits for the collective of this name."""
        return str(Report(name, "", 0, self._log.step, _caller(sys._getframe(1))))

    # -- the end of a run ------------------------------------------------------------------------

    def explain(self, error: BaseException) -> None:
        """Raise the error that ends the run if ``error`` is of a broken connection."""
        if self._reports is not None and process_groups.is_of_connection(error):
            self._lose(self._reports, error)
            raise RuntimeError(self._log.verdict) from error

    def _lose(self, reports: Reports, error: BaseException) -> None:
        """End the run because a connection has broken, unless it has ended."""
        had_ended = bool(self._log.verdict)
        if not had_ended:
            verdict = ""
            with contextlib.suppress(RuntimeError):  # the store may be gone, with rank 0
                places = reports.get()
                if (here := self.place()) is not None:
                    places[reports.rank] = here
                verdict = reports.publish(lost(places, error, reports.world_size))
            gone = verdict in ("", OVER)
            # Before anything is given up: a rank that its device lets go must raise it.
            self._log.verdict = lost({0: "has exited"}, error, 1) if gone else verdict
            # What a device still sends would never arrive, and the process could not exit.
            process_groups.give_up_devices()

    def end(self, error: BaseException) -> None:
        """End the run on all ranks because ``error`` ends it on this one.

        A broken connection's error is on its way to the user: the run's replaces its text.
        """
        reports = self._reports
        if reports is None or self._has_left:
            return
        if process_groups.is_of_connection(error):
            self._lose(reports, error)
            error.__cause__, error.args = RuntimeError(*error.args), (self._log.verdict,)
        elif not self._log.verdict:
            with contextlib.suppress(RuntimeError):
                reports.publish(failed(reports.rank, self._log.step, error))

    def leave(self) -> None:
        """Report that this rank begins no more collectives, and stop watching it.

        Collectives that it begins afterwards, with others that have left too, are not watched.
        """
        self.forget()
        with self._mutex:
            if self._reports is not None and not self._has_left:
                self._leave(self._reports)
            if self.lifelines is not None:
                self.lifelines.close()

    def _leave(self, reports: Reports) -> None:
        self._has_left = True
        if reports.rank == 0:
            _left_by_host.append(reports)
        with contextlib.suppress(RuntimeError):
            reports.put(Report("", "", 0, self._log.step, begun=dict(self._log.begun)))

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
        # Not within the lock, which a rank that leaves takes: to give up connections may last.
        if proven:
            log.error("%s", proven)
        if self._ended_at is not None:
            self._obey()
        elif self._reports is not None and (what := process_groups.failure_on_device()):
            self._lose(self._reports, dist.DistBackendError(what))

    def _look(self, reports: Reports) -> str:
        """Look, and return the error that ends the run if it is this rank that has proven it."""
        if self.lifelines is not None and (gone := self.lifelines.lost()):
            return reports.publish(gone)
        if end := reports.end:
            if end != OVER:
                self._log.verdict, self._ended_at = end, monotonic()
            self._leave(reports)
            if end == OVER:
                self.forget()
            return ""
        here = self.place()
        if here is None or here.seconds < PATIENCE:
            if self._has_reported:
                reports.put(None)
            self._has_reported, self._suspects, self._reads_after = False, {}, 0.0
            return ""
        reports.put(here)
        self._has_reported = True
        if here.seconds < self._reads_after and not self._suspects:
            return ""
        everyone = reports.get()
        self._reads_after = 2 * here.seconds  # they are as many as there are ranks
        if len(everyone) < reports.world_size or not are_stuck(everyone):
            self._suspects = {}
        elif not self._suspects:
            self._suspects = everyone
        elif all(stays(self._suspects[rank], now) for rank, now in everyone.items()):
            return reports.publish(diverged(everyone))
        elif any(self._suspects[rank].wait != now.wait for rank, now in everyone.items()):
            self._suspects = {}
        return ""

    def cut_off(self) -> None:
        """End the run on this rank, as the host of the store, which is rank 0's, is lost."""
        self._has_left = True  # and needs nothing more
        if self.lifelines is not None and not self._log.verdict:
            self._log.verdict = self.lifelines.lost_with(0)
            log.error("%s", self._log.verdict)
        self._ended_at = monotonic()

    def _obey(self) -> None:
        """Make this rank's waits raise, also those that the log does not know."""
        waiting, ended_at = self._log.waiting, self._ended_at
        assert ended_at is not None
        if waiting is not None and monotonic() - waiting.since > TICK:
            process_groups.give_up()
        elif monotonic() - ended_at > GRACE_SECONDS:
            self._ended_at = inf
            process_groups.give_up()


# -- frames ----------------------------------------------------------------------------------------

_NOT_CALLERS = {
    "torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric",
    "lightning_zero", "contextlib", "threading", "functools",
}  # fmt: skip


def _caller(frame: FrameType | None) -> str:
    """Return the innermost line outside of torch, Lightning and this package."""
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_library(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_CALLERS


# -- the process -----------------------------------------------------------------------------------

_watchdogs: weakref.WeakValueDictionary[int, Watchdog] = weakref.WeakValueDictionary()
"""By id. Unlike the iteration of a weak set, ``valuerefs`` needs no lock, which a collected owner
might wait for in the thread that holds it."""
_left_by_host: list[Reports] = []
"""The notes of runs that rank 0 has left, and the others may still ask for."""
_process = 0
_ends_groups = False


def _watched() -> list[Watchdog]:
    return [found for one in _watchdogs.valuerefs() if (found := one()) is not None]


def _start_to_look() -> None:
    """Start the thread that all watchdogs share, once per process."""
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        _watchdogs.clear()  # of the process that forked this one
        _left_by_host.clear()
        atexit.register(_exit)
        # What multiprocessing forks ends without the above.
        Finalize(None, _exit, exitpriority=0)
        threading.Thread(target=_look_now_and_then, name="zero.watchdog", daemon=True).start()


def end_at_exit() -> None:
    """Destroy all process groups when the process exits, after all ranks have left.

    Lightning destroys only NCCL's; gloo threads still alive then occasionally abort the process.
    """
    global _ends_groups
    if not _ends_groups:
        _ends_groups = True
        atexit.register(_exit)


def _exit() -> None:
    """Leave when this process ends, and end the run on all ranks if an exception ends it."""
    # Of a process that multiprocessing started, the exception is being handled now.
    error = getattr(sys, "last_value", None) or sys.exc_info()[1]
    if isinstance(error, SystemExit):
        error = error.__context__ if error.code else None
    has_failed = error is not None
    for watchdog in _watched():
        if error is not None:
            watchdog.end(error)
        watchdog.leave()
    runs, _left_by_host[:] = _left_by_host[:], []
    deadline = monotonic() + EXIT_SECONDS[not has_failed]
    for reports in runs:
        with contextlib.suppress(RuntimeError):
            if reports.publish(OVER) != OVER:
                deadline = min(deadline, monotonic() + EXIT_SECONDS[0])
            reports.wait_until_left(deadline - monotonic())
    if _ends_groups:
        process_groups.end(after_error=has_failed)


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
            if "timed out" in str(error):
                watchdog.cut_off()
                continue
            # Usually the process that hosts the store has exited, and training with it.
            level = logging.DEBUG if isinstance(error, RuntimeError) else logging.ERROR
            log.log(level, "Ranks are no longer watched: %s", error)
            watchdog.forget()
