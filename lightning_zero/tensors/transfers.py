"""Copies between a device, its host and files, for offload.

Threads move chunks in buffers. Buffers take turns, so a few chunks are in flight; each is filled
again as soon as it has been emptied::

    threads     fill 0 | fill 1 | fill 2 |  wait for 0 | fill 0 | ...
    buffer 0           | use 0  | empty 0              |        | use 3
    buffer 1                    | use 1  | empty 1     | ...

A step from files fills buffers by reading states, and empties them by writing the states. Uploads
to a device fill them from files or cast to them, while the device computes: what it reads must be
pinned, or the copy would block the host. Copies are sent when an upload is waited for, those of
earlier uploads first, so that collectives behind them begin in the same order on all ranks.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_zero.tensors import internals
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


class Threads:
    """Two threads for one kind of jobs, which are started with the first one."""

    def __init__(self, name: str) -> None:
        self._name = f"lightning_zero.{name}"
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._num_running = 0
        self._begin = self._seconds = 0.0

    def start(self, job: Job, after: Sequence[Wait] = ()) -> Wait:
        """Start a job once others have ended; return what waits for it."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_NUM_THREADS, self._name)
        return self._pool.submit(self._run, job, after).result

    def _run(self, job: Job, after: Sequence[Wait]) -> None:
        for wait in after:
            wait()
        with self._lock:
            if not self._num_running:
                self._begin = perf_counter()
            self._num_running += 1
        try:
            job()
        finally:
            with self._lock:
                self._num_running -= 1
                if not self._num_running:
                    self._seconds += perf_counter() - self._begin

    def take_seconds(self) -> float:
        """Return the time since the last call in which a job ran; all jobs must have ended."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        """End the threads, until the next job."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


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

    def start(self, threads: Threads, jobs: Iterable[Job]) -> None:
        """Start jobs on the memory, behind what it is in use for."""
        before = tuple(self.ends)
        self.ends = [threads.start(job, before) for job in jobs] or self.ends

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


class _Filling(NamedTuple):
    """Memory that a thread fills for a part, in a buffer of the ring."""

    out: Tensor
    memory: Tensor
    buffer: Buffer


