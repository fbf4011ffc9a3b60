"""A watchdog that ends a run on all ranks, with one error, when one of them cannot go on.

Ranks fail in five ways, and each is found in one::

    a rank raises         it tells the others before it exits
    a rank is killed      its peers' connections break; the first to notice tells the others
    a host is lost        connections to it do not break, but those of `hosts` end after a while
    ranks come to         each message of a sync point begins with a checksum of what its rank has
    different sync points done since the last; all ranks compare it there (`control`)
    ranks wait for        each tells where it waits; rank 0 finds the deadlock
    different collectives

Every rank has a connection to a **hub** in the process of rank 0. Nothing is sent while all go on::

    main thread             watchdog's thread                         hub, in a thread of rank 0

    begin, wait ── log ──>  waits for 2 s? ────────── place ───────>
                                                                      all wait, each for what
                            waits still? <─────────── ask ──────────  another has not begun?
                                         ──────────── answer ──────>  each has waited all the time?
    raises ────────────────────────────────────────── failed ──────>  the first error ends the run
    a message fails ───────────────────────────────── lost ────────>
    needs no more ─────────────────────────────────── left ────────>
                            has the run ended? <───── end ──────────
    the wait raises <─────  gives up all connections
    raises the error

A deadlock is not guessed but **proven**: when rank 0 asks, all ranks wait at the same time, each
for a collective that another of them has not begun. A rank that computes, loads data or writes a
file may take as long as it likes: it has no place. On a device, messages are only queued, and the
host may be blocked anywhere behind one that never ends. So a rank that begins nothing for 5 s is in
the place of the last message that it has queued, as if it waited for that; the proof is the same.

A rank that waits when the run ends gives up its connections at once, so that the wait raises, or
after :data:`LAST_SECONDS` if another has raised an exception. One that computes raises at its next
collective; if it waits in a collective of the user's own, which no log knows, it gives up its
connections :data:`GRACE_SECONDS` later.

After the set-up no rank asks the store of the process group for anything: rank 0, which usually
hosts it, may exit before the others.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import socket
import struct
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from time import monotonic
from types import FrameType
from typing import Any
from uuid import uuid4

from lightning_zero.comm import process_groups
from lightning_zero.comm.collective_log import CollectiveLog
from lightning_zero.comm.hosts import LOST_SECONDS, SILENT, end_when_silent, own_address

log = logging.getLogger(__name__)

TICK = 0.25
"""Seconds between looks."""

PATIENCE = 2.0
"""Seconds of waiting before a rank tells where it is."""

QUIET_SECONDS = 5.0
"""Seconds after which a rank that begins nothing may be blocked by its device."""

GRACE_SECONDS = 5.0
"""How long after the end a rank that waits nowhere keeps its connections."""

LAST_SECONDS = 1.0
"""How long a rank waits for one collective after another has raised an exception. That may have
begun it: where all ranks raise at one place, each gets there and raises its own exception."""

_ANSWER_SECONDS = 5
"""How long a rank waits for its hub: to connect, to send, and for an answer."""

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


@dataclass(frozen=True)
class Place:
    """Where a rank waits, or may be blocked, or that it has left the run.

    Attributes:
        name: The collective that it waits for; empty if it has left.
        channel: As in `CollectiveId`.
        number: As in `CollectiveId`.
        step: Optimizer steps that it has ended.
        caller: The line of the user's code that led to the wait; empty for a rank that waits
            nowhere, whose device may wait for the collective.
        wait: A number that changes when the rank goes on.
        begun: How many collectives of each channel it has begun.
        queued: The number and name of its last collective without a tag, if there was one.
    """

    name: str
    channel: str
    number: int
    step: int
    caller: str = ""
    wait: int = 0
    begun: dict[str, int] = field(default_factory=dict)
    queued: Sequence[Any] = (0, "")

    def __str__(self) -> str:
        if not self.name:
            return f"has left the run after step {self.step}"
        if not self.caller:
            return f"is in step {self.step}, after {self.name}"
        return f"waits in step {self.step} for {self.name} (called at {self.caller})"


# -- errors ----------------------------------------------------------------------------------------


def diverged(places: Mapping[int, object]) -> str:
    """Return the error for ranks in different places, by rank."""
    where = "; ".join(f"rank {rank} {place}" for rank, place in sorted(places.items()))
    cure = next(cure for what, cure in _CURES.items() if what in where)
    return f"The ranks have diverged: {where}. {cure}"


def _lost(error: str, places: Mapping[int, object], silent: Sequence[int] = ()) -> str:
    """Return the error for a broken connection, with what is known of the ranks."""
    where = "".join(f"; rank {rank} {place}" for rank, place in sorted(places.items()))
    return (
        f"A connection between ranks has failed ({error}). A rank was killed, ran out of memory, or"
        " exited without an error: the launcher's output or the system log names it"
        f"{where}{f'; no report from {listed(silent)}' if silent else ''}."
    )


def _lost_host(ranks: Sequence[int]) -> str:
    return (
        f"The host of {listed(ranks)} is lost: it has not answered for {LOST_SECONDS} s. Its power"
        " or its network has failed."
    )


def _failed(rank: int, step: int, error: BaseException) -> str:
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


def listed(ranks: Sequence[int]) -> str:
    """Return the text for several ranks."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def are_stuck(everyone: Mapping[int, Place]) -> bool:
    """Return whether each rank waits for a collective that another waiting rank has not begun."""
    waiting = [place for place in everyone.values() if place.name]
    names: dict[int, str] = {}
    for number, name in (one.queued for one in everyone.values()):
        if names.setdefault(number, name) != name:
            return True  # two messages without tags have met, so neither ends
    return bool(waiting) and all(
        any(other.begun.get(one.channel, 0) < one.number for other in everyone.values())
        for one in waiting
    )


