"""Places of the entries of optimizer states in files of a scratch folder.

A file holds one entry, such as ``exp_avg``, of all pieces of a dtype, batch after batch. A batch's
bytes in it are a block, in whole pages, which is read and written at once. A piece that is cut over
several batches has its parts in blocks that follow each other, so its place is still one range of
bytes::

    blocks    batch 0                    | batch 1         | batch 2
    places    piece a | piece b | unused | piece c, part 0 | piece c, part 1 | unused
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_zero.optimizer.staging import Block, PiecePart, StagingBuffer
from lightning_zero.parameters import Piece
from lightning_zero.tensors import Scratch, StagedFile, in_pages, lasting_tensors

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
