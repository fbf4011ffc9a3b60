"""The collectives of this rank, and what ends a run on all ranks when one of them cannot go on.

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

    begin, wait ─────────>  has waited for 2 s? ───── place ───────>  each waits for what another
                                                                      has not begun?
    raises ────────────────────────────────────────── end ─────────>  the first error ends the run
    a message fails ───────────────────────────────── lost ────────>
    needs no more ─────────────────────────────────── place ───────>
                            has the run ended? <───── end ──────────
    the wait raises <─────  gives up all connections
    raises the error

A deadlock is not guessed but **proven**: each rank waits for a collective that another of those
which take part has not begun. They need not wait at the same time: the first that has gone on since
it told so would have needed another that went on before. A rank that computes, loads data or writes
a file may take as long as it likes: it has no place. On a device, messages are only queued, and the
host may be blocked anywhere behind one that never ends. So a rank that begins nothing for 5 s is in
the place of the last message that it has queued, as if it waited for that; the proof is the same.

A rank that waits :data:`LAST_SECONDS` for a collective when the run has ended gives up its
connections, so that the wait raises. So does one that waits in a collective of the user's own,
which no watchdog knows, :data:`GRACE_SECONDS` after the end.

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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from time import monotonic
from types import FrameType
from typing import Any, NamedTuple
from uuid import uuid4

from lightning_zero.comm import process_groups
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
"""How long a rank waits for a collective after the end. The others may have begun it: where all
ranks raise at one place, each gets there and raises its own exception."""

_ANSWER_SECONDS = 5
"""How long a rank waits for its hub: to connect, to send, and for the end of the run."""

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


class CollectiveId(NamedTuple):
    """One collective.

    Attributes:
        name: Its name, as shown in errors.
        channel: Collectives of one channel are told apart by their order; by default its name.
        number: Its number in its channel, from 1.
        ranks: Those that take part; all if empty.
    """

    name: str
    channel: str
    number: int
    ranks: Sequence[int] = ()


_NONE = CollectiveId("", "", 0)


class Place(NamedTuple):
    """Where a rank waits, or may be blocked, or that it has left the run.

    Attributes:
        collective: What it waits for; nothing if it has left.
        step: Optimizer steps that it has ended.
        caller: The line of the user's code that led to the wait; empty for a rank that waits
            nowhere, whose device may wait for the collective.
        begun: How many collectives of each channel it has begun.
        queued: Its last collective without a tag, if there was one.
    """

    collective: CollectiveId
    step: int
    caller: str = ""
    begun: Mapping[str, int] = {}
    queued: CollectiveId = _NONE

    def __str__(self) -> str:
        name, step = self.collective.name, self.step
        if not name:
            return f"has left the run after step {step}"
        if not self.caller:
            return f"is in step {step}, after {name}"
        return f"waits in step {step} for {name} (called at {self.caller})"


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


def _lost_host(rank: int, addresses: Sequence[str]) -> str:
    ranks = [other for other, address in enumerate(addresses) if address == addresses[rank]]
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
    """Return whether each rank waits for a collective that another of its ranks has not begun."""
    waiting = [place.collective for place in everyone.values() if place.collective.name]
    names: dict[Any, str] = {}
    for last in (one.queued for one in everyone.values()):
        if names.setdefault((*last.ranks, last.number), last.name) != last.name:
            return True  # two messages without tags have met, so neither ends
    return bool(waiting) and all(
        any(everyone[rank].begun.get(one.channel, 0) < one.number for rank in one.ranks or everyone)
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
        addresses: The address of each rank's host.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._door = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=both, backlog=world_size
        )
        self._door.setblocking(False)
        self.offer = self._door.getsockname()[1], uuid4().hex, next(_numbers)
        self.addresses: list[str] = []
        self._lines: dict[Line, int | None] = {}
        self._num_missing = world_size
        self._places: dict[int, Place] = {}
        self._gone: list[int] = []
        self._loss: tuple[int, str] | None = None
        self._end = ""

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
        if self._end:
            line.send("end", self._end)

    def _take(self, rank: int, kind: str, value: Any) -> None:
        """Take a message of a rank."""
        if kind == "end":
            self._publish(value)
        elif kind == "silent":
            self._publish(_lost_host(rank, self.addresses), is_news=True)
        elif kind != "closed" or rank not in self._places or self._places[rank].collective.name:
            if kind == "closed":  # without having left
                self._gone.append(rank)
            elif kind == "lost":
                error, value = value
                self._loss = rank, error
            self._places.pop(rank, None)
            if value is not None:
                own, step, caller, begun, last = value
                here = Place(CollectiveId(*own), step, caller, begun, CollectiveId(*last))
                self._places[rank] = here
            if len(self._places) == self._world_size and are_stuck(self._places):
                self._publish(diverged(self._places), is_news=True)

    def _publish(self, end: str, *, is_news: bool = False) -> None:
        """End the run on all ranks with an error, unless it has ended."""
        if not self._end:
            self._end = end
            for line in self._lines:
                line.send("end", end)
            if is_news:
                log.error("%s", end)


# -- the watch -------------------------------------------------------------------------------------


class Watchdog:
    """The collectives of this rank, watched by a background thread.

    Every transfer is noted here, which takes only a few calls and no message.

    Attributes:
        step: Optimizer steps that have ended.
        events: What has happened since the last sync point that must happen in the same order on
            all ranks.
        begun: How many collectives of each channel have begun.
        untagged: The last collective that only its order identifies, if there was one.
        waiting: The wait that is under way, if any: for a collective, since when, and where.
        verdict: The error that ended the run on all ranks.
        is_over: Whether the connections are given up, so that every collective raises the verdict.
            Until then, collectives that the others have begun too still end.
        has_left: Whether this rank is in no run that is watched.
    """

    def __init__(self) -> None:
        self.step = 0
        self.events: list[str] = []
        self.begun: Counter[str] = Counter()
        self.untagged: CollectiveId | None = None
        self.waiting: tuple[CollectiveId, float, FrameType] | None = None
        self.verdict = ""
        self.is_over = False
        self.has_left = True
        self._rank, self._addresses = 0, [""]
        self._line: Line | None = None
        self._told: Place | None = None
        self._has_ended = threading.Event()
        self._ended_at: float | None = None
        # The number of collectives begun, and since when there are no more.
        self._quiet = 0, 0.0

    def join(self, rank: int, world_size: int, exchange: Callable[[Any], list[Any]]) -> int:
        """Join the run of ``world_size`` ranks, and return its number, the same on all ranks.

        ``exchange`` returns every rank's value.
        """
        _start_to_look()
        hub = Hub(world_size) if rank == 0 else None
        master = process_groups.master()
        offers = exchange((own_address(master) if master else "", hub and hub.offer))
        port, word, number = offers[0][1]
        self._rank, self._addresses = rank, [address for address, _ in offers]
        try:
            if hub is not None:
                connection, other_end = socket.socketpair()
                hub.addresses = self._addresses
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
        _watchdogs[id(self)] = self
        return int(number)

    # -- collectives -----------------------------------------------------------------------------

    def begin(self, name: str, channel: str = "", ranks: Sequence[int] = ()) -> CollectiveId:
        """Note that this rank begins a collective of ``ranks``, or of all."""
        if self.is_over:
            raise RuntimeError(self.verdict)
        channel = channel or name
        self.begun[channel] += 1
        return CollectiveId(name, channel, self.begun[channel], ranks)

    def begin_untagged(self, name: str, channel: str, ranks: Sequence[int] = ()) -> CollectiveId:
        """Note that this rank begins a collective that only its order identifies."""
        collective = self.untagged = self.begin(name, channel, ranks)
        self.events.append(name)
        return collective

    def wait(self, collective: CollectiveId, works: Iterable[Any]) -> None:
        """Wait for ``works``, which end when the others have begun the collective too.

        Raises:
            RuntimeError: Ranks wait for each other in different places.
        """
        if self.is_over:
            # Gloo may wait forever for works after one has failed.
            raise RuntimeError(self.verdict)
        # Not within `explained`, as a context would cost six calls for every message.
        self.waiting = collective, monotonic(), sys._getframe(1)
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self.explain(error)
            raise
        finally:
            self.waiting = None

    @contextlib.contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Begin a collective, and mark code that waits for it."""
        self.waiting = self.begin(name), monotonic(), sys._getframe(2)
        try:
            with self.explained():
                yield
        finally:
            self.waiting = None

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Mark code that may find another rank gone: its errors are passed to :meth:`explain`."""
        try:
            yield
        except RuntimeError as error:
            self.explain(error)
            raise

    # -- where this rank is ----------------------------------------------------------------------

    def place(self, patience: float = 0.0) -> Place | None:
        """Return where this rank has waited, or been blocked, for ``patience`` seconds, if so."""
        waiting, last = self.waiting, self.untagged
        # Read after the wait: what has begun meanwhile may hide a deadlock, but not feign one.
        begun = dict(self.begun)
        if (count := sum(begun.values())) != self._quiet[0]:
            self._quiet = count, monotonic()
        if waiting is not None:
            collective, since, frame = waiting
            caller = _caller(frame)
        elif last is not None and monotonic() - self._quiet[1] > QUIET_SECONDS:
            collective, caller, since = last, "", self._quiet[1]
        else:
            return None
        if monotonic() - since < patience:
            return None
        return Place(collective, self.step, caller, begun, last or _NONE)

    def describe(self, name: str) -> str:
        """Return a description of this rank, which waits for the collective of this name."""
        return str(Place(CollectiveId(name, "", 0), self.step, _caller(sys._getframe(1))))

    # -- the end of a run ------------------------------------------------------------------------

    def explain(self, error: BaseException) -> None:
        """Raise the error that ends the run if ``error`` is of a broken connection."""
        if not self.has_left and process_groups.is_of_connection(error):
            self._lose(error)
            raise RuntimeError(self.verdict) from error

    def _lose(self, error: BaseException) -> None:
        """End the run because a connection has broken, unless it has ended."""
        if not self.verdict:
            what = next(iter(str(error).splitlines()), "")
            if self._tell("lost", (what, self.place())):
                self._has_ended.wait(_ANSWER_SECONDS)
            # Before anything is given up: a rank that its device lets go must raise it.
            gone = {0: "does not answer" if self._line else "has exited"}
            self.verdict = self.verdict or _lost(what, gone)
            # What a device still sends would never arrive, and the process could not exit.
            process_groups.give_up_devices()
        self.is_over = True

    def end(self, error: BaseException) -> None:
        """End the run on all ranks because ``error`` ends it on this one.

        A broken connection's error is on its way to the user: the run's replaces its text.
        """
        if self.has_left:
            return
        if process_groups.is_of_connection(error):
            self._lose(error)
            error.__cause__, error.args = RuntimeError(*error.args), (self.verdict,)
        elif not self.verdict and self._tell("end", _failed(self._rank, self.step, error)):
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
            line.send("place", Place(_NONE, self.step, begun=dict(self.begun)))
            line.close()

    def _tell(self, kind: str, value: Any) -> bool:
        """Send the hub a message; return whether it is there."""
        if (line := self._line) is not None:
            line.send(kind, value)
        return line is not None

    # -- the thread ------------------------------------------------------------------------------

    @property
    def ends(self) -> list[Any]:
        """The sources of messages."""
        return [] if self._line is None else [self._line]

    def look(self) -> None:
        """Tell the hub where this rank is if it has waited for long, and obey the hub."""
        for line in self.ends:
            for kind, value in line.receive():
                if kind == "end":
                    self._stop(value)
                elif kind == "silent":
                    log.error("%s", end := _lost_host(0, self._addresses))
                    self._stop(end)
                else:  # rank 0 has left, or exited
                    self._line = None
                    self._has_ended.set()
        if self._ended_at is not None:
            self._obey(self._ended_at)
        elif what := process_groups.failure_on_device():  # this rank may be blocked by it
            if not self._tell("lost", (what, self.place())):
                self._stop(_lost(what, {0: "has exited"}))
                process_groups.give_up_devices()
        elif (here := self.place(PATIENCE)) != self._told:
            self._told = here
            self._tell("place", here)

    def _stop(self, end: str) -> None:
        """End the run on this rank."""
        self.verdict = self.verdict or end
        # What has failed on a device lets no message begin.
        self.is_over = self.is_over or bool(process_groups.failure_on_device())
        self._ended_at = monotonic()
        for line in self.ends:
            line.close()
        self._line = None
        self._has_ended.set()

    def _obey(self, ended_at: float) -> None:
        """Make this rank's waits raise, also those that no watchdog knows."""
        waiting = self.waiting
        waits = waiting is not None and monotonic() - waiting[1] > LAST_SECONDS
        if waits or monotonic() - ended_at > GRACE_SECONDS:
            self._ended_at = ended_at if waits else inf
            self.is_over = True
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