# -- connections -----------------------------------------------------------------------------------


class Line:
    """One end of the connection between a rank and the hub, for messages of a kind and a value."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        limit = struct.pack("ll", _ANSWER_SECONDS, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._socket = connection
        self._mutex = threading.RLock()
        self._received = b""

    def fileno(self) -> int:
        """Return the number by which the system is asked for messages that have come."""
        return self._socket.fileno()

    def send(self, kind: str, value: Any) -> None:
        """Send a message, unless the connection has ended."""
        message = json.dumps((kind, value)).encode() + b"\n"
        with self._mutex, contextlib.suppress(OSError):
            self._socket.sendall(message)

    def receive(self) -> Iterator[tuple[str, Any]]:
        """Yield the messages that have come, the last of a connection that ended being its end."""
        end = ""
        try:
            while chunk := self._socket.recv(2**16, socket.MSG_DONTWAIT):
                self._received += chunk
            end = "closed"
        except BlockingIOError:
            pass
        except OSError as error:
            end = "silent" if error.errno in SILENT else "closed"
        *messages, self._received = self._received.split(b"\n")
        try:
            yield from map(json.loads, messages)
        except ValueError:  # a stranger
            end = "closed"
        if end:
            self.close()
            yield end, None

    def close(self) -> None:
        """End the connection; what was sent still arrives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # processes that were forked have it too

    def __del__(self) -> None:
        # Not before: a thread that reads from a number that was closed may read what another has.
        self._socket.close()


_numbers = itertools.count(1)


