"""States of an optimizer in files, and the staging memory that threads read to and write from.

An entry of a piece's state goes to files if it has a number per element, also within a list or
dictionary. Everything else, such as step counts, stays in memory. An entry of elements is

=======  ===================================================  ====================================
at rest  a view of its place in a mapped file                 between steps
staged   a view of memory to which a block was read           while its batch is stepped
new      a tensor made by user code: an optimizer in its      until the batch is flushed, or the
         step, or a user between steps                        next step opens
=======  ===================================================  ====================================

The address of its memory tells at rest from new: ``.data`` may put other memory into a tensor.

A file holds one entry, such as ``exp_avg``, of all pieces of a dtype, batch after batch. A batch's
bytes in it are a block, in whole pages, which is read and written at once. A piece that is cut over
several batches has its parts in blocks that follow each other, so its place is still one range of
bytes, and a stand-in is stepped for each part::

    blocks    batch 0                    | batch 1         | batch 2
    places    piece a | piece b | unused | piece c, part 0 | piece c, part 1 | unused

Buffers, each with memory for one batch, take turns. Each is read to, stepped in, written from, and
read to again as soon as it is written, so that the disk never waits for the step while it has work
left. They exist only during a step::

    buffer 0    read 0 | step 0 | write 0 | read 3 | step 3 | ...
    buffer 1    read 1          | step 1  | write 1 | read 4 | ...
    buffer 2    read 2                    | step 2  | write 2 | ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.comm import Communicator, Ledger, require_room
from lightning_zero.optimizer.pieces import FindPiece, is_of_elements, with_entries
from lightning_zero.optimizer.toys import state_bytes
from lightning_zero.optimizer.unit_step import ParamGroups, UnitStep
from lightning_zero.parameters import Piece
from lightning_zero.tensors import (
    CHUNK_BYTES,
    NUM_BUFFERS,
    PAGE,
    Job,
    Scratch,
    StagedFile,
    StagingMemory,
    Threads,
    fault_in,
    in_pages,
    lasting_tensors,
    span,
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
    """Bytes ``[start, stop)`` of a piece; all of a small one."""

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


# -- places in files -------------------------------------------------------------------------------


Part: TypeAlias = PiecePart[Piece]


class FilePlace(NamedTuple):
    """The place of an entry of a piece's state in a file.

    Attributes:
        blocks: The block of each part of the piece, by the part's first byte in the piece.
    """

    file: StagedFile
    start: int
    numel: int
    dtype: torch.dtype
    blocks: dict[int, Block]

    def mapped(self) -> Tensor:
        """Return a new view of the entry: users may have made an earlier one point elsewhere."""
        with lasting_tensors():
            content = self.file.mapped[self.start : self.start + self.numel * self.dtype.itemsize]
            return content.view(self.dtype)

    def holds(self, value: Tensor) -> bool:
        """Return whether ``value`` is a view of this place."""
        return value.data_ptr() == self.file.mapped[self.start :].data_ptr()

    def staged(self, buffer: StagingBuffer, part: Part) -> Tensor | None:
        """Return the view of a part in ``buffer``; ``None`` if the block was not read to it."""
        block = self.blocks[part.start]
        if block not in buffer.places:
            return None
        first, last = _range(part)
        start = self.start + first * self.dtype.itemsize
        return buffer.view_of(block, start - block.start, last - first, self.dtype)


class FilePlaces:
    """The places of one optimizer's states, made as entries appear.

    Attributes:
        batches: The parts of pieces that are stepped together, by the number of the batch.
        pieces: The pieces in batches, by id. Only their states rest in files.
    """

    def __init__(self, batches: Sequence[Sequence[Part]], scratch: Scratch) -> None:
        self.batches = dict(enumerate(batches))
        self.pieces = {id(part.piece): part.piece for batch in batches for part in batch}
        self._scratch = scratch
        self._places: dict[tuple[str, torch.dtype], dict[int, FilePlace]] = {}
        self._taken: set[int] = set()

    def take(self, pieces: Iterable[Piece]) -> None:
        """Note that the optimizer holds these pieces: their places are made together."""
        self._taken.update(id(piece) for piece in pieces if id(piece) in self.pieces)

    def nbytes(self, pieces: Iterable[Piece]) -> int:
        """Return the bytes in files of an entry of these pieces, in their dtype."""
        return sum(map(_bytes_in_file, self._parts_of({id(piece) for piece in pieces})))

    def of(self, key: str, dtype: torch.dtype, piece: Piece) -> FilePlace:
        """Return the place of an entry; make it if there is none."""
        places = self._places.setdefault((key, dtype), {})
        if id(piece) not in places:
            self._make(places, dtype, piece)
        return places[id(piece)]

    def _make(self, places: dict[int, FilePlace], dtype: torch.dtype, piece: Piece) -> None:
        """Make a file for an entry of the states of a piece and all others that may have it."""

        def may_have(one: Piece) -> bool:
            # Frozen pieces rarely have states, but if this one has, all others may.
            is_alike = one.requires_grad or not piece.requires_grad
            return is_alike and one.dtype is piece.dtype and one.numel() > 0

        others = (key for key in self._taken - places.keys() if may_have(self.pieces[key]))
        new = self._parts_of({id(piece), *others})
        ratio = dtype.itemsize / piece.dtype.itemsize
        sizes = [_bytes_in_file(parts, ratio) for parts in new]
        file, start = StagedFile(self._scratch, sum(sizes)), 0
        for parts, size in zip(new, sizes, strict=True):
            block, offset = Block(file, start, size), 0
            for part in parts:
                place = FilePlace(file, start + offset, part.piece.numel(), dtype, {})
                places.setdefault(id(part.piece), place).blocks[part.start] = block
                offset += int(ratio * part.nbytes)
            start += size

    def _parts_of(self, pieces: set[int]) -> list[list[Part]]:
        """Return the parts in each batch of pieces, given by id."""
        batches = self.batches.values()
        return [[part for part in batch if id(part.piece) in pieces] for batch in batches]


def _bytes_in_file(parts: Sequence[Part], ratio: float = 1.0) -> int:
    """Return the bytes of an entry of ``parts`` with ``ratio`` times their size, in whole pages."""
    return in_pages(int(ratio * sum(part.nbytes for part in parts)))


def cut(values: Tensor, part: Part) -> Tensor:
    """Return a part's values, given those of its piece."""
    return values[slice(*_range(part))] if part.is_cut else values


