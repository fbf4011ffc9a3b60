"""The control plane: decisions and small values that the ranks exchange in Python.

A sync point is one that all ranks reach together; it returns the maximum of each of its flags over
the ranks. All sync points are messages of one size with a tag of their own, so that ranks at
different sync points notice it: each message begins with a checksum of the sync point and of what
this rank has done in order since the last one, and with its complement. Where the maximum of a
number and that of its complement no longer match, the ranks differ::

    rank 0   gather a, gather b | sync point BEGIN    checksums differ: both ranks raise an error
    rank 1   gather a           | sync point BEGIN    that names what each of them has done
"""

from __future__ import annotations

import copy
import itertools
import queue
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from math import inf, nan
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_zero.comm.process_groups import (
    give_up_devices,
    is_initialized,
    kept,
    last_works,
    new_group_of_hosts,
)
from lightning_zero.comm.watchdog import (
    GRADIENT,
    TOUCH,
    CollectiveId,
    Watchdog,
    diverged,
    listed,
)
from lightning_zero.tensors import Work, lasting_tensors, runs_outside, unseen


class SyncPoint(Enum):
    """A point at which all ranks wait for each other; its value names it in errors."""

    SETUP = "the setup of shared memory"
    BEGIN = "the start of a backward pass"
    END = "the end of a backward pass"
    STEP = "an optimizer step"
    STEPPED = "the end of an optimizer step"
    EDIT = "a change to the weights"
    REFRESH = "the refresh of weights"
    FORWARD = "the end of a forward pass without gradients"
    BATCH = "the next batch of training data"
    CLOSE = "the end of training"
    TOUCH = TOUCH
    GRADIENT = GRADIENT
    STATES = "the whole states of an optimizer"
    VALUE = "the whole value in a state dict"
    COMPARE = "the comparison of models, settings and optimizers"


_AHEAD = {SyncPoint.BEGIN, SyncPoint.FORWARD}
"""Those that are waited for later, while the device computes."""
_TAGS_OF_A_RUN = 2**20
_TAG = _TAGS_OF_A_RUN - 1
"""Of messages of sync points; those of units have smaller ones."""
_NUM_RUNS = 2**10
_CHECKSUM = 4
_NOTICES = 2
_HEADER = 2 * _CHECKSUM + _NOTICES


def with_complements(numbers: bytes) -> bytes:
    """Return flags whose maxima over the ranks have this form again only if all ranks agree."""
    return numbers + bytes([255 - number for number in numbers])


