"""Batches that are stepped from files, and staging memory that threads read to and write from.

A batch is a list of parts of pieces that are stepped together. Buffers, each with memory for one
batch, take turns. Each is read to, stepped in, written from, and read to again as soon as it is
written, so that the disk never waits for the step while it has work left. With three buffers::

    buffer 0    read 0 | step 0 | write 0 | read 3 | step 3 | ...
    buffer 1    read 1          | step 1  | write 1 | read 4 | ...
    buffer 2    read 2                    | step 2  | write 2 | ...

Buffers exist only during a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_zero.comm import Ledger
from lightning_zero.tensors import (
    CHUNK_BYTES,
    NUM_BUFFERS,
    PAGE,
    Job,
    StagedFile,
    StagingMemory,
    Threads,
    fault_in,
)

_BATCH_BYTES = CHUNK_BYTES
"""The most bytes of pieces in a batch: one request for each of their states. In larger batches the
pages of memory cost more than they gain."""

_LARGEST_ELEMENT = 16

_NUM_AHEAD = 2
"""How many batches ahead pages of masters are brought in: they may be dropped before their use."""


class HasBytes(Protocol):
    """A piece, or a stand-in for one."""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""


Sized = TypeVar("Sized", bound=HasBytes)


@dataclass(frozen=True)
class PiecePart(Generic[Sized]):
    """Bytes ``[start, stop)`` of a piece; of a small one, all."""

    piece: Sized
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        """Return whether the piece ends with this part."""
        return self.stop == self.piece.nbytes

    @property
    def is_cut(self) -> bool:
        """Return whether the piece has other parts."""
        return self.nbytes < self.piece.nbytes


def batches_of(units: Iterable[Sequence[Sized]]) -> list[list[PiecePart[Sized]]]:
    """Return the pieces of units in batches, with large pieces cut across several.

    All parts of a cut piece but the last are batches of their own, and have whole pages of elements
    whatever the size of an element: in a file they follow each other.
    """
    pages = _LARGEST_ELEMENT * PAGE
    at_once = -(-_BATCH_BYTES // pages) * pages
    batches: list[list[PiecePart[Sized]]] = []
    for unit in units:
        room = -1
        for piece in unit:
            for start in range(0, max(1, piece.nbytes), at_once):
                part = PiecePart(piece, start, min(start + at_once, piece.nbytes))
                if part.nbytes > room or part.is_cut:
                    batches.append([])
                    room = _BATCH_BYTES
                batches[-1].append(part)
                room -= part.nbytes
    return batches


def staging_bytes(batches: Sequence[int]) -> int:
    """Return the memory that a step takes, given the bytes of each batch in whole pages."""
    return min(NUM_BUFFERS, len(batches)) * max(PAGE, *batches)


class Block(NamedTuple):
    """Whole pages of a file that are read and written together."""

    file: StagedFile
    start: int
    nbytes: int


class StagingBuffer(StagingMemory):
    """Memory for the blocks of one batch.

    Attributes:
        places: The offset of each block that is in the buffer or being read to it.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.places: Mapping[Block, int] = {}

    def view_of(self, block: Block, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return ``numel`` elements, ``offset`` bytes into a block."""
        return self.view(self.places[block] + offset, numel, dtype)

    def read(self, blocks: Sequence[Block], threads: Threads) -> None:
        """Start to read blocks once the buffer's previous ones are written."""
        ends = [*accumulate((block.nbytes for block in blocks), initial=0)]
        self.places = dict(zip(blocks, ends, strict=False))
        self.start(threads, self._requests(StagedFile.read))

    def write(self, threads: Threads) -> None:
        """Start to write what was read."""
        self.start(threads, self._requests(StagedFile.write))

    def _requests(self, request: Callable[[StagedFile, int, memoryview], None]) -> Iterator[Job]:
        for block, place in self.places.items():
            for start in range(0, block.nbytes, CHUNK_BYTES):
                part = self.part(place + start, min(CHUNK_BYTES, block.nbytes - start))
                yield partial(request, block.file, block.start + start, part)


class Staging:
    """The buffers and threads of a step from files.

    1. :meth:`open` with the blocks of every batch and the masters that it steps, in the order of
       the step.
    2. :meth:`fetch` and :meth:`flush` around the step of each.
    3. :meth:`close`.

    Args:
        ledger: Counts the time of requests, and of waiting for them.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._readers, self._writers = Threads("fetch"), Threads("flush")
        self._faults = Threads("fault")
        self._batches: Sequence[Sequence[Block]] = ()
        self._masters: Sequence[Sequence[Tensor]] = ()
        self._buffers: list[StagingBuffer] = []
        self._next = 0

    def open(self, batches: Sequence[Sequence[Block]], masters: Sequence[Sequence[Tensor]]) -> None:
        """Make buffers with room for the largest batch, and start to read the first batches."""
        self._batches, self._masters, self._next = batches, masters, 0
        sizes = [sum(block.nbytes for block in batch) for batch in batches]
        largest, num_buffers = max(sizes), min(NUM_BUFFERS, len(batches))
        self._ledger.stage(staging_bytes(sizes))
        try:
            self._buffers = [StagingBuffer(largest) for _ in range(num_buffers)]
        except OSError as error:
            raise MemoryError(
                "Not enough memory for a step from files, which stages the states of"
                f" {num_buffers} batches at a time: {num_buffers} x {largest:,} bytes."
            ) from error
        for buffer, blocks in zip(self._buffers, batches, strict=False):
            buffer.read(blocks, self._readers)
        for tensors in masters[:_NUM_AHEAD]:
            self._faults.start(partial(fault_in, tensors))

    @property
    def fetched(self) -> StagingBuffer:
        """The buffer of the batch that was fetched last."""
        return self._buffers[(self._next - 1) % len(self._buffers)]

    def fetch(self) -> None:
        """Go on to the buffer of the next batch, and wait until it is read."""
        for tensors in self._masters[self._next + _NUM_AHEAD :][:1]:
            self._faults.start(partial(fault_in, tensors))
        self._next += 1
        self._wait(self.fetched)

    def flush(self) -> None:
        """Start to write the batch that was fetched last, and to read another after it."""
        self.fetched.write(self._writers)
        behind = self._next - 1 + len(self._buffers)
        if behind < len(self._batches):
            self.fetched.read(self._batches[behind], self._readers)

    def _wait(self, buffer: StagingBuffer) -> None:
        begin = perf_counter()
        try:
            buffer.wait()
        finally:
            self._ledger.spend("waiting", perf_counter() - begin)

    def close(self) -> None:
        """Wait until everything is written, and free the buffers.

        Raises:
            OSError: A read or write failed.
        """
        buffers, self._buffers, self._masters = self._buffers, [], ()
        errors = []
        for buffer in buffers:
            try:
                self._wait(buffer)
            except OSError as error:
                errors.append(error)
        self._ledger.spend("reading", self._readers.take_seconds())
        self._ledger.spend("writing", self._writers.take_seconds())
        if errors:
            raise errors[0]
