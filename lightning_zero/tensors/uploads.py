"""Copies to a device whose sources threads fill first: from files, or cast on the way.

What an upload reads must be pinned, or the copy would hold up the host. What rests in files, or in
another dtype, comes through pinned buffers, which threads fill ahead while the device computes. The
copies are sent when one waits for them: those of earlier uploads first, so that collectives behind
them begin in the same order on all ranks.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.tensors.staging import CHUNK_BYTES, NUM_BUFFERS, Buffer, Threads
from lightning_zero.tensors.work import Work

RING_BYTES = NUM_BUFFERS * CHUNK_BYTES


class UploadPart(NamedTuple):
    """A part of an upload.

    Attributes:
        out: Where it goes on the device, at most :data:`CHUNK_BYTES`.
        fill: Fills host memory of the same size and dtype, in a thread.
        source: That memory, pinned; by default a buffer. ``out`` itself is only filled.
    """

    out: Tensor
    fill: Callable[[Tensor], object]
    source: Tensor | None = None


class _Filling(NamedTuple):
    """A part that a thread fills."""

    out: Tensor
    source: Tensor
    buffer: Buffer
    is_of_ring: bool


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

    def start(self, what: str, parts: Iterable[UploadPart], then: Callable[[], Work]) -> Upload:
        """Start to fill ``parts``, to be sent when the upload is waited for, ``then`` behind them.

        They are sent behind the work that is queued on the device now, and none that is queued
        later. ``what`` is named in errors.
        """
        upload = Upload(self, what, deque(parts), then)
        self._waiting.append(upload)
        self._fill()
        return upload

    def _fill(self) -> None:
        """Let the threads fill the next parts, as far as there are free buffers for them."""
        for upload in self._waiting:
            while upload.parts:
                out, fill, source = upload.parts[0]
                is_of_ring = source is None
                if source is not None:
                    buffer = Buffer(source)
                elif self._ring:
                    buffer = self._ring.popleft()
                    source = buffer.view(0, out.numel(), out.dtype)
                else:
                    return
                upload.parts.popleft()
                buffer.start(self._threads, [partial(fill, source)])
                upload.filling.append(_Filling(out, source, buffer, is_of_ring))

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
                out, source, buffer, is_of_ring = upload.filling[0]
                buffer.wait()
                upload.filling.popleft()
                if source.data_ptr() != out.data_ptr():
                    out.copy_(source, non_blocking=True)
                if is_of_ring:
                    if self.stream is not None:
                        buffer.ends = [self.stream.record_event().synchronize]
                    self._ring.append(buffer)
                self._fill()
            upload.work = upload.then()
        except Exception as error:
            upload.error = error
            raise RuntimeError(f"{upload.what} failed: {error}") from error
        finally:
            # Also of copies sent before one failed: computation may reuse their memory.
            upload.end = None if self.stream is None else self.stream.record_event()

    def _drop(self) -> None:
        """Drop the first upload, and give back the buffers of parts that were not sent."""
        for _, _, buffer, is_of_ring in self._waiting.popleft().filling:
            with contextlib.suppress(Exception):  # the upload's, which is raised
                buffer.wait()
            if is_of_ring:
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
    """An upload in parts, of which none is sent before it, or a later one, is waited for.

    Attributes:
        what: What it does, for errors.
        parts: Those that are not being filled yet.
        then: Starts what comes behind the last.
        begin: The work on the device that it comes behind.
        filling: The parts that threads fill, or have filled.
        work: What ``then`` has started.
        end: The end of the last copy, and of what ``then`` did on the stream.
        error: Why it could not be sent.
    """

    def __init__(
        self, uploads: Uploads, what: str, parts: deque[UploadPart], then: Callable[[], Work]
    ) -> None:
        self._uploads = uploads
        self.what, self.parts, self.then = what, parts, then
        stream = uploads.stream
        self.begin: torch.Event | None = None
        if stream is not None:
            self.begin = torch.accelerator.current_stream(stream.device).record_event()
        self.filling: deque[_Filling] = deque()
        self.work: Work | None = None
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