class Uploads:
    """Uploads in parts, in the order in which they were started.

    Args:
        stream: The device's stream for them; without one, copies are made at once.
        allocate: Returns pinned memory of a number of elements and a dtype.

    Attributes:
        stream: As given.
        nbytes: Bytes of the buffers; none before their first use.
    """

    def __init__(
        self, stream: torch.Stream | None, allocate: Callable[[int, torch.dtype], Tensor]
    ) -> None:
        self.stream, self._allocate = stream, allocate
        self._threads = Threads("upload")
        self._free: deque[Buffer] | None = None
        self.nbytes = 0
        self._waiting: deque[Upload] = deque()

    def start(
        self, what: str, pairs: Iterable[tuple[Tensor, Tensor]], then: Callable[[], Work]
    ) -> Upload:
        """Start to read what goes up, to be sent when the upload is waited for, ``then`` behind it.

        It is sent behind the work that is queued on the device now, and none that is queued later.

        Args:
            what: What it does, for errors.
            pairs: Where it goes, and whence: memory or mapped files. Threads cast it.
            then: Starts what comes behind it.
        """
        upload = Upload(self, what, then)
        with lasting_tensors():
            for pair in pairs:
                numel = CHUNK_BYTES // max(one.element_size() for one in pair)
                split = zip(*(torch.split(one, numel) for one in pair), strict=True)
                upload.parts += [(out, source) for out, source in split if out.numel()]
        if self.stream is not None:
            upload.begin = torch.accelerator.current_stream(self.stream.device).record_event()
        self._waiting.append(upload)
        self._fill()
        return upload

    def _fill(self) -> None:
        """Let the threads fill the next parts, as far as there are free buffers for them."""
        for upload in self._waiting:
            while upload.parts and (self.stream is None or self._ring):
                out, source = upload.parts.popleft()
                buffer = Buffer(out) if self.stream is None else self._ring.popleft()
                memory = out if self.stream is None else buffer.view(0, out.numel(), out.dtype)
                buffer.start(self._threads, [partial(memory.copy_, source)])
                upload.filling.append(_Filling(out, memory, buffer))

    @property
    def _ring(self) -> deque[Buffer]:
        """The free buffers."""
        if self._free is None:
            memory = self._allocate(RING_BYTES, torch.uint8)
            self._free = deque(map(Buffer, torch.split(memory, CHUNK_BYTES)))
            self.nbytes = RING_BYTES
        return self._free

    def send(self, last: Upload | None = None) -> None:
        """Send all uploads, or those up to ``last``.

        Raises:
            RuntimeError: One could not be filled.
        """
        while self._waiting and (last is None or last in self._waiting):
            try:
                with self.stream or contextlib.nullcontext():
                    self._send(self._waiting[0])
            finally:
                self._drop()

    def _send(self, upload: Upload) -> None:
        """Send the first upload."""
        if self.stream is not None and upload.begin is not None:
            # Not already when it was started: the stream may have sent others' parts since.
            self.stream.wait_event(upload.begin)
        try:
            while upload.filling:
                out, memory, buffer = upload.filling[0]
                buffer.wait()
                upload.filling.popleft()
                if self.stream is not None:
                    out.copy_(memory, non_blocking=True)
                    buffer.ends = [self.stream.record_event().synchronize]
                    self._ring.append(buffer)
                self._fill()
            assert upload.then is not None
            upload.work = upload.then()
        except Exception as error:
            upload.error = error
            raise RuntimeError(f"{upload.what} failed: {error}") from error
        finally:
            # Also of copies sent before one failed: computation may reuse their memory.
            upload.end = None if self.stream is None else self.stream.record_event()

    def _drop(self) -> None:
        """Drop the first upload, and give back the buffers of parts that were not sent."""
        for _, _, buffer in self._waiting.popleft().filling:
            with contextlib.suppress(Exception):  # the upload's, which is raised
                buffer.wait()
            if self.stream is not None:
                self._ring.append(buffer)

    def abandon(self) -> None:
        """Drop all uploads that were not sent."""
        while self._waiting:
            self._drop()

    def close(self) -> None:
        """End the threads, and free the buffers, until the next upload."""
        self.abandon()
        self._threads.close()
        self._free, self.nbytes = None, 0


class Upload:
    """An upload; if it has parts, none is sent before it, or a later one, is waited for.

    Attributes:
        what: What it does, for errors.
        then: Starts what comes behind the last part.
        parts: Those that are not being filled yet: where they go, and whence.
        begin: The work on the device that it comes behind.
        filling: The parts that threads fill, or have filled.
        work: What ``then`` has started.
        end: The end of the last copy, and of what ``then`` did on the stream.
        error: Why it could not be sent.
    """

    def __init__(
        self, uploads: Uploads, what: str = "", then: Callable[[], Work] | None = None
    ) -> None:
        self._uploads, self.what, self.then = uploads, what, then
        self.parts: deque[tuple[Tensor, Tensor]] = deque()
        self.filling: deque[_Filling] = deque()
        self.work: Work | None = None
        self.begin: torch.Event | None = None
        self.end: torch.Event | None = None
        self.error: Exception | None = None

    def wait(self) -> None:
        """Send it, and make the current stream wait for it.

        Raises:
            RuntimeError: A part could not be filled.
        """
        try:
            self._uploads.send(self)
            if self.work is None:
                raise RuntimeError(f"{self.what} failed: {self.error or 'it was abandoned'}")
            self.work.wait()
        finally:
            if self.end is not None and (stream := self._uploads.stream) is not None:
                torch.accelerator.current_stream(stream.device).wait_event(self.end)


_WITHOUT_STREAMS = ("cpu", "meta")
"""Devices that need no copies, or make them at once."""
_MOST_GROUPS = 2
"""Groups of copies whose sources are kept: one is sent while the next one's are computed."""


def pinned_bytes(nbytes: int, device: torch.device) -> int:
    """Return how much host memory torch allocates to copy ``nbytes`` from or to ``device``.

    Its pinned-memory allocator rounds up to powers of two.
    """
    is_rounded = device.type == "cuda" and nbytes > 0
    return 1 << (nbytes - 1).bit_length() if is_rounded else nbytes