def _range(part: Part) -> tuple[int, int]:
    """Return a part's first element in its piece, and one past its last."""
    itemsize = part.piece.dtype.itemsize
    return part.start // itemsize, part.stop // itemsize


# -- states ----------------------------------------------------------------------------------------


class FileStep(UnitStep):
    """Steps an optimizer with states in files of a scratch folder, batch by batch."""

    def __init__(
        self,
        optimizer: Optimizer,
        batches: Sequence[Sequence[Part]],
        scratch: Scratch,
        comm: Communicator,
    ) -> None:
        pieces = [[part.piece for part in batch] for batch in batches]
        super().__init__(optimizer, pieces, comm.transport.ledger)
        self._places = FilePlaces(batches, scratch)
        self._scratch, self._comm = scratch, comm
        self._staging = Staging(comm.transport.ledger)
        # For each part of the fetched batch, what is stepped and the piece's state before.
        self._lent: list[tuple[Part, Parameter, dict[str, Any]]] = []

    @property
    def place(self) -> str:  # type: ignore[override]
        """The place where states rest, in words."""
        is_memory = self._scratch.is_memory
        cure = " (this folder is in memory; set offload_path to a folder on a disk)"
        return f"files in {self._scratch.folder!r}{cure if is_memory else ''}"

    @override
    def require_room(self, find_piece: FindPiece) -> None:
        nbytes = 0
        for group in self.optimizer.param_groups:
            found = [find_piece(p) for p in group["params"] if not isinstance(p, Piece)]
            new = [piece for piece in found if piece is not None and piece.requires_grad]
            new = [piece for piece in new if id(piece) in self._places.pieces]
            for dtype in {piece.dtype for piece in new}:
                num_entries = state_bytes(self.optimizer, group, dtype).num_entries(dtype)
                of_dtype = (piece for piece in new if piece.dtype is dtype)
                nbytes += num_entries * self._places.nbytes(of_dtype)
        what = f"the states of {type(self.optimizer).__name__}"
        require_room(self._scratch, nbytes, self._comm.control, what)

    @override
    def take(self, pieces: Iterable[Piece]) -> None:
        super().take(pieces)
        self._places.take(pieces)

    @override
    @torch.no_grad()
    def rest(self, key: str, value: Any, piece: Piece) -> Any:
        if not is_of_elements(key, value, piece) or id(piece) not in self._places.pieces:
            return super().rest(key, value, piece)
        place = self._places.of(key, value.dtype, piece)
        return value if place.holds(value) else place.mapped().copy_(value)

    # -- a step ----------------------------------------------------------------------------------

    @override
    @torch.no_grad()
    def open(self, numbers: Sequence[int]) -> None:
        places = self._bring_to_rest()
        batches = [
            [
                *{
                    place.blocks[part.start]: None
                    for part in parts
                    for place in places[id(part.piece)]
                }
            ]
            for parts in (self._places.batches.get(number, ()) for number in numbers)
        ]
        nbytes = sum(block.nbytes for batch in batches for block in batch)
        self._staging.open(batches, [self._masters_of(number) for number in numbers])
        for verb in ("read", "write"):
            self._comm.transport.ledger.note("optimizer", verb, nbytes, 1)

    def _bring_to_rest(self) -> dict[int, list[FilePlace]]:
        """Move entries that were added or replaced since the last step to their places.

        Returns:
            The places of each piece's entries, by the piece's id.
        """
        pieces, states = self._places.pieces, self.optimizer.state
        places: dict[int, list[FilePlace]] = {key: [] for key in pieces}
        moved: list[tuple[Tensor, Tensor]] = []

        def at_rest(piece: Piece, key: str, value: Any) -> Any:
            if not is_of_elements(key, value, piece):
                return value
            place = self._places.of(key, value.dtype, piece)
            places[id(piece)].append(place)
            if place.holds(value):
                return value
            # It may be a view of another entry's place, which is written to as well.
            is_in_file = value.untyped_storage().is_shared()
            moved.append((place.mapped(), value.clone() if is_in_file else value))
            return moved[-1][0]

        before = [states.get(piece, {}) for piece in pieces.values()]
        after = [
            with_entries(state, partial(at_rest, piece))
            for state, piece in zip(before, pieces.values(), strict=True)
        ]
        for mapped, value in moved:
            mapped.copy_(value)
        for state, new in zip(before, after, strict=True):
            state.update(new)
        return places

    def _masters_of(self, number: int) -> list[Tensor]:
        """Return the values of a batch that its step changes, which may be in mapped files."""
        parts, states = self._places.batches.get(number, ()), self.optimizer.state
        return [cut(part.piece.detach(), part) for part in parts if part.piece in states]

    @override
    @span("fetch")
    @torch.no_grad()
    def fetch(self, number: int, groups: ParamGroups) -> None:
        self._staging.fetch()
        parts = {id(part.piece): part for part in self._places.batches.get(number, ())}
        for group in groups:
            members = group["params"]
            for index, member in enumerate(members):
                if id(member) in parts:
                    members[index] = self._lend(parts[id(member)])

    def _lend(self, part: Part) -> Parameter:
        """Return the parameter to step for a part, with its gradient and state.

        The state of a cut piece does not change until its last part has been stepped.
        """
        piece, states = part.piece, self.optimizer.state
        own = states.get(piece, {})
        stand_in: Parameter = piece
        if part.is_cut:
            stand_in = Parameter(cut(piece.detach(), part), requires_grad=False)
            grad = piece.grad
            stand_in.grad = None if grad is None else cut(grad, part)
        self._lent.append((part, stand_in, {**own}))
        if piece in states:
            lent = with_entries(own, partial(self._lent_entry, part))
            (states[stand_in] if part.is_cut else own).update(lent)
        return stand_in

    def _lent_entry(self, part: Part, key: str, value: Any) -> Any:
        """Return what a part is stepped with as an entry of its state."""
        if not is_of_elements(key, value, part.piece):
            # All parts take the same step: all but the last count it in copies.
            is_own = isinstance(value, Tensor) and not part.is_last
            return value.clone() if is_own else value
        place = self._places.of(key, value.dtype, part.piece)
        staged = place.staged(self._staging.fetched, part)
        assert staged is not None
        return staged

    @override
    @span("flush")
    @torch.no_grad()
    def flush(self) -> None:
        states = self.optimizer.state
        for part, stand_in, _ in self._lent:
            state = states.pop(stand_in, {}) if part.is_cut else states.get(stand_in, {})
            state.update(with_entries(state, partial(self._kept_in_file, part, stand_in)))
            if state and part.is_cut and part.is_last:
                states[part.piece].update(state)
        if not self._lent:
            self._bring_to_rest()  # what was stepped in place
        self._lent = []
        self._staging.flush()

    def _kept_in_file(self, part: Part, stand_in: Parameter, key: str, value: Any) -> Any:
        """Keep an entry of a part's state; return the piece's, in its file if it goes there."""
        if not is_of_elements(key, value, stand_in):
            return value
        place = self._places.of(key, value.dtype, part.piece)
        staged = place.staged(self._staging.fetched, part)
        if staged is None:  # it is new
            cut(place.mapped(), part).copy_(value)
        elif value.data_ptr() != staged.data_ptr():
            staged.copy_(value)
        return place.mapped()

    @override
    def close(self) -> None:
        for part, stand_in, before in self._lent:  # left by a step that failed
            self.optimizer.state.pop(stand_in, None)
            if before and not part.is_cut:
                self.optimizer.state[part.piece] = before
        self._lent = []
        self._staging.close()
