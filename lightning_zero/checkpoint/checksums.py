"""Checksums of what a checkpoint holds: of whole records and of blocks.

A zip archive has one checksum per record (CRC-32), of use only to a reader of the whole record, and
slow to compute. Files by this package also have one per block of ``BLOCK_BYTES``, so that a rank
that reads a range of a tensor checks the blocks that the range touches. Blocks are counted from the
begin of each part that one rank wrote, so that no two ranks have to add up one together. Whole
blocks have a sum of words (``word_sums.py``); the shorter ones at the ends of parts have their CRC.
Files before had the CRCs of blocks of 128 KiB, counted from the begin of the record.
"""

from __future__ import annotations

import itertools
import os
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.crc import joined_checksum
from lightning_zero.checkpoint.open_file import OpenFile
from lightning_zero.checkpoint.read_ahead import read_ahead
from lightning_zero.checkpoint.word_sums import BLOCK_BYTES, word_sums

_OLD_BLOCK_BYTES = 2**17
_AT_ONCE = 64 * BLOCK_BYTES
_PORTION_BYTES = 4 * _AT_ONCE
_AHEAD_BYTES = 2**28


class PartChecksums(NamedTuple):
    """The checksums of bytes ``[start, start + nbytes)`` of a record: of all, and of each block."""

    start: int
    nbytes: int
    whole: int
    blocks: array[int]