def hops(rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield to whom a rank sends what it knows, and from whom it receives, hop by hop.

    Each hop doubles the number of ranks that it knows of, so ``ceil(log2(size))`` are enough, where
    gloo's all-reduce takes ``2 * (size - 1)``. What is heard twice does not change a maximum.
    """
    distance = 1
    while distance < size:
        yield (rank + distance) % size, (rank - distance) % size
        distance *= 2


def _bring_about(begun: queue.SimpleQueue[tuple[Iterable[Work], Future[Any]] | None]) -> None:
    """Exchange the messages of one sync point after another."""
    while (one := begun.get()) is not None:
        works, is_over = one
        try:
            Pending(works).wait()
            is_over.set_result(None)
        except Exception as error:
            is_over.set_exception(error)
        del one, works


class Pending:
    """What is under way, and a function to call when it has arrived.

    Args:
        works: What to wait for; nothing if it has arrived.
        then: The function.
        begun: The watchdog and the collective that it is, if it is one of this package.
    """

    def __init__(
        self,
        works: Iterable[Work] = (),
        *,
        then: Callable[[], Any] | None = None,
        begun: tuple[Watchdog, CollectiveId] | None = None,
    ) -> None:
        self._works, self._then, self._begun = works, then, begun
        self._result: Any = None

    def wait(self) -> Any:
        """Wait until all has arrived, call the function once, and return its result."""
        works, begun, then = self._works, self._begun, self._then
        self._works, self._begun, self._then = (), None, None
        if begun is not None:
            begun[0].wait(begun[1], works)
        else:
            for work in works:
                work.wait()
        if then is not None:
            self._result = then()
        return self._result


MESSAGE_BYTES = 16 * 2**20
"""The most bytes that ``collect`` holds at a time."""


class Control:
    """All ranks of the default process group, for decisions and exchanges of values.

    Args:
        alone: Ignore the process group: this is the only rank.

    Attributes:
        rank: This process's number among all ranks.
        world_size: Number of all ranks.
        watchdog: Knows the collectives that this rank has begun, and those that never end.
        capacity: Flags that a sync point has room for; the same on all ranks.
        notices: Flags of this rank that every sync point carries besides its own.
        noticed: Their maxima over the ranks, at the last sync point that was waited for.
        first_tag: The first tag of messages: those of one run never meet what an exception has left
            of another.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self.rank, self.world_size = 0, 1
        self.watchdog = Watchdog()
        self.capacity = 64
        self.notices = bytearray(_NOTICES)
        self.first_tag = 0
        self._last_ahead: Sequence[Work] = ()
        self._begun_ahead: queue.SimpleQueue[Any] | None = None
        self._group: Any = None
        self._is_separate = False
        if is_initialized() and not alone:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if dist.get_backend() != "gloo":
                # Decisions travel between host CPUs, so that they never stall the device.
                self._group = kept("control", new_group_of_hosts)
        self.noticed = bytes(_NOTICES) if self.world_size > 1 else self.notices
        if self.world_size > 1 and dist.get_backend() != "fake":
            number = self.watchdog.join(self.rank, self.world_size, self.gather_objects)
            self.first_tag = number % _NUM_RUNS * _TAGS_OF_A_RUN

    @property
    def group(self) -> Any:
        """The group of its messages; the default one is not kept, so that it can be destroyed."""
        return dist.group.WORLD if self._group is None else self._group

    # -- sync points -----------------------------------------------------------------------------

    def call(self, sync_point: SyncPoint, flags: bytes = b"", *, about: str = "") -> Pending:
        """Come to a sync point; waiting returns the maximum of each of ``flags``.

        If it is waited for later, a thread exchanges the messages, so that, as with an all-reduce,
        the others wait for nothing that this rank does after it has begun. Otherwise the wait does.
        Ranks that differ in ``about`` have diverged.
        """
        assert len(flags) <= self.capacity, "more flags than were reserved"
        if self.world_size == 1:
            return Pending(then=lambda: flags)
        name = f"{sync_point.value} {about}" if about else sync_point.value
        events, self.watchdog.events = self.watchdog.events, []
        met = "\n".join([*events, name, str(len(flags))])
        checksum = zlib.crc32(met.encode()).to_bytes(_CHECKSUM, "big")
        sent = with_complements(checksum) + self.notices + flags
        padded = bytearray(sent.ljust(_HEADER + self.capacity, b"\0"))
        with lasting_tensors():  # it may be waited for outside of inference mode
            message = torch.frombuffer(padded, dtype=torch.uint8)
        begun = self.watchdog, self.watchdog.begin(name, sync_point.value)
        works: Iterable[Work] = self._hops(message)
        if sync_point in _AHEAD:
            works = self._last_ahead = [self._ahead(works)]
        else:  # messages meet in the order in which ranks have begun them
            works = itertools.chain(self._last_ahead, works)

        def maxima() -> bytes:
            found = bytes(message[: len(sent)].tolist())
            if found[: 2 * _CHECKSUM] != with_complements(found[:_CHECKSUM]):
                self._refuse(name, events)
            self.noticed = found[2 * _CHECKSUM : _HEADER]
            return found[_HEADER:]

        return Pending(works, then=maxima, begun=begun)

    def _ahead(self, works: Iterable[Work]) -> Future[Any]:
        """Let a thread wait for works, one by one, behind those that it was given before."""
        if self._begun_ahead is None:
            begun = self._begun_ahead = queue.SimpleQueue()
            weakref.finalize(self, begun.put, None).atexit = False
            # A thread of this run: it may wait in vain for a rank on which the run has ended.
            thread = threading.Thread(target=_bring_about, args=[begun], name="zero.sync")
            thread.daemon = True
            thread.start()
        is_over: Future[Any] = Future()
        self._begun_ahead.put((works, is_over))
        return is_over

    def _hops(self, message: Tensor) -> Iterator[Work]:
        """Make the message the maximum, hop by hop; yield what to wait for."""
        received = message.clone()
        group, tag = self.group, self.first_tag + _TAG
        for target, source in hops(self.rank, self.world_size):
            with unseen():
                works = [group.recv([received], source, tag), group.send([message], target, tag)]
            # To free works that have just ended would take longer than the hop.
            last_works[:] = works
            yield from works
            torch.maximum(message, received, out=message)

    def _refuse(self, name: str, events: list[str]) -> NoReturn:
        """Raise an error with every rank's place; all are here, though after different events."""
        places = self.gather_objects((self.watchdog.describe(name), events))
        where = [place for place, _ in places]
        for differing in itertools.zip_longest(
            *(events for _, events in places), fillvalue="nothing more"
        ):
            if len(set(differing)) > 1:
                where = [f"{w}, after {e}" for w, e in zip(where, differing, strict=True)]
                break
        verdict = diverged(dict(enumerate(where)))
        if self.watchdog.untagged is not None:
            # They may have met the wrong ones, or wait on a device for ones that never come: their
            # groups cannot be used again.
            self.watchdog.verdict, self.watchdog.is_over = verdict, True
            give_up_devices()
        raise RuntimeError(verdict)

    def reserve(self, num_flags: int) -> None:
        """Make room for ``num_flags`` flags; all ranks must ask for the same number."""
        self.capacity = max(self.capacity, num_flags)

    def all_equal(self, sync_point: SyncPoint, digest: bytes) -> bool:
        """Return whether all ranks come to a sync point with the same ``digest``, a few bytes."""
        maxima: bytes = self.call(sync_point, with_complements(digest)).wait()
        return maxima == with_complements(maxima[: len(digest)])

    # -- values ----------------------------------------------------------------------------------

    @runs_outside
    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with rank 0's."""
        if self.world_size > 1:
            with self._at("a broadcast of rank 0's values"):
                dist.broadcast(tensor, 0)

    @runs_outside
    def sum(self, tensor: Tensor, place: str = "a sum over the ranks") -> None:
        """Replace ``tensor`` by its sum over the ranks."""
        if self.world_size > 1:
            with self._at(place):
                dist.all_reduce(tensor)

    @runs_outside
    def max(self, tensor: Tensor, place: str = "a maximum over the ranks") -> None:
        """Replace the floating ``tensor`` by its maximum over the ranks, NaN if one has NaN."""
        if self.world_size > 1:
            # Gloo's maximum drops a NaN that does not come first, so NaNs travel as a mask.
            is_nan = tensor.isnan()
            both = torch.stack([is_nan.to(tensor.dtype), tensor.masked_fill(is_nan, -inf)])
            with self._at(place):
                dist.all_reduce(both, dist.ReduceOp.MAX)
            tensor.copy_(both[1].masked_fill(both[0] > 0, nan))

    @runs_outside
    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's ``value`` on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        with self._at("a broadcast of rank 0's values"):
            dist.broadcast_object_list(box, 0, group=self._group)
        return box[0]

    @runs_outside
    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in rank order."""
        values = [value] * self.world_size
        if self.world_size > 1:
            with self._at("an exchange of values"):
                dist.all_gather_object(values, value, group=self._group)
        return values

    def collect(self, part: Tensor, start: int) -> Iterator[tuple[int, Tensor]]:
        """Yield every rank's bytes on rank 0, each message with its place; a collective.

        The other ranks yield nothing. ``part`` is this rank's bytes ``[n]``, on any device, and
        ``start`` their place. A message has at most :data:`MESSAGE_BYTES`.
        """
        extents = self.gather_objects((start, len(part)))
        with self.watchdog.explained():
            if self.rank:
                for at in range(0, len(part), MESSAGE_BYTES):
                    dist.send(part[at : at + MESSAGE_BYTES].to("cpu"), 0, group=self._group)
                return
            for peer, (first, nbytes) in enumerate(extents):
                for at in range(0, nbytes, MESSAGE_BYTES):
                    chunk = part[at : at + MESSAGE_BYTES]
                    if peer:
                        chunk = torch.empty(min(MESSAGE_BYTES, nbytes - at), dtype=torch.uint8)
                        dist.recv(chunk, peer, group=self._group)
                    yield first + at, chunk

    def _at(self, place: str) -> AbstractContextManager[None]:
        watchdog = self.watchdog  # which knows the waits of one thread
        return watchdog.explained() if self._is_separate else watchdog.at(place)

    def separate(self) -> Control:
        """Return a control plane with a group of its own, to exchange values in another thread."""
        other = copy.copy(self)
        other._is_separate = True
        if self.world_size > 1:
            other._group = kept("another thread", new_group_of_hosts)
        return other


_KINDS: list[type[Exception]] = [
    FileNotFoundError, PermissionError, OSError, KeyError, TypeError, ValueError, RuntimeError
]  # fmt: skip


class Outcome:
    """The success or failure of an operation on this rank."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run a block of code; the first error of all blocks is kept for :meth:`agree`."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error

    def agree(self, control: Control, doing: str) -> None:
        """Raise on every rank if any rank failed at ``doing``; a collective.

        Raises:
            Exception: Of the first failing rank's kind, with all failing ranks and their messages.
        """
        kind = next((k for k in _KINDS if isinstance(self.error, k)), RuntimeError)
        own = None if self.error is None else (kind, _message(self.error))
        found = control.gather_objects(own)
        failed = {rank: what for rank, what in enumerate(found) if what is not None}
        if not failed:
            return
        ranks_of: dict[str, list[int]] = {}
        for rank, (_, message) in failed.items():
            ranks_of.setdefault(message, []).append(rank)
        reasons = "; ".join(f"{_ranks(ranks, control)}{text}" for text, ranks in ranks_of.items())
        kind, _ = next(iter(failed.values()))
        raise kind(f"{doing} failed: {reasons}") from self.error


@contextmanager
def agreed(control: Control, doing: str) -> Iterator[None]:
    """Enter a context that all ranks leave with an error if any does; a collective at its end."""
    outcome = Outcome()
    with outcome.attempt():
        yield
    outcome.agree(control, doing)


def _ranks(ranks: list[int], control: Control) -> str:
    if control.world_size == 1 or len(ranks) == control.world_size:
        return ""
    return f"on {listed(ranks)}: "


def _message(error: Exception) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text or type(error).__name__
