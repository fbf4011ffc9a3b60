"""States of an optimizer in files, and the staging memory that threads read to and write from.

An entry of a piece's state goes to files if it has a number per element, also within a list or
dictionary. Everything else, such as step counts, stays in memory. An entry of elements is

=======  ===================================================  ====================================
at rest  a view of its place in a mapped file                 between steps
staged   a view of memory to which a block was read           while its batch is stepped
new      a tensor made by user code: an optimizer in its      until its batch has been stepped, or
         step, or a user between steps                        the next step begins
=======  ===================================================  ====================================

The address of its memory tells at rest from new: ``.data`` may put other memory into a tensor.

A file holds one entry, such as ``exp_avg``, of all pieces of a dtype that an optimizer was given
together, batch after batch. A batch's elements in it are a block of whole pages, which is read and
written at once. A piece that is cut over several batches has its parts in blocks that follow each
other, so its place is still one range::

    blocks    batch 0                    | batch 1         | batch 2
    places    piece a | piece b | unused | piece c, part 0 | piece c, part 1 | unused

Buffers, each with memory for one batch, take turns. Each is read to, stepped in, written from, and
read to again as soon as it is written, so that the disk never waits for the step while it has work
left. They exist only during a step. With each read the pages of mapped masters are brought in::

    buffer 0    read 0 | step 0 | write 0 | read 3 | step 3 | ...
    buffer 1    read 1          | step 1  | write 1 | read 4 | ...
    buffer 2    read 2                    | step 2  | write 2 | ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.comm import Communicator
from lightning_zero.optimizer.pieces import is_of_elements, with_entries
from lightning_zero.optimizer.unit_step import Part, UnitStep
from lightning_zero.parameters import Piece
from lightning_zero.tensors import (
    CHUNK_BYTES,
    NUM_BUFFERS,
    PAGE,
    Buffer,
    Job,
    Scratch,
    StagedFile,
    StagingMemory,
    Wait,
    fault_in,
    in_pages,
    lasting_tensors,
    threads,
    wait_for,
)

_BATCH_BYTES = CHUNK_BYTES
"""The most bytes of pieces in a batch: one request for each of their states. In larger batches the
pages of memory cost more than they gain."""

Entry = tuple[str, torch.dtype]
"""The name of an entry of states, and its dtype."""


class Block(NamedTuple):
    """The pages of an entry's file that hold a batch, from element ``first`` of the file on."""

    entry: Entry
    file: StagedFile
    first: int
    nbytes: int

    def view(self, memory: Buffer, place: int) -> Tensor:
        """Return the elements, which lie in memory from byte ``place`` on."""
        dtype = self.entry[1]
        return memory.view(place, self.nbytes // dtype.itemsize, dtype)


Staged = Mapping[Entry, tuple[int, Tensor]]
"""The blocks of a batch in memory, by entry, each with its first element in the file."""


class StateFiles:
    """The states of pieces of one dtype: a file for each entry, in which a piece has one place.

    Attributes:
        batches: The pieces in batches, in the order of the files.
        numel: The elements of a file. Batches begin at whole pages, whatever the size of an
            element.
    """

    def __init__(self, pieces: Sequence[Piece], scratch: Scratch) -> None:
        self.batches: list[list[Part]] = []
        self.numel = 0
        self._scratch = scratch
        self._starts: dict[Piece, int] = {}
        self._files: dict[Entry, StagedFile] = {}
        most = _BATCH_BYTES // pieces[0].element_size()
        at_once, room = in_pages(max(1, most)), -1
        for piece in pieces:
            for start in range(0, piece.numel(), at_once):
                part = Part(piece, start, min(start + at_once, piece.numel()))
                if part.numel > room or part.numel < piece.numel():
                    self.numel, room = in_pages(self.numel), most
                    self.batches.append([])
                self.batches[-1].append(part)
                self._starts.setdefault(piece, self.numel)
                self.numel += part.numel
                room -= part.numel
        self.numel = in_pages(self.numel)

    def of(self, entry: Entry) -> StagedFile:
        """Return the file of an entry; make it if there is none."""
        if entry not in self._files:
            nbytes = self.numel * entry[1].itemsize
            self._files[entry] = StagedFile(self._scratch, nbytes)
        return self._files[entry]

    def place(self, part: Part) -> int:
        """Return a part's first element in the files."""
        return self._starts[part.piece] + part.start

    def mapped(self, entry: Entry, part: Part) -> Tensor:
        """Return a new view of an entry: users may have made an earlier one point elsewhere."""
        start, itemsize = self.place(part), entry[1].itemsize
        with lasting_tensors():
            content = self.of(entry).mapped[start * itemsize : (start + part.numel) * itemsize]
            return content.view(entry[1])

    def holds(self, value: Tensor, entry: Entry, part: Part) -> bool:
        """Return whether a value is a view of an entry's place."""
        start = self.place(part) * entry[1].itemsize
        return value.data_ptr() == self.of(entry).mapped.data_ptr() + start

    def blocks(self, batch: Sequence[Part]) -> list[Block]:
        """Return the pages that hold the states of a batch."""
        first = self.place(batch[0]) // PAGE * PAGE
        numel = in_pages(self.place(batch[-1]) + batch[-1].numel) - first
        files = self._files.items()
        return [Block(entry, file, first, numel * entry[1].itemsize) for entry, file in files]


def _requests(
    request: Callable[[StagedFile, int, memoryview], None], blocks: Sequence[Block], memory: Buffer
) -> Iterator[Job]:
    """Yield the requests that read blocks to memory, or write them from it."""
    place = 0
    for block in blocks:
        begin = block.first * block.entry[1].itemsize
        for start in range(0, block.nbytes, CHUNK_BYTES):
            part = memory.part(place + start, min(CHUNK_BYTES, block.nbytes - start))
            yield partial(request, block.file, begin + start, part)
        place += block.nbytes


class FileStep(UnitStep):
    """Steps an optimizer with states in files of a scratch folder, batch by batch."""

    def __init__(self, optimizer: Optimizer, scratch: Scratch, comm: Communicator) -> None:
        super().__init__(optimizer, comm.transport.ledger)
        self._scratch, self._times = scratch, comm.transport.ledger
        self.place = f"files in {scratch.folder!r}"
        self._files: dict[Piece, StateFiles] = {}
        self._readers, self._writers = threads("fetch"), threads("flush")
        self._faults = threads("fault")
        self._in_memory: Staged = {}

    @override
    def take(self, pieces: Sequence[Piece]) -> None:
        kinds: dict[Any, list[Piece]] = {}
        for piece in pieces:
            if piece.numel() and not piece.plan.stays and piece not in self._files:
                # Frozen pieces rarely have states, but if one has, all others may.
                kinds.setdefault((piece.dtype, piece.requires_grad), []).append(piece)
        for new in kinds.values():
            files = StateFiles(new, self._scratch)
            self._files.update(dict.fromkeys(new, files))
            self.batches += [] if self._is_at_once else files.batches

    @override
    @torch.no_grad()
    def rest(self, key: str, value: Any, piece: Piece) -> Any:
        if not is_of_elements(key, value, piece) or piece not in self._files:
            return super().rest(key, value, piece)
        files, place = self._files[piece], ((key, value.dtype), Part.all_of(piece))
        return value if files.holds(value, *place) else files.mapped(*place).copy_(value)

    def _bring_to_rest(self) -> None:
        """Move entries that were added or replaced since the last step to their places."""
        states = self.optimizer.state

        def freed(key: str, value: Any, piece: Piece) -> Any:
            # It may be a view of another entry's place, which is written to as well.
            if not is_of_elements(key, value, piece) or not value.untyped_storage().is_shared():
                return value
            place = (key, value.dtype), Part.all_of(piece)
            return value if self._files[piece].holds(value, *place) else value.clone()

        for bring in (freed, self.rest):
            for piece in self._files:
                if piece in states:
                    states[piece].update(with_entries(states[piece], partial(bring, piece=piece)))

    # -- a step ----------------------------------------------------------------------------------

    @override
    def brought(self, batches: list[list[Part]]) -> Generator[list[Part], None, None]:
        self._bring_to_rest()
        if batches == [[]]:  # all are stepped where they rest
            yield from batches
            self._bring_to_rest()
            return
        with contextlib.closing(self._staged(batches)) as staged:
            for self._in_memory, batch in zip(staged, batches, strict=True):
                yield batch

    def _staged(self, batches: Sequence[Sequence[Part]]) -> Generator[Staged, None, None]:
        """Yield each batch's states in memory, and write them to files behind the batch's step.

        Raises:
            MemoryError: There is none for the buffers.
            OSError: A read or write failed.
        """
        times = self._times
        blocks = [self._files[batch[0].piece].blocks(batch) for batch in batches]
        sizes = [sum(block.nbytes for block in each) for each in blocks]
        number, most = min(NUM_BUFFERS, len(batches)), max(sizes)
        times.stage(number * max(PAGE, most))
        for verb in ("read", "write"):
            times.note("optimizer", verb, sum(sizes), 1)
        try:
            buffers = [StagingMemory(most) for _ in range(number)]
        except OSError as error:
            raise MemoryError(
                "Not enough memory for a step from files, which stages the states of"
                f" {number} batches at a time: {number} x {most:,} bytes."
            ) from error
        self.is_torn = True  # until all is written

        def read(at: int) -> None:
            if at < len(batches):
                buffer = buffers[at % number]
                buffer.start(self._readers, _requests(StagedFile.read, blocks[at], buffer))
                self._faults.submit(fault_in, self._masters_of(batches[at]))

        try:
            for at in range(number):
                read(at)
            for at, own in enumerate(blocks):
                buffer = buffers[at % number]
                self._wait(buffer.ends)
                places = accumulate((block.nbytes for block in own), initial=0)
                yield {
                    block.entry: (block.first, block.view(buffer, place))
                    for block, place in zip(own, places, strict=False)
                }
                buffer.start(self._writers, _requests(StagedFile.write, own, buffer))
                read(at + number)
        finally:
            self._wait([end for buffer in buffers for end in buffer.ends])

    def _wait(self, ends: list[Wait]) -> None:
        began = perf_counter()
        try:
            wait_for(ends)
        finally:
            self._times.spend("waiting", perf_counter() - began)

    def _masters_of(self, batch: Sequence[Part]) -> list[Tensor]:
        """Return what a step of a batch changes of masters, which may be in mapped files."""
        states = self.optimizer.state
        return [part.of(part.piece.detach()) for part in batch if part.piece in states]

    @override
    def lend(self, part: Part, values: Tensor, key: str | None = None) -> Tensor:
        if key is None:
            return part.of(values)
        staged = self._staged_view(part, (key, values.dtype))
        assert staged is not None
        return staged

    def _staged_view(self, part: Part, entry: Entry) -> Tensor | None:
        """Return an entry of a part in memory; ``None`` if no file had it when the step began."""
        if entry not in self._in_memory:
            return None
        first, values = self._in_memory[entry]
        start = self._files[part.piece].place(part) - first
        return values[start : start + part.numel]

    @override
    def rested(self, part: Part, stand_in: Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        def entry(key: str, value: Any) -> Any:
            if not is_of_elements(key, value, stand_in):
                return value
            name = key, value.dtype
            staged = self._staged_view(part, name)
            if staged is None:  # it is new
                staged = self._files[part.piece].mapped(name, part)
            if value.data_ptr() != staged.data_ptr():
                staged.copy_(value)
            return self._files[part.piece].mapped(name, Part.all_of(part.piece))

        return with_entries(state, entry)
