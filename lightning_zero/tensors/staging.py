"""Memory through which threads move chunks between a device, its host and files.

A chunk is moved in a buffer. Buffers take turns, so only so many are in flight; each is filled
again as soon as it has been emptied::

    threads     fill 0 | fill 1 | fill 2 |  wait for 0 | fill 0 | ...
    buffer 0           | use 0  | empty 0              |        | use 3
    buffer 1                    | use 1  | empty 1     | ...

Uploads to a device fill buffers from files or cast to them, and the device's copies empty them. A
step from files fills them by reading states, and empties them by writing the states.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import torch
from torch import Tensor

from lightning_zero.tensors.lasting import lasting_tensors
from lightning_zero.tensors.pages import private_map

PAGE = 4096
"""The alignment of offsets in files, and of addresses and sizes of memory, for direct I/O."""
CHUNK_BYTES = 4 * 2**20
"""The most bytes that are moved at once: smaller chunks are slower, larger ones only larger."""
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
        errors = []
        for wait in self.ends:  # not forgotten before all have ended: an interrupt may come here
            try:
                wait()
            except Exception as error:
                errors.append(error)
        self.ends = []
        if errors:
            raise errors[0]

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
