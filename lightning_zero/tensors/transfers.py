"""Copies between a device, its host and files, for offload.

Threads move chunks in buffers. Buffers take turns, so a few chunks are in flight; each is filled
again as soon as it has been emptied::

    threads     fill 0 | fill 1 | fill 2 |  wait for 0 | fill 0 | ...
    buffer 0           | use 0  | empty 0              |        | use 3
    buffer 1                    | use 1  | empty 1     | ...

A step from files fills buffers by reading states, and empties them by writing the states. Uploads
from files fill pinned ones, as copies of other memory would block the host, and empty them by
copies to the device. That is done when an upload is waited for: the host is ahead of the device,
which computes meanwhile. Earlier uploads are made first, so that collectives behind them begin in
the same order on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zero.tensors.contexts import lasting_tensors
from lightning_zero.tensors.memory import private_map


class Work(Protocol):
    """A transfer in flight; ``wait`` may be called once or never."""

    def wait(self) -> Any:
        """Return when the result may be used on the current stream."""


PAGE = 4096
"""The alignment of offsets in files, and of addresses and sizes of memory, for direct I/O."""
CHUNK_BYTES = 4 * 2**20
"""The most bytes that are moved at once: smaller chunks are slower, larger ones no faster."""
NUM_BUFFERS = 4
"""The most chunks in flight."""
_NUM_THREADS = 2

Job = Callable[[], object]
Wait = Callable[[], object]
"""Waits for the end of something, and raises if it has failed."""


def in_pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def threads(name: str) -> ThreadPoolExecutor:
    """Return two threads for one kind of jobs, which start with the first one."""
    return ThreadPoolExecutor(_NUM_THREADS, f"lightning_zero.{name}")


def _run(job: Job, after: Sequence[Wait]) -> None:
    for wait in after:
        wait()
    job()


def wait_for(ends: list[Wait]) -> None:
    """Wait until all have ended, forget them, and raise the first error."""
    errors = []
    for wait in ends:  # not forgotten before all have ended: an interrupt may come here
        try:
            wait()
        except Exception as error:
            errors.append(error)
    ends.clear()
    if errors:
        raise errors[0]


class Buffer:
    """Memory for one chunk.

    Args:
        tensor: Its bytes.

    Attributes:
        tensor: As given.
        ends: What must end before the memory is used for anything else.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.ends: list[Wait] = []

    def start(self, pool: ThreadPoolExecutor, jobs: Iterable[Job]) -> None:
        """Start jobs on the memory, behind what it is in use for."""
        before = tuple(self.ends)
        self.ends = [pool.submit(_run, job, before).result for job in jobs] or self.ends

    def wait(self) -> None:
        """Wait until nothing uses the memory, then raise the first error."""
        wait_for(self.ends)

    def part(self, start: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` bytes from ``start`` on, for a request."""
        part: memoryview = self.tensor[start : start + nbytes].numpy().data
        return part

    def view(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return elements that begin ``start`` bytes into the memory."""
        with lasting_tensors():
            return self.tensor[start : start + numel * dtype.itemsize].view(dtype)


class StagingMemory(Buffer):
    """A buffer of whole pages that child processes do not inherit."""

    def __init__(self, nbytes: int) -> None:
        with lasting_tensors():
            super().__init__(torch.frombuffer(private_map(max(nbytes, PAGE)), dtype=torch.uint8))


RING_BYTES = NUM_BUFFERS * CHUNK_BYTES

_WITHOUT_STREAMS = ("cpu", "meta")
"""Devices that need no copies, or make them at once."""
_MOST_GROUPS = 2
"""Groups of copies whose sources are kept: one is sent while the next one's are computed."""


class Upload:
    """A copy to the device and what follows it, begun at the latest when it is waited for.

    Attributes:
        what: What it does, for errors.
        begin: Begins it, and returns the work of what follows.
        work: The work, once it has begun.
        end: Its end on the device's stream, once it has begun.
        error: Why it could not begin.
    """

    def __init__(self, copies: HostCopies, what: str, begin: Callable[[], Work]) -> None:
        self._copies, self.what, self.begin = copies, what, begin
        self.work: Work | None = None
        self.end: torch.Event | None = None
        self.error: Exception | None = None

    def wait(self) -> None:
        """Begin it and those before, and make the current stream wait for it.

        Raises:
            RuntimeError: It could not be read.
        """
        try:
            self._copies.begin_uploads(self)
            if self.work is None:
                raise RuntimeError(f"{self.what} failed: {self.error or 'it was abandoned'}")
            self.work.wait()
        finally:
            # Also after a failure: computation may reuse the memory of copies sent before it.
            if self.end is not None:
                torch.accelerator.current_stream(self._copies.device).wait_event(self.end)


class HostCopies:
    """What a device does beside computation: copies to and from its host, and reductions.

    There is a stream for each direction, and one for reductions.

    A source on the device is kept until a copy has read it, and no longer than needed: those of two
    groups of copies, such as those of two units, are kept, and before those of an earlier group are
    dropped, the device's computation waits for their copies. Its allocator may then reuse their
    memory at once, however far the host is ahead. (``Tensor.record_stream`` would keep it until the
    host has seen the copy's end, which a host far ahead does in the next step.)

    Args:
        device: The device; the host itself has no streams, and needs no copies.

    Attributes:
        device: As given.
        has_streams: Whether the device does anything beside computation.

    Raises:
        ValueError: The device lacks streams, events, or storages that can be freed and filled.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.has_streams = device.type not in _WITHOUT_STREAMS
        if self.has_streams:
            try:
                self._down_stream, self._up_stream = torch.Stream(device), torch.Stream(device)
                self._reduce_stream = torch.Stream(device)
                torch.accelerator.current_stream(device).wait_event(self._up_stream.record_event())
                torch.empty(1, device=device).untyped_storage().resize_(0)  # as weights' are
            except RuntimeError as error:
                raise ValueError(
                    "Torch finds no streams and events, or no storages that can be resized, for a"
                    f" device of type {device.type!r}. Train on the CPU, or on a device that"
                    " `torch.accelerator` supports."
                ) from error
        # End of the last copy that reads memory of the host's in place.
        self._up: torch.Event | None = None
        # What copies to the host still read, by group, the oldest first.
        self._leaving: dict[object, list[tuple[torch.Event, Tensor]]] = {}
        # Host memory, held until the copy into it has ended; and that which nobody holds, by size.
        self._held: deque[tuple[torch.Event, Tensor]] = deque()
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        # Uploads from files that have not begun, the oldest first.
        self._uploads: deque[Upload] = deque()
        self._threads = threads("upload")
        self._ring: deque[Buffer] = deque()

    # -- host memory -----------------------------------------------------------------------------

    def _block(self, nbytes: int) -> mmap.mmap:
        """Return zeros in host memory, pinned for a GPU.

        It has exactly this size: torch's own allocator would round up to a power of two.
        """
        block = private_map(nbytes)
        if self.device.type == "cuda":
            address = torch.frombuffer(block, dtype=torch.uint8).data_ptr()
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(cudart.cudaHostRegister(address, nbytes, 0))
            # Finalizers run before the memory is unmapped.
            weakref.finalize(block, cudart.cudaHostUnregister, address)
        return block

    def lasting_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros in host memory, pinned for a GPU."""
        nbytes = numel * dtype.itemsize
        with lasting_tensors():
            if self.device.type != "cuda" or not nbytes:
                return torch.zeros(numel, dtype=dtype, device="cpu")
            return torch.frombuffer(self._block(nbytes), dtype=dtype)

    def recurring_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return temporary host memory of a recurring size; its content is undefined.

        It is reused for requests of the same number of bytes once no view of it and no copy in
        flight refers to it.
        """
        self._let_go()
        free, nbytes = self._free[numel * dtype.itemsize], numel * dtype.itemsize
        with lasting_tensors():
            if not nbytes:
                return torch.empty(0, dtype=dtype, device="cpu")
            block = free.pop() if free else self._block(nbytes)
            memory = torch.frombuffer(block, dtype=dtype)
        weakref.finalize(memory.untyped_storage(), free.append, block).atexit = False
        return memory

    def _let_go(self) -> None:
        """Drop the memory of copies that have ended."""
        # Popped before it is checked: another thread may do the same.
        with contextlib.suppress(IndexError):
            while (held := self._held.popleft())[0].query():
                pass
            self._held.appendleft(held)

    def passing_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return temporary host memory of any size; its content is undefined.

        For a GPU, torch allocates a power of two of bytes, and caches them.
        """
        with lasting_tensors():
            is_pinned = self.device.type == "cuda"
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=is_pinned)

    # -- up --------------------------------------------------------------------------------------

    def up(
        self,
        out: Tensor,
        source: Tensor,
        then: Callable[[], Work],
        after: torch.Event | None = None,
    ) -> Work:
        """Start to copy ``source`` to the device, then ``then``; return one work for both.

        The device casts it to the dtype of ``out``: that would block the host. ``after`` is the
        end of the copy that brings ``source`` to the host, if it may still be under way.
        """
        with self._beside_computation(self._up_stream):
            if after is not None:
                self._up_stream.wait_event(after)
            if out.dtype is source.dtype:
                out.copy_(source, non_blocking=True)
            else:
                _copy_and_cast(out, source)
            if after is None:  # otherwise the source is temporary, and nobody writes to it
                self._up = self._up_stream.record_event()
            upload = Upload(self, "", then)
            upload.work, upload.end = then(), self._up_stream.record_event()
            return upload

    def up_from_files(
        self, what: str, pairs: Iterable[tuple[Tensor, Tensor]], then: Callable[[], Work]
    ) -> Work:
        """Return a work whose ``wait`` copies mapped files to the device, then does ``then``.

        Without streams, threads begin at once to copy them to where they go.

        Args:
            what: What it does, for errors.
            pairs: Where it goes, and whence: threads cast it.
            then: Starts what comes behind it.
        """
        parts: list[tuple[Tensor, Tensor]] = []
        with lasting_tensors():
            for pair in pairs:
                numel = CHUNK_BYTES // max(one.element_size() for one in pair)
                parts += zip(*(torch.split(one, numel) for one in pair), strict=True)
        if not self.has_streams:
            reads: list[Wait] = [self._threads.submit(out.copy_, one).result for out, one in parts]

            def begin() -> Work:
                wait_for(reads)
                return then()
        else:
            stream = self._up_stream
            now = torch.accelerator.current_stream(self.device).record_event()

            def begin() -> Work:
                # Behind the computation that was queued at first, not all that is queued now.
                stream.wait_event(now)
                with stream:
                    self._through_ring(parts, stream)
                    return then()

        upload = Upload(self, what, begin)
        self._uploads.append(upload)
        return upload

    def _through_ring(self, parts: Iterable[tuple[Tensor, Tensor]], stream: torch.Stream) -> None:
        """Copy parts up on a stream from pinned buffers, which threads fill with the next ones."""
        if not self._ring:
            memory = self.lasting_memory(RING_BYTES, torch.uint8)
            self._ring += map(Buffer, torch.split(memory, CHUNK_BYTES))
        rest = iter(parts)
        filled: deque[tuple[Tensor, Tensor, Buffer]] = deque()

        def fill(number: int) -> None:
            for out, source in itertools.islice(rest, number):
                buffer = self._ring[0]
                self._ring.rotate(-1)
                memory = buffer.view(0, out.numel(), out.dtype)
                buffer.start(self._threads, [partial(memory.copy_, source)])
                filled.append((out, memory, buffer))

        fill(NUM_BUFFERS)
        try:
            while filled:
                out, memory, buffer = filled.popleft()
                buffer.wait()
                out.copy_(memory, non_blocking=True)
                buffer.ends = [stream.record_event().synchronize]
                fill(1)
        finally:
            for _, _, buffer in filled:
                with contextlib.suppress(Exception):  # the first is raised
                    buffer.wait()

    def begin_uploads(self, last: Upload | None = None) -> None:
        """Begin the uploads from files that have not begun: all, or those up to ``last``.

        Raises:
            RuntimeError: One could not be read.
        """
        while self._uploads and (last is None or last in self._uploads):
            upload = self._uploads.popleft()
            try:
                upload.work = upload.begin()
            except Exception as error:
                upload.error = error
                raise RuntimeError(f"{upload.what} failed: {error}") from error
            finally:
                if self.has_streams:
                    upload.end = self._up_stream.record_event()

    def wait_until_read(self) -> None:
        """Wait until all sources sent up have been read, and may be overwritten."""
        self.begin_uploads()
        if self._up is not None:
            self._up.synchronize()

    # -- down ------------------------------------------------------------------------------------

    def down(
        self,
        out: Tensor,
        source: Tensor,
        finish: Callable[[], object] | None = None,
        *,
        group: object,
    ) -> torch.Event:
        """Start to copy ``source`` to the host, once ``finish`` has been called; return its end.

        What that does on the device is done on the way, and computation does not wait for it.
        Copies of one ``group`` begin one after the other, and none when a later group has begun.
        """
        with self._beside_computation(self._down_stream):
            if finish is not None:
                finish()
            out.copy_(source, non_blocking=True)
            end = self._down_stream.record_event()
        self._let_go()
        self._held.append((end, out))
        self._leaving.setdefault(group, []).append((end, source))
        if torch.accelerator.current_stream(self.device) != self._reduce_stream:
            self._drop_old()
        return end

    def release_sources(self, group: object = None) -> None:
        """Drop what copies to the host read; computation waits for these copies first.

        Of all groups, or of ``group`` and those before it, if it is kept.
        """
        if group is None or group in self._leaving:
            while self._leaving and self._drop_oldest() != group:
                pass

    def _drop_old(self) -> None:
        while len(self._leaving) > _MOST_GROUPS:
            self._drop_oldest()

    def _drop_oldest(self) -> object:
        """Drop the sources of the oldest group, and return it."""
        oldest = next(iter(self._leaving))
        stream = torch.accelerator.current_stream(self.device)
        for end, _ in self._leaving.pop(oldest):
            stream.wait_event(end)
        return oldest

    # -- reductions ------------------------------------------------------------------------------

    def beside(self, begin: Callable[[], Callable[..., None]]) -> Callable[..., None]:
        """Call ``begin``, and what it returns, on a stream beside computation.

        Returns a function that makes computation wait for the stream. It refers to ``begin``, which
        holds memory of the computation's stream that is used here; other memory is allocated and
        freed on this stream.
        """
        with self._beside_computation(self._reduce_stream):
            begin()()
            end = self._reduce_stream.record_event()
        self._drop_old()
        return partial(self._wait_on_device, end, begin)

    def _wait_on_device(self, end: torch.Event, held: object, **_: object) -> None:
        torch.accelerator.current_stream(self.device).wait_event(end)

    # -- the end ---------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Drop uploads that have not begun, and what copies to the host read."""
        self._uploads.clear()
        self._threads.shutdown()  # once they have read
        self._threads = threads("upload")
        self.release_sources()

    def close(self) -> None:
        """Wait for all copies, and free the host memory that would have been reused."""
        self.abandon()
        while self._held:
            self._held.popleft()[0].synchronize()
        self.wait_until_read()
        for buffer in self._ring:
            buffer.wait()
        self._ring.clear()
        self._free.clear()

    @contextlib.contextmanager
    def _beside_computation(self, stream: torch.Stream) -> Iterator[None]:
        """Run the block on ``stream``, behind the work queued on the device so far."""
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            yield


def _copy_and_cast(out: Tensor, source: Tensor) -> None:
    """Copy ``source`` up on the current stream, whose memory takes the parts before their cast."""
    numel = RING_BYTES // source.element_size()
    with lasting_tensors():
        for part, before in zip(*(torch.split(one, numel) for one in (out, source)), strict=True):
            above = torch.empty(len(before), dtype=before.dtype, device=out.device)
            part.copy_(above.copy_(before, non_blocking=True))