class Hub:
    """Rank 0's knowledge of all ranks, by a line to each.

    Args:
        world_size: Number of ranks.

    Attributes:
        offer: Its port, a word by which it knows its ranks, and the number of the run.
        hosts: The ranks of each host.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        try:
            self._door = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=world_size
            )
        except (OSError, ValueError):  # a system without one of them
            self._door = socket.create_server(("", 0), backlog=world_size)
        self._door.setblocking(False)
        self.offer = self._door.getsockname()[1], uuid4().hex, next(_numbers)
        self.hosts: dict[str, list[int]] = {}
        self._lines: dict[Line, int | None] = {}
        self._num_missing = world_size
        self._places: dict[int, Place] = {}
        self._gone: list[int] = []
        self._loss: tuple[int, str] | None = None
        self._suspects: dict[int, int] = {}
        self._round, self._answers = 0, set[int]()
        self._end: tuple[str, str] | None = None

    @property
    def ends(self) -> list[Any]:
        """The sources of messages; none when all ranks have gone."""
        return [*self._lines, self._door] if self._num_missing else [*self._lines]

    def add(self, connection: socket.socket) -> None:
        """Take messages from a new connection."""
        self._lines[Line(connection)] = None

    def serve(self) -> None:
        """Take the messages that have come."""
        with contextlib.suppress(OSError):  # nobody else is there
            while self._num_missing:
                connection, _ = self._door.accept()
                end_when_silent(connection)
                self.add(connection)
        for line in [*self._lines]:
            for kind, value in line.receive():
                rank = self._lines[line]
                if kind in ("closed", "silent"):
                    del self._lines[line]
                if rank is not None:
                    self._take(rank, kind, value)
                elif kind == "hello" and value[0] == self.offer[1]:
                    self._welcome(line, value[1])
        if self._loss is not None:  # now that those who have gone are known
            rank, error = self._loss
            silent = self._gone or [r for r in range(self._world_size) if r not in self._places]
            self._publish(_lost(error, self._places, [r for r in silent if r != rank]))

    def _welcome(self, line: Line, rank: int) -> None:
        self._lines[line] = rank
        self._num_missing -= 1
        if not self._num_missing:
            self._door.close()
        if self._end is not None:
            line.send(*self._end)

    def _take(self, rank: int, kind: str, value: Any) -> None:
        """Take a message of a rank."""
        if kind == "failed":
            self._publish(value, "failed")
        elif kind == "lost":
            error, place = value
            self._note(rank, place)
            self._loss = rank, error
        elif kind == "silent":
            ranks = next((ranks for ranks in self.hosts.values() if rank in ranks), [rank])
            self._publish(_lost_host(ranks), is_news=True)
        elif kind == "closed":
            if rank not in self._places or self._places[rank].name:
                self._note(rank, None)
                self._gone.append(rank)
        else:
            if kind == "answer":
                number, value = value
                self._answers |= {rank} if number == self._round else set()
            self._note(rank, value)
            self._look_for_deadlock()

    def _note(self, rank: int, place: Any) -> None:
        self._places.pop(rank, None)
        if place is not None:
            self._places[rank] = Place(**place)

    def _look_for_deadlock(self) -> None:
        """End the run if all ranks are stuck, and have stayed where they were when asked."""
        waits = {rank: place.wait for rank, place in self._places.items() if place.name}
        if len(self._places) < self._world_size or not are_stuck(self._places):
            self._suspects = {}
        elif waits != self._suspects:
            self._suspects, self._answers = waits, set()
            self._round += 1
            self._send("ask", self._round)
        elif self._answers == set(waits):
            self._publish(diverged(self._places), is_news=True)

    def _publish(self, end: str, kind: str = "end", *, is_news: bool = False) -> None:
        """End the run on all ranks with an error, unless it has ended."""
        if self._end is None:
            self._end = kind, end
            self._send(kind, end)
            if is_news:
                log.error("%s", end)

    def _send(self, kind: str, value: Any) -> None:
        for line in self._lines:
            line.send(kind, value)


# -- the watch -------------------------------------------------------------------------------------


class Watchdog:
    """A watch over this rank's waits, kept by a background thread.

    Args:
        collectives: The log of this rank.

    Attributes:
        has_left: Whether this rank is in no run that is watched.
    """

    def __init__(self, collectives: CollectiveLog) -> None:
        self.has_left = True
        self._log = collectives
        self._rank, self._neighbors = 0, [0]
        self._line: Line | None = None
        self._told = 0
        self._has_ended = threading.Event()
        self._ended_at: float | None = None
        self._looks = 0
        # The collectives begun, and since which look and time there are no more.
        self._quiet = (0, 0, 0.0)

    def join(self, rank: int, world_size: int, exchange: Callable[[Any], list[Any]]) -> int:
        """Join the run of ``world_size`` ranks, and return its number, the same on all ranks.

        ``exchange`` returns every rank's value.
        """
        _start_to_look()
        hub = Hub(world_size) if rank == 0 else None
        master = process_groups.master()
        offers = exchange((own_address(master) if master else "", hub and hub.offer))
        port, word, number = offers[0][1]
        hosts: dict[str, list[int]] = {}
        for other, (address, _) in enumerate(offers):
            hosts.setdefault(address, []).append(other)
        self._rank, self._neighbors = rank, hosts[offers[0][0]]
        try:
            if hub is not None:
                connection, other_end = socket.socketpair()
                hub.hosts = hosts
                hub.add(other_end)
                _hubs.append(hub)
            else:
                place = master or "127.0.0.1", port
                connection = socket.create_connection(place, _ANSWER_SECONDS)
                end_when_silent(connection)
        except OSError as error:
            log.warning("Rank %d is not watched, as it cannot reach rank 0: %s", rank, error)
            return int(number)
        self._line = Line(connection)
        self._line.send("hello", (word, rank))
        self.has_left = False
        self._log.explain = self.explain
        _watchdogs[id(self)] = self
        return int(number)

    # -- where this rank is ----------------------------------------------------------------------

    def place(self, patience: float = 0.0) -> Place | None:
        """Return where this rank has waited, or been blocked, for ``patience`` seconds, if so."""
        self._looks += 1
        before, first_look, since = self._quiet
        if (count := sum(dict(self._log.begun).values())) != before:
            first_look, since = self._looks, monotonic()
        self._quiet = count, first_look, since
        last = self._log.untagged
        if (waiting := self._log.waiting) is not None:
            collective, caller = waiting.collective, _caller(waiting.frame)
            number, since = waiting.number, waiting.since
        elif last is not None and monotonic() - since > QUIET_SECONDS:
            collective, caller, number = last, "", -first_look
        else:
            return None
        if monotonic() - since < patience:
            return None
        return Place(
            *collective, self._log.step, caller, wait=number, begun=dict(self._log.begun),
            queued=(0, "") if last is None else (last.number, last.name),
        )  # fmt: skip

    def describe(self, name: str) -> str:
        """Return a description of this rank, which waits for the collective of this name."""
        return str(Place(name, "", 0, self._log.step, _caller(sys._getframe(1))))

    # -- the end of a run ------------------------------------------------------------------------

    def explain(self, error: BaseException) -> None:
        """Raise the error that ends the run if ``error`` is of a broken connection."""
        if not self.has_left and process_groups.is_of_connection(error):
            self._lose(error)
            raise RuntimeError(self._log.verdict) from error

    def _lose(self, error: BaseException) -> None:
        """End the run because a connection has broken, unless it has ended."""
        if self._log.verdict:
            self._log.is_over = True
            return
        what = next(iter(str(error).splitlines()), "")
        if self._line is not None:
            self._line.send("lost", (what, _sent(self.place())))
            self._has_ended.wait(_ANSWER_SECONDS)
        # Before anything is given up: a rank that its device lets go must raise it.
        if not self._log.verdict:
            self._log.verdict = _lost(what, {0: "does not answer" if self._line else "has exited"})
        self._log.is_over = True
        # What a device still sends would never arrive, and the process could not exit.
        process_groups.give_up_devices()

    def end(self, error: BaseException) -> None:
        """End the run on all ranks because ``error`` ends it on this one.

        A broken connection's error is on its way to the user: the run's replaces its text.
        """
        if self.has_left:
            return
        if process_groups.is_of_connection(error):
            self._lose(error)
            error.__cause__, error.args = RuntimeError(*error.args), (self._log.verdict,)
        elif not self._log.verdict and self._line is not None:
            self._line.send("failed", _failed(self._rank, self._log.step, error))
            self._has_ended.wait(_ANSWER_SECONDS)  # until all have been told

    def leave(self) -> None:
        """Tell that this rank begins no more collectives, and stop watching it.

        Collectives that it begins afterwards, with others that have left too, are not watched.
        Called at any place of any thread when the owner is collected as garbage.
        """
        self.has_left = True
        _watchdogs.pop(id(self), None)
        line, self._line = self._line, None
        if line is not None and _process == os.getpid():
            line.send("left", _sent(Place("", "", 0, self._log.step, begun=dict(self._log.begun))))
            line.close()

    # -- the thread ------------------------------------------------------------------------------

    @property
    def ends(self) -> list[Any]:
        """The sources of messages."""
        return [] if self._line is None else [self._line]

    def look(self) -> None:
        """Answer the hub, tell it where this rank is if it has waited for long, and obey it."""
        for line in self.ends:
            for kind, value in line.receive():
                if kind == "ask":
                    line.send("answer", (value, _sent(self.place())))
                elif kind in ("failed", "end"):
                    self._stop(value, is_over=kind == "end")
                elif kind == "silent":
                    log.error("%s", end := _lost_host(self._neighbors))
                    self._stop(end)
                else:  # rank 0 has left, or exited
                    self._line = None
                    self._has_ended.set()
        if self._ended_at is not None:
            self._obey(self._ended_at)
        elif what := process_groups.failure_on_device():
            self._stop_for_device(what)
        else:
            for line in self.ends:
                here = self.place(PATIENCE)
                before, self._told = self._told, here.wait if here else 0
                if self._told != before:
                    line.send("place", _sent(here))

    def _stop(self, end: str, *, is_over: bool = True) -> None:
        """End the run on this rank."""
        self._log.verdict = self._log.verdict or end
        self._log.is_over = self._log.is_over or is_over
        self._ended_at = monotonic()
        for line in self.ends:
            line.close()
        self._line = None
        self._has_ended.set()

    def _stop_for_device(self, what: str) -> None:
        """End the run because a device has failed: this rank may be blocked by it."""
        for line in self.ends:
            line.send("lost", (what, _sent(self.place())))
        if self._line is None:
            self._stop(_lost(what, {0: "has exited"}))
            process_groups.give_up_devices()

    def _obey(self, ended_at: float) -> None:
        """Make this rank's waits raise, also those that the log does not know."""
        waiting = self._log.waiting
        patience = TICK if self._log.is_over else LAST_SECONDS
        waits = waiting is not None and monotonic() - waiting.since > patience
        if waits or monotonic() - ended_at > GRACE_SECONDS:
            self._ended_at = ended_at if waits else inf
            self._log.is_over = True
            process_groups.give_up()


