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
import errno
import io
import itertools
import pickle
import queue
import threading
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from math import inf, nan
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.collective_log import CollectiveLog
from lightning_zero.comm.process_groups import (
    destroy,
    give_up_devices,
    group_for,
    is_initialized,
    last_works,
    new_group_of_hosts,
)
from lightning_zero.comm.watchdog import GRADIENT, TOUCH, Watchdog, diverged, listed
from lightning_zero.tensors import Scratch, Work, lasting_tensors, runs_outside, unseen


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


def _bring_about(begun: queue.SimpleQueue[PendingSync | None]) -> None:
    """Exchange the messages of one sync point after another."""
    while (sync := begun.get()) is not None:
        sync.run()
        del sync


class PendingSync:
    """A sync point that this rank has come to, and may still have to wait for.

    If it is waited for later, a thread exchanges the messages, so that, as with an all-reduce, the
    others wait for nothing that this rank does after it has begun. Otherwise :meth:`wait` does.

    Args:
        control: The ranks; a single one does not wait.
        sync_point: The sync point.
        flags: Flags whose maxima over the ranks :meth:`wait` returns.
        about: What it is about, which must be the same on all ranks.

    Attributes:
        is_over: The event that the thread is through.
    """

    def __init__(
        self, control: Control, sync_point: SyncPoint, flags: bytes, about: str = ""
    ) -> None:
        self._control, self._flags = control, flags
        self._name = f"{sync_point.value} {about}" if about else sync_point.value
        self._works: Iterator[Work] | None = None
        self._is_ahead = sync_point in _AHEAD
        if control.world_size == 1:
            return
        log = control.log
        self._events, log.events = log.events, []
        met = "\n".join([*self._events, self._name, str(len(flags))])
        checksum = zlib.crc32(met.encode()).to_bytes(_CHECKSUM, "big")
        message = with_complements(checksum) + control.notices + flags
        padded = bytearray(message.ljust(_HEADER + control.capacity, b"\0"))
        with lasting_tensors():  # it may be waited for outside of inference mode
            self._message = torch.frombuffer(padded, dtype=torch.uint8)
        self._collective = log.begin(self._name, sync_point.value)
        self._works = self._outcome() if self._is_ahead else self._hops()
        if self._is_ahead:
            self.is_over = threading.Event()
            self._error: BaseException | None = None
            control.begin_ahead(self)

    def wait(self) -> bytes:
        """Return the maximum of each flag over the ranks, once all have come.

        Raises:
            RuntimeError: The ranks have come to different sync points.
        """
        works, self._works = self._works, None
        if works is not None:
            control = self._control
            if not self._is_ahead and control.last_ahead is not None:
                # Messages meet in the order in which ranks have begun them.
                works = itertools.chain([control.last_ahead], works)
            control.log.wait(self._collective, works)
            maxima = bytes(self._message[: _HEADER + len(self._flags)].tolist())
            if maxima[: 2 * _CHECKSUM] != with_complements(maxima[:_CHECKSUM]):
                self._refuse()
            control.noticed, self._flags = maxima[2 * _CHECKSUM : _HEADER], maxima[_HEADER:]
        return self._flags

    def run(self) -> None:
        """Exchange the messages, in the thread."""
        try:
            for work in self._hops():
                work.wait()
        except BaseException as error:
            self._error = error
        finally:
            self.is_over.set()

    def _outcome(self) -> Iterator[Work]:
        """Yield what to wait for where the thread exchanges the messages."""
        yield self.is_over
        if self._error is not None:
            raise self._error

    def _hops(self) -> Iterator[Work]:
        """Make the message the maximum, hop by hop; yield what to wait for."""
        control, message, received = self._control, self._message, self._message.clone()
        group, tag = control.group, control.first_tag + _TAG
        for target, source in hops(control.rank, control.world_size):
            with unseen():
                works = [group.recv([received], source, tag), group.send([message], target, tag)]
            # To free works that have just ended would take longer than the hop.
            last_works[:] = works
            yield from works
            torch.maximum(message, received, out=message)

    def _refuse(self) -> NoReturn:
        """Raise an error with every rank's place; all are here, though after different events."""
        control = self._control
        places = control.gather_objects((control.watchdog.describe(self._name), self._events))
        where = [place for place, _ in places]
        for events in itertools.zip_longest(
            *(events for _, events in places), fillvalue="nothing more"
        ):
            if len(set(events)) > 1:
                where = [f"{w}, after {e}" for w, e in zip(where, events, strict=True)]
                break
        verdict = diverged(dict(enumerate(where)))
        if control.log.untagged is not None:
            # They may have met the wrong ones, or wait on a device for ones that never come: their
            # groups cannot be used again.
            control.log.verdict, control.log.is_over = verdict, True
            give_up_devices()
        raise RuntimeError(verdict)


MESSAGE_BYTES = 16 * 2**20
"""The most bytes that ``collect`` holds at a time."""
VALUE_BYTES = 512
"""The size of each rank's first message in ``gather_objects``."""


