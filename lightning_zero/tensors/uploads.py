"""Copies to a device whose sources threads fill first: from files, or cast on the way.

What an upload reads must be pinned, or the copy would hold up the host. What rests in files, or in
another dtype, comes by a ring of pinned blocks, which threads fill in turn::

    threads     fill 0 | fill 1 | fill 2 | fill 3 |   wait for 0 | fill 0 | ...
    stream           | send 0 | send 1 | send 2 | ...

The threads fill ahead while the device computes. The copies are sent when one waits for them: those
of earlier uploads first, so that collectives behind them begin in the same order on all ranks.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.tensors.lasting import lasting_tensors
from lightning_zero.tensors.work import Work

BLOCK_BYTES = 4 * 2**20
"""The most bytes of a part."""
NUM_BLOCKS = 4
RING_BYTES = NUM_BLOCKS * BLOCK_BYTES
_NUM_THREADS = 2


class UploadPart(NamedTuple):
    """A part of an upload.

    Attributes:
        out: Where it goes on the device, at most :data:`BLOCK_BYTES`.
        fill: Fills host memory of the same size and dtype, in a thread.
        source: That memory, pinned; by default a block of the ring. ``out`` itself is only filled.
    """

    out: Tensor
    fill: Callable[[Tensor], object]
    source: Tensor | None = None


class _Block(NamedTuple):
    """A block of the ring, and the end of the copy that last read it."""

    memory: Tensor
    read: torch.Event | None


class _Filling(NamedTuple):
    """A part that a thread fills."""

    out: Tensor
    source: Tensor
    block: _Block | None
    end: Future[None]


class Uploads:
    """Uploads in parts, in the order in which they were started.

    Args:
        stream: The device's stream for them; without one, copies are made at once.
        allocate: Returns pinned memory of a number of elements and a dtype.

    Attributes:
        stream: As given.
        nbytes: Bytes of the ring; none before its first use.
    """

    def __init__(
        self, stream: torch.Stream | None, allocate: Callable[[int, torch.dtype], Tensor]
    ) -> None:
        self.stream, self._allocate = stream, allocate
        self._threads: ThreadPoolExecutor | None = None
        self._free: deque[_Block] | None = None
        self.nbytes = 0
        self._waiting: deque[Upload] = deque()

    def start(self, what: str, parts: Iterable[UploadPart], then: Callable[[], Work]) -> Upload:
        """Start to fill ``parts``, to be sent when the upload is waited for, ``then`` behind them.

        They are sent behind the work that is queued on the device now, and none that is queued
        later. ``what`` is named in errors.
        """
        begin = None
        if self.stream is not None:
            begin = torch.accelerator.current_stream(self.stream.device).record_event()
        upload = Upload(self, what, parts, then, begin)
        self._waiting.append(upload)
        self._fill()
        return upload

    def _fill(self) -> None:
        """Let the threads fill the next parts, as far as there are free blocks for them."""
        for upload in self._waiting:
            while upload.parts:
                out, fill, source = upload.parts[0]
                block = None
                if source is None:
                    block = self._take()
                    if block is None:
                        return
                    with lasting_tensors():
                        source = block.memory[: out.nbytes].view(out.dtype)
                upload.parts.popleft()
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(_NUM_THREADS, "lightning_zero.upload")
                end = self._threads.submit(_fill, block, fill, source)
                upload.filling.append(_Filling(out, source, block, end))

    def _take(self) -> _Block | None:
        if self._free is None:
            blocks = torch.split(self._allocate(RING_BYTES, torch.uint8), BLOCK_BYTES)
            self._free = deque(_Block(block, None) for block in blocks)
            self.nbytes = RING_BYTES
        return self._free.popleft() if self._free else None

    def _give_back(self, block: _Block | None, read: torch.Event | None) -> None:
        if block is not None and self._free is not None:
            self._free.append(_Block(block.memory, read))

    def send(self, last: Upload | None = None) -> None:
        """Send all uploads, or those up to ``last``.

        Raises:
            RuntimeError: One could not be filled.
        """
        while self._waiting and (last is None or last in self._waiting):
            upload = self._waiting[0]
            try:
                with self.stream or contextlib.nullcontext():
                    self._send(upload)
            finally:
                self._drop()

    def _send(self, upload: Upload) -> None:
        """Send the first upload."""
        if self.stream is not None:
            assert upload.begin is not None
            # Not already when it was started: the stream may have sent others' parts since.
            self.stream.wait_event(upload.begin)
        try:
            while upload.filling:
                upload.filling[0].end.result()
                out, source, block, _ = upload.filling.popleft()
                if source.data_ptr() != out.data_ptr():
                    out.copy_(source, non_blocking=True)
                self._give_back(block, self._now())
                self._fill()
            upload.work = upload.then()
        except Exception as error:
            upload.error = error
            raise RuntimeError(f"{upload.what} failed: {error}") from error
        finally:
            # Also of copies sent before one failed: computation may reuse their memory.
            upload.end = self._now()

    def _now(self) -> torch.Event | None:
        return None if self.stream is None else self.stream.record_event()

    def _drop(self) -> None:
        """Drop the first upload, and give back the blocks of parts that were not sent."""
        for _, _, block, end in self._waiting.popleft().filling:
            end.exception()
            self._give_back(block, None if block is None else block.read)

    def abandon(self) -> None:
        """Drop all uploads that were not sent."""
        while self._waiting:
            self._drop()

    def close(self) -> None:
        """End the threads, and free the ring, until the next upload."""
        self.abandon()
        if self._threads is not None:
            self._threads.shutdown()
        self._threads, self._free, self.nbytes = None, None, 0


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
        self,
        uploads: Uploads,
        what: str,
        parts: Iterable[UploadPart],
        then: Callable[[], Work],
        begin: torch.Event | None,
    ) -> None:
        self._uploads = uploads
        self.what, self.then, self.begin = what, then, begin
        self.parts = deque(parts)
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


def _fill(block: _Block | None, fill: Callable[[Tensor], object], source: Tensor) -> None:
    if block is not None and block.read is not None:
        block.read.synchronize()
    fill(source)