def _sent(place: Place | None) -> dict[str, Any] | None:
    return None if place is None else asdict(place)


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
_hubs: list[Hub] = []
"""Those that ranks are connected with; they outlast rank 0's own part in the run."""
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
        _hubs.clear()
        atexit.register(_exit)
        # What multiprocessing forks ends without the above.
        Finalize(None, _exit, exitpriority=0)
        threading.Thread(target=_look_now_and_then, name="zero.watchdog", daemon=True).start()


def end_at_exit() -> None:
    """Destroy all process groups when the process exits.

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
    if _process == os.getpid():
        for watchdog in _watched():
            if error is not None:
                watchdog.end(error)
            watchdog.leave()
    if _ends_groups:
        process_groups.end(after_error=error is not None)


def _look_now_and_then() -> None:
    while True:
        ends = [end for hub in _hubs for end in hub.ends]
        ends += [end for watchdog in _watched() for end in watchdog.ends]
        with contextlib.suppress(OSError, ValueError, KeyError):  # one is closed meanwhile
            wait(ends, TICK)
        try:
            _look_at_all()
        except Exception:  # groups may end meanwhile
            log.debug("A look at the ranks has failed.", exc_info=True)


def _look_at_all() -> None:
    # A function of its own: between looks, no local variable may keep a watchdog alive.
    for hub in [*_hubs]:
        hub.serve()
        if not hub.ends:
            _hubs.remove(hub)
    for watchdog in _watched():
        watchdog.look()
