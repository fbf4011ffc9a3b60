"""Staging memory for what a step reads from files and writes back, batch by batch, by threads.

Three slots take turns: one is read to, one stepped in, one written from. They are there while a
step goes on only::

    reader    0 | 1 | 2 | 3 |
    step          0 | 1 | 2 | 3
    writer            0 | 1 | 2 | 3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.comm import PAGE, StagedFile, StagingMemory

NUM_SLOTS = 3
_NUM_THREADS = 2
_REQUEST = 4 * 2**20
assert _REQUEST % PAGE == 0


class Block(NamedTuple):
    """Whole pages of a file, which are read and written together."""

    file: StagedFile
    start: int
    nbytes: int


class Slot:
    """Memory for the blocks of one batch.

    Attributes:
        places: Where the blocks lie that are in it, or on their way.
    """

    def __init__(self, nbytes: int) -> None:
        self.places: Mapping[Block, int] = {}
        self._memory = StagingMemory(nbytes)
        self._pending: list[Future[None]] = []

    def view(self, block: Block, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return ``numel`` elements, ``offset`` bytes into a block."""
        start = self.places[block] + offset
        return self._memory.tensor[start : start + numel * dtype.itemsize].view(dtype)

    def move(
        self,
        threads: ThreadPoolExecutor,
        request: Callable[[StagedFile, int, memoryview], None],
    ) -> None:
        """Start to read all blocks, or to write them."""
        for block, place in self.places.items():
            for start in range(0, block.nbytes, _REQUEST):
                part = self._memory.part(place + start, min(_REQUEST, block.nbytes - start))
                self._pending.append(threads.submit(request, block.file, block.start + start, part))

    def wait(self) -> None:
        """Return when what was started has ended.

        Raises:
            OSError: It failed.
        """
        pending, self._pending = self._pending, []
        wait(pending)
        for one in pending:
            one.result()


class Staging:
    """The slots and threads of a step from files.

    1. :meth:`open` with the blocks of every batch, in the order of the step.
    2. :meth:`fetch` and :meth:`flush` around the step of each.
    3. :meth:`close`.
    """

    def __init__(self) -> None:
        self._readers = ThreadPoolExecutor(_NUM_THREADS, "lightning_zero.fetch")
        self._writers = ThreadPoolExecutor(_NUM_THREADS, "lightning_zero.flush")
        self._batches: Sequence[Sequence[Block]] = ()
        self._slots: list[Slot] = []
        self._next = 0

    def open(self, batches: Sequence[Sequence[Block]]) -> None:
        """Make room for the largest batch three times, and start to read the first."""
        self._batches, self._next = batches, 0
        largest = max(sum(block.nbytes for block in batch) for batch in batches)
        num_slots = min(NUM_SLOTS, len(batches))
        try:
            self._slots = [Slot(largest) for _ in range(num_slots)]
        except OSError as error:
            raise MemoryError(
                f"A step from files stages {num_slots} times the states of its largest batch:"
                f" {num_slots} x {largest:,} bytes of memory, which are not there."
            ) from error
        self._read(0)

    def _read(self, number: int) -> None:
        """Start to read a batch, when what was in its slot is written."""
        slot = self._slots[number % len(self._slots)]
        slot.wait()
        places, end = {}, 0
        for block in self._batches[number]:
            places[block] = end
            end += block.nbytes
        slot.places = places
        slot.move(self._readers, StagedFile.read)

    def fetch(self) -> Slot:
        """Return the slot of the next batch, which is read; start to read the one behind."""
        number, self._next = self._next, self._next + 1
        if self._next < len(self._batches):
            self._read(self._next)
        slot = self._slots[number % len(self._slots)]
        slot.wait()
        return slot

    def flush(self, slot: Slot) -> None:
        """Start to write a batch that was stepped."""
        slot.move(self._writers, StagedFile.write)

    def close(self) -> None:
        """Wait until all is written, and give the slots' memory back.

        Raises:
            OSError: Something could not be written, or read.
        """
        slots, self._slots = self._slots, []
        errors = []
        for slot in slots:
            try:
                slot.wait()
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]