class Control:
    """All ranks of the default process group, for decisions and exchanges of values.

    Args:
        alone: Ignore the process group: this is the only rank.

    Attributes:
        rank: This process's number among all ranks.
        world_size: Number of all ranks.
        log: The collectives that this rank has begun.
        watchdog: Detects ranks that wait for each other in different places.
        capacity: Flags that a sync point has room for; the same on all ranks.
        notices: Flags of this rank that every sync point carries besides its own.
        noticed: Their maxima over the ranks, at the last sync point that was waited for.
        first_tag: The first tag of messages: those of one run never meet what an exception has left
            of another.
        last_ahead: The end of the last sync point that a thread takes care of.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self.rank, self.world_size = 0, 1
        self.log = CollectiveLog()
        self.watchdog = Watchdog(self.log)
        self.capacity = 64
        self.notices = bytearray(_NOTICES)
        self.first_tag = 0
        self.last_ahead: threading.Event | None = None
        self._begun_ahead: queue.SimpleQueue[PendingSync | None] | None = None
        self._group: Any = None
        self._separated: list[Control] = []
        if is_initialized() and not alone:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if dist.get_backend() != "gloo":
                # Decisions travel between host CPUs, so that they never stall the device.
                self._group = group_for("control", of_hosts=True)
        self.noticed = bytes(_NOTICES) if self.world_size > 1 else self.notices
        if self.world_size > 1 and dist.get_backend() != "fake":
            number = self.watchdog.join(self.rank, self.world_size, self.gather_objects)
            self.first_tag = number % _NUM_RUNS * _TAGS_OF_A_RUN

    @property
    def group(self) -> Any:
        """The group of its messages; the default one is not kept, so that it can be destroyed."""
        return dist.group.WORLD if self._group is None else self._group

    # -- sync points -----------------------------------------------------------------------------

    def call(self, sync_point: SyncPoint, flags: bytes = b"", *, about: str = "") -> PendingSync:
        """Come to a sync point; waiting returns the maximum of each of ``flags``.

        Ranks that differ in ``about`` have diverged.
        """
        assert len(flags) <= self.capacity, "more flags than were reserved"
        return PendingSync(self, sync_point, flags, about)

    def begin_ahead(self, sync: PendingSync) -> None:
        """Let a thread exchange the messages of a sync point, after those begun before."""
        if self._begun_ahead is None:
            begun = self._begun_ahead = queue.SimpleQueue()
            weakref.finalize(self, begun.put, None).atexit = False
            # A thread of this run: it may wait in vain for a rank on which the run has ended.
            thread = threading.Thread(target=_bring_about, args=[begun], name="zero.sync")
            thread.daemon = True
            thread.start()
        self.last_ahead = sync.is_over
        self._begun_ahead.put(sync)

    def reserve(self, num_flags: int) -> None:
        """Make room for ``num_flags`` flags; all ranks must ask for the same number."""
        self.capacity = max(self.capacity, num_flags)

    def all_equal(self, sync_point: SyncPoint, digest: bytes) -> bool:
        """Return whether all ranks come to a sync point with the same ``digest``, a few bytes."""
        maxima = self.call(sync_point, with_complements(digest)).wait()
        return maxima == with_complements(maxima[: len(digest)])

    # -- values ----------------------------------------------------------------------------------

    @runs_outside
    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with rank 0's."""
        if self.world_size > 1:
            with self.log.at("a broadcast of rank 0's values"):
                dist.broadcast(tensor, 0)

    @runs_outside
    def sum(self, tensor: Tensor, place: str = "a sum over the ranks") -> None:
        """Replace ``tensor`` by its sum over the ranks."""
        if self.world_size > 1:
            with self.log.at(place):
                dist.all_reduce(tensor)

    @runs_outside
    def max(self, tensor: Tensor, place: str = "a maximum over the ranks") -> None:
        """Replace the floating ``tensor`` by its maximum over the ranks, NaN if one has NaN."""
        if self.world_size > 1:
            # Gloo's maximum drops a NaN that does not come first, so NaNs travel as a mask.
            is_nan = tensor.isnan()
            both = torch.stack([is_nan.to(tensor.dtype), tensor.masked_fill(is_nan, -inf)])
            with self.log.at(place):
                dist.all_reduce(both, dist.ReduceOp.MAX)
            tensor.copy_(both[1].masked_fill(both[0] > 0, nan))

    @runs_outside
    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's ``value`` on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        with self.log.at("a broadcast of rank 0's values"):
            dist.broadcast_object_list(box, 0, group=self._group)
        return box[0]

    @runs_outside
    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in rank order."""
        if self.world_size == 1:
            return [value]
        pickled = _pickled(value)
        # Torch's version sends the sizes first; most values fit in the message with their size.
        first = len(pickled).to_bytes(8, "little") + pickled[: VALUE_BYTES - 8]
        with self.log.at("an exchange of values"):
            rows = self._gather_bytes(first, VALUE_BYTES)
            sizes = [int.from_bytes(row[:8], "little") for row in rows]
            rows = [row[8:] for row in rows]
            if (most := max(sizes)) > VALUE_BYTES - 8:
                rows = self._gather_bytes(pickled, most)
        return [pickle.loads(row[:size]) for row, size in zip(rows, sizes, strict=True)]

    def _gather_bytes(self, own: bytes, size: int) -> list[bytes]:
        """Return every rank's bytes, padded to ``size``."""
        sent = torch.frombuffer(bytearray(own.ljust(size, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(sent) for _ in range(self.world_size)]
        dist.all_gather(rows, sent, group=self._group)
        return [row.numpy().tobytes() for row in rows]

    def collect(
        self, part: Tensor, sizes: Sequence[int], order: Sequence[int] = ()
    ) -> Iterator[tuple[int, Tensor]]:
        """Bring every rank's bytes to rank 0, one message at a time.

        Args:
            part: This rank's bytes ``[n]``, on any device.
            sizes: How many bytes each rank has.
            order: The other ranks in the order in which to receive; by default that of ranks.

        Yields:
            On rank 0 ``(peer, bytes)``, its own first, at most :data:`MESSAGE_BYTES` at a time;
            nothing on other ranks.
        """
        chunks = torch.split(part, MESSAGE_BYTES) if part.numel() else ()
        with self.log.explained():
            if self.rank:
                for chunk in chunks:
                    dist.send(chunk.to("cpu"), 0, group=self._group)
                return
            yield from ((0, chunk) for chunk in chunks)
            for peer in order or range(1, self.world_size):
                for start in range(0, sizes[peer], MESSAGE_BYTES):
                    chunk = torch.empty(min(MESSAGE_BYTES, sizes[peer] - start), dtype=torch.uint8)
                    dist.recv(chunk, peer, group=self._group)
                    yield peer, chunk

    def separate(self) -> Control:
        """Make a control plane with a group of its own, to exchange values in another thread.

        The group lasts until :meth:`leave`.
        """
        other = copy.copy(self)
        other._separated, other._begun_ahead = [], None
        if self.world_size > 1:
            other._group = new_group_of_hosts()
            self._separated.append(other)
        other.log = CollectiveLog()
        other.log.explain = self.log.explain
        other.watchdog = Watchdog(other.log)
        return other

    def leave(self) -> None:
        """Stop taking part in collectives, and destroy the groups made by :meth:`separate`.

        All ranks must have received everything sent there.
        """
        self.watchdog.leave()
        for other in self._separated:
            destroy(other._group)
            other._group = None
        self._separated = []


class _Pickler(pickle.Pickler):
    """A pickler that supports newer dtypes too, such as float8, which torch cannot unpickle."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.dtype in _READABLE:
            return NotImplemented
        return Tensor.view, (obj.view(_OF_SIZE[obj.itemsize]), obj.dtype)


_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_READABLE = {
    *_OF_SIZE.values(), torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


_KINDS: tuple[type[Exception], ...] = (
    FileNotFoundError,
    PermissionError,
    OSError,
    KeyError,
    TypeError,
    ValueError,
    RuntimeError,
)


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
        found = control.gather_objects(
            None if self.error is None else (_KINDS.index(kind), _message(self.error))
        )
        failed = {rank: what for rank, what in enumerate(found) if what is not None}
        if not failed:
            return
        ranks_of: dict[str, list[int]] = {}
        for rank, (_, message) in failed.items():
            ranks_of.setdefault(message, []).append(rank)
        reasons = "; ".join(f"{_ranks(ranks, control)}{text}" for text, ranks in ranks_of.items())
        index, _ = next(iter(failed.values()))
        raise _KINDS[index](f"{doing} failed: {reasons}") from self.error


@contextmanager
def agreed(control: Control, doing: str) -> Iterator[None]:
    """Enter a context that all ranks leave with an error if any does; a collective at its end."""
    outcome = Outcome()
    with outcome.attempt():
        yield
    outcome.agree(control, doing)


def require_room(scratch: Scratch, nbytes: int, control: Control, what: str) -> None:
    """Raise on all ranks unless each disk has room for its ranks' ``nbytes``; a collective.

    Room found by an earlier call counts as taken, even if no file uses it yet. ``what`` names the
    need in the error.

    Raises:
        OSError: There is not enough room, or a folder cannot be written to.
    """
    doing = f"Creating files in offload_path={scratch.folder!r}"
    with agreed(control, doing):
        need = scratch.promise(nbytes)
    needs = [one for one in control.gather_objects(need) if one is not None]
    for disk in dict.fromkeys(one.disk for one in needs):
        ranks = [rank for rank, one in enumerate(needs) if one.disk == disk]
        free = min(needs[rank].free for rank in ranks)
        wanted = sum(needs[rank].nbytes for rank in ranks)
        if wanted > free:
            each = ", ".join(f"{needs[rank].nbytes:,} on rank {rank}" for rank in ranks)
            raise OSError(
                errno.ENOSPC,
                f"{doing} failed: {what} and other files not yet created need {wanted:,} bytes"
                f" ({each}), but {free:,} are free."
                " Free disk space, or set offload_path to a folder on a larger disk.",
            )


def _ranks(ranks: list[int], control: Control) -> str:
    if control.world_size == 1 or len(ranks) == control.world_size:
        return ""
    return f"on {listed(ranks)}: "


def _message(error: Exception) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text or type(error).__name__