class PartSummer:
    """A computation of the checksums of consecutive bytes of a record."""

    def __init__(self, start: int = 0) -> None:
        self._start, self._nbytes, self._whole = start, 0, 0
        self._blocks: array[int] = array("q")
        self._rest = bytearray()

    def add(self, content: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(content)
        self._nbytes += len(view)
        self._whole = zlib.crc32(view, self._whole)
        if self._rest:
            view = self._fill(view)
        stop = len(view) // BLOCK_BYTES * BLOCK_BYTES
        if stop:
            self._add_blocks(view[:stop])
        self._rest += view[stop:]

    def _fill(self, view: memoryview) -> memoryview:
        """Complete the block that was begun, and return what does not belong to it."""
        missing = BLOCK_BYTES - len(self._rest)
        self._rest += view[:missing]
        if len(self._rest) == BLOCK_BYTES:
            self._add_blocks(memoryview(self._rest))
            self._rest = bytearray()
        return view[missing:]

    def _add_blocks(self, view: memoryview) -> None:
        writable = memoryview(bytearray(view)) if view.readonly else view
        self._blocks.extend(word_sums(writable).tolist())

    @property
    def checksums(self) -> PartChecksums:
        """The checksums of all that was added."""
        short = [zlib.crc32(self._rest)] if self._rest else []
        return PartChecksums(
            self._start, self._nbytes, self._whole, self._blocks + array("q", short)
        )


class Blocks(NamedTuple):
    """The checksums of the blocks of a record.

    Attributes:
        starts: Where its parts begin.
        sums: Those of each part's blocks, ``[n]``.
        block_bytes: Bytes of a block.
        are_old: Whether all are CRCs.
    """

    starts: Sequence[int]
    sums: Sequence[Tensor]
    block_bytes: int = BLOCK_BYTES
    are_old: bool = False

    @classmethod
    def of(cls, sums: Sequence[int], *, are_old: bool = False) -> Blocks:
        """Return those of a record that has one part."""
        size = _OLD_BLOCK_BYTES if are_old else BLOCK_BYTES
        return cls([0], [torch.tensor(sums, dtype=torch.int64, device="cpu")], size, are_old)

    def fit(self, nbytes: int) -> bool:
        """Return whether there are as many as a record of ``nbytes`` must have."""
        stops = [*self.starts[1:], nbytes]
        parts = zip(self.starts, stops, self.sums, strict=True)
        return all(
            start <= stop and len(sums) == -(-(stop - start) // self.block_bytes)
            for start, stop, sums in parts
        )

    def touched(self, start: int, stop: int, nbytes: int) -> Iterator[Stretch]:
        """Yield the blocks that ``[start, stop)`` touches in a record of ``nbytes``."""
        size = self.block_bytes
        for index in range(bisect_right(self.starts, start) - 1, len(self.starts)):
            base, end = self.starts[index], [*self.starts[index + 1 : index + 2], nbytes][0]
            if base >= stop:
                return
            first, last = max(0, start - base) // size, -(-(min(stop, end) - base) // size)
            num_whole = 0 if self.are_old else (end - base) // size
            to = min(last, num_whole)
            if first < to:
                whole = base + first * size, base + to * size
                yield Stretch(*whole, size, self.sums[index][first:to])
            for at in range(max(first, num_whole), last):
                block = base + at * size, min(base + (at + 1) * size, end)
                yield Stretch(*block, 0, self.sums[index][at : at + 1])


class Stretch(NamedTuple):
    """Bytes ``[start, stop)`` of a record, and what they must add up to.

    ``block_bytes`` is 0 where that is the CRC of all, and else the size of the blocks.
    """

    start: int
    stop: int
    block_bytes: int
    expected: Tensor

    def damage_in(self, pieces: Iterable[Tensor]) -> tuple[int, int] | None:
        """Return the first range that is not as it was written, of content in ``pieces``.

        A piece has whole blocks, if there are such; the last one is shorter where the file ends.
        """
        if not self.block_bytes:
            checksum = 0
            for piece in pieces:
                checksum = zlib.crc32(piece.numpy().data, checksum)
            return None if checksum == int(self.expected[0]) else (self.start, self.stop)
        sums = []
        for piece in pieces:
            if not len(piece) or len(piece) % self.block_bytes:
                return self.start, self.stop
            sums.append(word_sums(piece.numpy().data))
        found = torch.cat(sums)
        if torch.equal(found, self.expected):
            return None
        if len(found) != len(self.expected):
            return self.start, self.stop
        first = self.start + int((found != self.expected).nonzero()[0]) * self.block_bytes
        return first, first + self.block_bytes


class RecordChecksums(NamedTuple):
    """The checksum of a record, and those of its parts."""

    whole: int
    parts: Sequence[PartChecksums]

    @classmethod
    def of(cls, name: str, nbytes: int, parts: Iterable[PartChecksums]) -> RecordChecksums:
        """Join the checksums of the parts that ranks wrote of a record; raise unless they fit."""
        ordered = sorted((part for part in parts if part.nbytes), key=lambda part: part.start)
        position = whole = 0
        for part in ordered:
            if part.start != position:
                break
            whole = joined_checksum(whole, part.whole, part.nbytes)
            position += part.nbytes
        if position != nbytes or any(part.start >= position for part in ordered):
            raise ValueError(f"the ranks' parts of {name!r} do not fit together at byte {position}")
        return cls(whole, ordered)


def encoded_blocks(records: Iterable[RecordChecksums]) -> bytes:
    """Return the checksums of all blocks: of each record how many parts, where, and theirs."""
    content = array("q")
    for record in records:
        content.append(len(record.parts))
        content.extend(part.start for part in record.parts)
        for part in record.parts:
            content.extend(part.blocks)
    return content.tobytes()


def decoded_blocks(content: bytes, sizes: Iterable[int]) -> list[Blocks]:
    """Return the checksums of the blocks of records, whose ``sizes`` are given, by record."""
    numbers = torch.frombuffer(bytearray(content), dtype=torch.int64)
    found, position = [], 0
    for nbytes in sizes:
        num_parts = int(numbers[position]) if position < len(numbers) else -1
        starts = numbers[position + 1 : position + 1 + num_parts].tolist()
        position += 1 + num_parts
        counts = [-(-(b - a) // BLOCK_BYTES) for a, b in itertools.pairwise([*starts, nbytes])]
        if num_parts < 0 or len(starts) != num_parts or min(counts, default=0) < 0:
            raise ValueError("its checksums do not fit its records")
        sums = torch.split(numbers[position : position + sum(counts)], counts)
        position += sum(counts)
        found.append(Blocks(starts or [0], sums if starts else [numbers[:0]]))
    if position != len(numbers):
        raise ValueError(f"it has {len(numbers)} numbers of checksums, not {position}")
    return found


def old_decoded_blocks(content: bytes, sizes: Iterable[int]) -> list[Blocks]:
    """Return the same of what earlier versions wrote."""
    blocks, found, position = array("I", content), [], 0
    for nbytes in sizes:
        stop = position - (-nbytes // _OLD_BLOCK_BYTES)
        found.append(Blocks.of(blocks[position:stop], are_old=True))
        position = stop
    if position != len(blocks):
        raise ValueError(f"it has checksums of {len(blocks)} blocks, not of {position}")
    return found


@dataclass(frozen=True)
class CheckedBytes:
    """Bytes of a file, and their checksums.

    ``whole`` is the CRC-32 of all, if the writer did not leave it out; ``blocks`` are those of each
    block, which other programs' files do not have. A ``kept`` file is not opened for each use.
    """

    file: Path
    offset: int
    nbytes: int
    whole: int | None
    blocks: Blocks | None = None
    kept: OpenFile | None = field(default=None, compare=False, repr=False)

    def can_check(self, start: int, stop: int) -> bool:
        """Return whether there are checksums for bytes ``[start, stop)`` alone."""
        is_all = (start, stop) == (0, self.nbytes)
        return self.blocks is not None or (self.whole is not None and is_all)

    def check(self, each: CheckedRange, passed: Callable[[int], None]) -> None:
        """Raise a ``ValueError`` unless the bytes of a range and their blocks are right.

        They are read from mapped memory, if some shows them, which costs no copy, and whoever
        copies them next finds its pages. A hook may have edited it: the file decides. ``passed`` is
        called with the number of bytes that were read.
        """
        name, mapped = each.name, each.mapped
        for stretch in self._stretches(each.start, each.stop):
            if mapped is not None:
                shown = torch.split(mapped[stretch.start : stretch.stop], _PORTION_BYTES)
                if stretch.damage_in(_counted(shown, passed)) is None:
                    continue
            place, nbytes = self.offset + stretch.start, stretch.stop - stretch.start
            damage = stretch.damage_in(_counted(_read(self.opened(), place, nbytes), passed))
            if damage is not None:
                raise ValueError(
                    f"{str(self.file)!r} is damaged: bytes [{damage[0]}, {damage[1]}) of {name!r},"
                    f" which begin at byte {self.offset + damage[0]} of the file, are not those"
                    " that were written. Load another checkpoint, or another copy of this one"
                )

    def read_ahead(self, start: int, stop: int) -> None:
        """Let the system start to read bytes ``[start, stop)``, where it can be asked to."""
        if hasattr(os, "posix_fadvise"):
            place, advice = self.offset + start, os.POSIX_FADV_WILLNEED
            file = self.opened()
            os.posix_fadvise(file.descriptor, place, stop - start, advice)

    def opened(self) -> OpenFile:
        """Return the file that is kept open, or open it for as long as somebody has it."""
        return self.kept or OpenFile(self.file)

    def _stretches(self, start: int, stop: int) -> Iterator[Stretch]:
        if self.blocks is not None:
            yield from self.blocks.touched(start, stop, self.nbytes)
        else:
            whole = torch.tensor([self.whole], dtype=torch.int64, device="cpu")
            yield Stretch(0, self.nbytes, 0, whole)


class CheckedRange(NamedTuple):
    """Bytes ``[start, stop)`` of ``content``, which are a part of the tensor ``name``.

    ``mapped`` is memory that shows all of the content, if there is such; ``then`` is called when
    they are found to be right.
    """

    name: str
    content: CheckedBytes
    start: int
    stop: int
    mapped: Tensor | None = None
    then: Callable[[], None] | None = None

    @property
    def is_checked(self) -> bool:
        """Return whether there is something to check, and checksums to compare it with."""
        return self.start < self.stop and self.content.can_check(self.start, self.stop)

    def portions(self) -> Iterator[CheckedRange]:
        """Yield the same bytes, some at a time."""
        for start in range(self.start, self.stop, _PORTION_BYTES):
            yield self._replace(start=start, stop=min(self.stop, start + _PORTION_BYTES))

    def read_ahead(self) -> None:
        """Let the system start to read it."""
        if self.mapped is None:
            self.content.read_ahead(self.start, self.stop)
        else:
            read_ahead(self.mapped[self.start : self.stop])


class _Ahead:
    """Bytes that the system is asked to read, ``_AHEAD_BYTES`` before they are checked.

    To ask for all at once takes until most are there, and the sums would have to wait for it.
    """

    def __init__(self, ranges: Sequence[CheckedRange]) -> None:
        self._portions = (portion for one in ranges for portion in one.portions())
        self._missing = _AHEAD_BYTES
        self.passed(0)

    def passed(self, nbytes: int) -> None:
        """Ask for as many bytes as were checked."""
        self._missing += nbytes
        while self._missing > 0 and (portion := next(self._portions, None)) is not None:
            portion.read_ahead()
            self._missing -= portion.stop - portion.start


def _counted(pieces: Iterable[Tensor], passed: Callable[[int], None]) -> Iterator[Tensor]:
    for piece in pieces:
        yield piece
        passed(len(piece))


def check(ranges: Iterable[CheckedRange]) -> None:
    """Raise a ``ValueError`` for the first range that is damaged.

    While bytes are added up, the system reads those behind them. Threads would do no better, and
    their stacks are memory.
    """
    every = [one for one in ranges if one.is_checked]
    ahead = _Ahead(every)
    for one in every:
        one.content.check(one, ahead.passed)
        if one.then is not None:
            one.then()


def _read(file: OpenFile, offset: int, nbytes: int) -> Iterator[Tensor]:
    """Yield bytes of a file in pieces; a piece is shorter where the file ends."""
    buffer = torch.empty(min(nbytes, _AT_ONCE), dtype=torch.uint8, device="cpu")
    for start in range(0, nbytes, _AT_ONCE):
        content = buffer[: min(nbytes - start, _AT_ONCE)]
        view, position = content.numpy().data, 0
        while position < len(view):
            count = os.preadv(file.descriptor, [view[position:]], offset + start + position)
            if not count:
                break
            position += count
        yield content[:position]