def require_abilities(device: torch.device) -> None:
    """Check that a device has streams and events, and storages that can be freed and filled again.

    Raises:
        ValueError: It has not.
    """
    if device.type in _WITHOUT_STREAMS:
        return
    try:
        event = torch.Stream(device).record_event()
        torch.accelerator.current_stream(device).wait_event(event)
        torch.empty(1, device=device).untyped_storage().resize_(0)
    except RuntimeError as error:
        raise ValueError(
            "Torch finds no streams and events, or no storages that can be resized, for a device of"
            f" type {device.type!r}. Train on the CPU, or on a device that `torch.accelerator`"
            " supports."
        ) from error


class HostCopies:
    """Copies between a device and its host, on a stream for each direction.

    A source on the device is kept until a copy has read it, and no longer than needed: those of two
    groups of copies, such as those of two units, are kept, and before those of an earlier group are
    dropped, the device's computation waits for their copies. Its allocator may then reuse their
    memory at once, however far the host is ahead. (``Tensor.record_stream`` would keep it until the
    host has seen the copy's end, which a host far ahead does in the next step.)

    Args:
        device: The device; if it is the host itself, copies are synchronous.

    Attributes:
        device: As given.
        num_abandoned: How often uploads that were not sent have been dropped.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_abandoned = 0
        has_streams = device.type not in _WITHOUT_STREAMS
        self._down_stream = torch.Stream(device) if has_streams else None
        self._up_stream = torch.Stream(device) if has_streams else None
        # End of the last copy to the device.
        self._up: torch.Event | None = None
        # What copies to the host still read, by group, the oldest first.
        self._leaving: deque[tuple[object, list[tuple[Landing, Tensor]]]] = deque()
        self._recurring: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._lock = threading.Lock()
        self._uploads = Uploads(self._up_stream, self.lasting_memory)
        # Host memory, held until the copy into it has ended.
        self._held: deque[tuple[torch.Event, Tensor]] = deque()

    def can_copy(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` lies on the device and is not a subclass of ``Tensor``."""
        return type(tensor) is Tensor and tensor.device.type == self.device.type

    def lasting_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros in pinned host memory.

        It has exactly this size: torch's own allocator would round up to a power of two.
        """
        nbytes = numel * dtype.itemsize
        if self.device.type != "cuda" or not nbytes:
            with lasting_tensors():
                return torch.zeros(numel, dtype=dtype, device="cpu")
        block = private_map(nbytes)
        with lasting_tensors():
            memory = torch.frombuffer(block, dtype=torch.uint8)
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), nbytes, 0))
        # Finalizers run before the memory is unmapped.
        weakref.finalize(block, cudart.cudaHostUnregister, memory.data_ptr())
        return memory.view(dtype)

    def recurring_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return temporary host memory of a recurring size; its content is undefined.

        It is :meth:`lasting_memory`, reused for requests of the same number of bytes once no view
        of it and no copy in flight refers to it.
        """
        self._let_go()
        nbytes = numel * dtype.itemsize
        with lasting_tensors(), self._lock:
            blocks = self._recurring[nbytes]
            free = next(filter(internals.has_memory_alone, blocks), None)
            if free is None:
                free = self.lasting_memory(nbytes, torch.uint8)
                blocks.append(free)
            memory = torch.empty(0, dtype=dtype)
            memory.set_(free.untyped_storage(), 0, (numel,), (1,))
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

        For a GPU, torch allocates :func:`pinned_bytes` and caches them.
        """
        with lasting_tensors():
            is_pinned = self.device.type == "cuda"
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=is_pinned)

    def storage_down(self, tensor: Tensor, group: object) -> tuple[Tensor, Landing]:
        """Start to copy a tensor's whole storage to temporary host memory.

        Returns its bytes there, and the copy, as for :meth:`down`.
        """
        content = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        content.set_(tensor.untyped_storage())
        memory = self.passing_memory(content.numel(), torch.uint8)
        return memory, self.down(memory, content, group=group)

    def up(
        self,
        out: Tensor,
        source: Tensor,
        then: Callable[[], Work],
        after: Landing | None = None,
    ) -> Work:
        """Start to copy ``source`` to the device, then ``then``; return one work for both.

        The device casts it to the dtype of ``out``: that would block the host. ``after`` is the
        copy that brings ``source`` to the host, if it may still be under way.
        """
        if self._up_stream is None:
            out.copy_(source)
            return then()
        with self._beside_computation(self._up_stream):
            if after is not None:
                after.precede(self._up_stream)
            if out.dtype is source.dtype:
                out.copy_(source, non_blocking=True)
            else:
                _copy_and_cast(out, source)
            if after is None:  # otherwise the source is temporary, and nobody writes to it
                self._up = self._up_stream.record_event()
            upload = Upload(self._uploads)
            upload.work, upload.end = then(), self._up_stream.record_event()
            return upload

    def wait_until_read(self) -> None:
        """Wait until the device has read all sources sent up, which may then be overwritten."""
        self._uploads.send()
        if self._up is not None:
            self._up.synchronize()

    def up_in_parts(
        self, what: str, pairs: Iterable[tuple[Tensor, Tensor]], then: Callable[[], Work]
    ) -> Work:
        """Start to read what goes up, in threads; waiting for the work sends it, then ``then``.

        See :meth:`Uploads.start`. Without streams it is read to where it goes.
        """

        def sent() -> Work:
            if self._up_stream is not None:
                self._up = self._up_stream.record_event()
            return then()

        return self._uploads.start(what, pairs, sent)

    def down(
        self,
        out: Tensor,
        source: Tensor,
        finish: Callable[[], object] | None = None,
        *,
        group: object,
    ) -> Landing:
        """Start to copy ``source`` to the host, once ``finish`` has been called for it.

        What that does on the device is done on the way, and computation does not wait for it.
        Copies of one ``group`` begin one after the other, and none when a later group has begun.
        """
        stream = self._down_stream
        with contextlib.nullcontext() if stream is None else self._beside_computation(stream):
            if finish is not None:
                finish()
            out.copy_(source, non_blocking=stream is not None)
            landing = Landing(None if stream is None else stream.record_event())
        if landing.event is not None:
            self._let_go()
            self._held.append((landing.event, out))
            self._keep(group, landing, source)
        return landing

    @property
    def ring_bytes(self) -> int:
        """Bytes of pinned memory held for :meth:`up_in_parts`."""
        return self._uploads.nbytes

    def release_sources(self, group: object = None) -> None:
        """Drop what copies to the host read; computation waits for these copies first.

        Of all groups, or of ``group`` and those before it, if it is kept.
        """
        groups = [one for one, _ in self._leaving]
        if group is None:
            self._drop_but(0)
        elif group in groups:
            self._drop_but(len(groups) - 1 - groups.index(group))

    def _keep(self, group: object, landing: Landing, source: Tensor) -> None:
        """Keep ``source`` until the group after the next one begins."""
        if not self._leaving or self._leaving[-1][0] != group:
            self._leaving.append((group, []))
        self._leaving[-1][1].append((landing, source))
        self._drop_but(_MOST_GROUPS)

    def _drop_but(self, number: int) -> None:
        """Drop the sources of all groups but the last ``number``."""
        while len(self._leaving) > number:
            _, copies = self._leaving.popleft()
            if self._down_stream is not None:
                stream = torch.accelerator.current_stream(self.device)
                for landing, _ in copies:
                    landing.precede(stream)

    def abandon(self) -> None:
        """Drop uploads that were not sent, and what copies to the host read."""
        self._uploads.abandon()
        self.num_abandoned += 1
        self.release_sources()

    def close(self) -> None:
        """Wait for all copies, and free the host memory that would have been reused."""
        self.abandon()
        while self._held:
            self._held.popleft()[0].synchronize()
        self.wait_until_read()
        self._uploads.close()
        self._recurring.clear()

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


class Landing(NamedTuple):
    """A copy on its way to the host, which ends with ``event``; without one it is there."""

    event: torch.Event | None

    def precede(self, stream: torch.Stream) -> None:
        """Make ``stream`` wait for the copy."""
        if self.event is not None:
            stream.wait_event(self.event)

    def wait(self) -> None:
        """Make the host wait for the copy."""
        if self.event is not None:
            self.event.synchronize()
