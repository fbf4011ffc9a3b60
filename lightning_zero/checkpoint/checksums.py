"""Checksums of a checkpoint's content: of whole records and of blocks.

A zip archive has one checksum per record (CRC-32), which is slow to compute and useful only to a
reader of the whole record. Files by this package also have one per block of ``BLOCK_BYTES``, so
that a rank that reads a range of a tensor checks only the blocks that the range touches. Blocks are
counted from the start of each part that one rank wrote, so that no block is shared between ranks.
Whole blocks have a sum of words (``word_sums.py``); shorter ones, at the ends of parts, have a CRC.
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

_AT_ONCE = 64 * BLOCK_BYTES
_PORTION_BYTES = 4 * _AT_ONCE
_AHEAD_BYTES = 2**28


class PartChecksums(NamedTuple):
    """Checksums of bytes ``[start, start + nbytes)`` of a record: of all, and of each block."""

    start: int
    nbytes: int
    whole: int
    blocks: array[int]

    @classmethod
    def of_short(cls, start: int, content: bytes | memoryview) -> PartChecksums:
        """Return the checksums of less than a block, which one CRC is enough for."""
        checksum = zlib.crc32(content)
        return cls(start, len(content), checksum, array("q", [checksum] if len(content) else []))


def encoded_parts(parts: Iterable[tuple[int, PartChecksums]]) -> bytes:
    """Encode parts of records with the records' numbers; as objects, they take long to send."""
    content = array("q")
    for number, (start, nbytes, whole, blocks) in parts:
        content.extend((number, start, nbytes, whole, len(blocks)))
        content.extend(blocks)
    return content.tobytes()


def decoded_parts(content: bytes) -> Iterator[tuple[int, PartChecksums]]:
    """Yield what :func:`encoded_parts` encoded."""
    numbers, position = array("q", content), 0
    while position < len(numbers):
        number, start, nbytes, whole, num_blocks = numbers[position : position + 5]
        position += 5 + num_blocks
        yield number, PartChecksums(start, nbytes, whole, numbers[position - num_blocks : position])


class PartSummer:
    """Incremental checksums of consecutive bytes of a record."""

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
        """Complete the block that was begun, and return the bytes after it."""
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
        """The checksums of all bytes added so far."""
        short = [zlib.crc32(self._rest)] if self._rest else []
        return PartChecksums(
            self._start, self._nbytes, self._whole, self._blocks + array("q", short)
        )


class Blocks(NamedTuple):
    """The checksums of the blocks of a record.

    Attributes:
        starts: Where the record's parts begin.
        sums: The checksums of each part's blocks, numbers of 64 bits.
    """

    starts: Sequence[int]
    sums: Sequence[memoryview]

    @classmethod
    def of(cls, sums: Sequence[int]) -> Blocks:
        """Return the checksums of a record that has one part."""
        return cls([0], [memoryview(array("q", sums))])

    def fit(self, nbytes: int) -> bool:
        """Return whether the number of checksums is right for a record of ``nbytes``."""
        if len(self.starts) == len(self.sums) == 1:
            size = nbytes - self.starts[0]
            return size >= 0 and len(self.sums[0]) == -(-size // BLOCK_BYTES)
        stops = [*self.starts[1:], nbytes]
        parts = zip(self.starts, stops, self.sums, strict=True)
        return all(
            start <= stop and len(sums) == -(-(stop - start) // BLOCK_BYTES)
            for start, stop, sums in parts
        )

    def touched(self, start: int, stop: int, nbytes: int) -> Iterator[Stretch]:
        """Yield the blocks that bytes ``[start, stop)`` of a record of ``nbytes`` touch."""
        for index in range(bisect_right(self.starts, start) - 1, len(self.starts)):
            base, end = self.starts[index], [*self.starts[index + 1 : index + 2], nbytes][0]
            if base >= stop:
                return
            first = max(0, start - base) // BLOCK_BYTES
            last = -(-(min(stop, end) - base) // BLOCK_BYTES)
            num_whole = (end - base) // BLOCK_BYTES
            sums, to = self.sums[index], min(last, num_whole)
            if first < to:
                whole = base + first * BLOCK_BYTES, base + to * BLOCK_BYTES
                yield Stretch(*whole, sums[first:to])
            if num_whole < last:
                yield Stretch(base + num_whole * BLOCK_BYTES, end, sums[num_whole:], is_crc=True)


class Stretch(NamedTuple):
    """Bytes ``[start, stop)`` of a record, and their expected checksums.

    ``expected`` is one sum of words per block, or, if ``is_crc``, one CRC of all bytes.
    """

    start: int
    stop: int
    expected: memoryview
    is_crc: bool = False

    def damage_in(self, pieces: Iterable[Tensor]) -> tuple[int, int] | None:
        """Return the first damaged range of these bytes, whose content comes in ``pieces``.

        If there are blocks, every piece has whole ones; the last may be shorter if the file ends.
        """
        if self.is_crc:
            checksum = 0
            for piece in pieces:
                checksum = zlib.crc32(piece.numpy().data, checksum)
            return None if checksum == self.expected[0] else (self.start, self.stop)
        sums = []
        for piece in pieces:
            if not len(piece) or len(piece) % BLOCK_BYTES:
                return self.start, self.stop
            sums.append(word_sums(piece.numpy().data))
        found, expected = torch.cat(sums), torch.frombuffer(self.expected, dtype=torch.int64)
        if torch.equal(found, expected):
            return None
        if len(found) != len(expected):
            return self.start, self.stop
        first = self.start + int((found != expected).nonzero()[0]) * BLOCK_BYTES
        return first, first + BLOCK_BYTES


class RecordChecksums(NamedTuple):
    """The checksum of a record, and the checksums of its parts."""

    whole: int
    parts: Sequence[PartChecksums]

    @classmethod
    def of(cls, name: str, nbytes: int, parts: Iterable[PartChecksums]) -> RecordChecksums:
        """Join the checksums of the parts that ranks wrote; raise unless they form the record."""
        ordered = [part for part in parts if part.nbytes]
        if len(ordered) == 1 and not ordered[0].start and ordered[0].nbytes == nbytes:
            return cls(ordered[0].whole, ordered)  # most are of one rank
        ordered.sort(key=lambda part: part.start)
        position = whole = 0
        for part in ordered:
            if part.start != position:
                break
            whole = joined_checksum(whole, part.whole, part.nbytes)
            position += part.nbytes
        if position != nbytes or any(part.start >= position for part in ordered):
            raise ValueError(f"the ranks' parts of {name!r} do not join at byte {position}")
        return cls(whole, ordered)


def encoded_blocks(records: Iterable[RecordChecksums]) -> bytes:
    """Encode all block checksums: per record the number of parts, their starts, their sums."""
    content = array("q")
    for record in records:
        content.append(len(record.parts))
        content.extend(part.start for part in record.parts)
        for part in record.parts:
            content.extend(part.blocks)
    return content.tobytes()


def decoded_blocks(content: bytes, sizes: Iterable[int]) -> list[Blocks]:
    """Decode the block checksums of each record, given the ``sizes`` of the records."""
    # Writable, as torch wants the memory of its tensors.
    numbers = memoryview(bytearray(content)).cast("q")
    found, position = [], 0
    for nbytes in sizes:
        num_parts = numbers[position] if position < len(numbers) else -1
        starts = numbers[position + 1 : position + 1 + max(num_parts, 0)].tolist()
        position += 1 + num_parts
        if num_parts < 0 or len(starts) != num_parts:
            raise ValueError("its block checksums do not match its records")
        sums = []
        for start, stop in itertools.pairwise([*starts, nbytes]):
            if start > stop:
                raise ValueError("its block checksums do not match its records")
            count = -(-(stop - start) // BLOCK_BYTES)
            sums.append(numbers[position : position + count])
            position += count
        found.append(Blocks(starts or [0], sums or [numbers[:0]]))
    if position != len(numbers):
        raise ValueError(f"its block checksums have {len(numbers)} numbers; expected {position}")
    return found


@dataclass(frozen=True)
class CheckedBytes:
    """Bytes of a file, and their checksums.

    ``whole`` is the CRC-32 of all bytes, ``None`` if the writer left it out. ``blocks`` are the
    checksums of blocks, which only this package writes. Without a ``kept`` file, each use opens it.
    """

    file: Path
    offset: int
    nbytes: int
    whole: int | None
    blocks: Blocks | None = None
    kept: OpenFile | None = field(default=None, compare=False, repr=False)

    def can_check(self, start: int, stop: int) -> bool:
        """Return whether bytes ``[start, stop)`` can be checked without reading others."""
        is_all = (start, stop) == (0, self.nbytes)
        return self.blocks is not None or (self.whole is not None and is_all)

    def check(self, each: CheckedRange, passed: Callable[[int], None]) -> None:
        """Raise a ``ValueError`` if the blocks that a range touches are damaged.

        Mapped memory, if any, is checked first: that needs no copy, and a later copy finds its
        pages resident. If it does not match, a hook may have edited it, so the file decides.
        ``passed`` is called with the number of bytes read.
        """
        name, mapped = each.name, each.mapped
        for stretch in self._stretches(each.start, each.stop):
            if mapped is not None:
                shown = [mapped[stretch.start : stretch.stop]]
                if stretch.stop - stretch.start > _PORTION_BYTES:
                    shown = [*torch.split(shown[0], _PORTION_BYTES)]
                if stretch.damage_in(_counted(shown, passed)) is None:
                    continue
            place, nbytes = self.offset + stretch.start, stretch.stop - stretch.start
            damage = stretch.damage_in(_counted(_read(self.opened(), place, nbytes), passed))
            if damage is not None:
                raise ValueError(
                    f"{str(self.file)!r} is damaged: bytes [{damage[0]}, {damage[1]}) of {name!r},"
                    f" which start at byte {self.offset + damage[0]} of the file, do not match"
                    " their checksum. Load another checkpoint or another copy of this one"
                )

    def read_ahead(self, start: int, stop: int) -> None:
        """Ask the system to start reading bytes ``[start, stop)``, if it can be asked."""
        if hasattr(os, "posix_fadvise"):
            place, advice = self.offset + start, os.POSIX_FADV_WILLNEED
            file = self.opened()
            os.posix_fadvise(file.descriptor, place, stop - start, advice)

    def opened(self) -> OpenFile:
        """Return the kept file, or open the file until the returned object is collected."""
        return self.kept or OpenFile(self.file)

    def _stretches(self, start: int, stop: int) -> Iterator[Stretch]:
        if self.blocks is not None:
            yield from self.blocks.touched(start, stop, self.nbytes)
        else:
            whole = memoryview(array("q", [self.whole or 0]))
            yield Stretch(0, self.nbytes, whole, is_crc=True)


class CheckedRange(NamedTuple):
    """Bytes ``[start, stop)`` of ``content``, which are a part of the tensor ``name``.

    ``mapped`` is memory that maps all of the content, if any. ``then`` is called after a successful
    check.
    """

    name: str
    content: CheckedBytes
    start: int
    stop: int
    mapped: Tensor | None = None
    then: Callable[[], None] | None = None

    @property
    def is_checked(self) -> bool:
        """Return whether there are bytes to check, and checksums to check them against."""
        return self.start < self.stop and self.content.can_check(self.start, self.stop)

    def portions(self) -> Iterator[CheckedRange]:
        """Yield the same bytes in portions of at most ``_PORTION_BYTES``."""
        for start in range(self.start, self.stop, _PORTION_BYTES):
            yield self._replace(start=start, stop=min(self.stop, start + _PORTION_BYTES))

    def read_ahead(self) -> None:
        """Ask the system to start reading the bytes."""
        if self.mapped is None:
            self.content.read_ahead(self.start, self.stop)
        else:
            read_ahead(self.mapped[self.start : self.stop])


class _Ahead:
    """Read-ahead that stays ``_AHEAD_BYTES`` in front of the check.

    Asking for everything at once blocks until most of it has been read, which delays the sums.
    """

    def __init__(self, ranges: Sequence[CheckedRange]) -> None:
        self._portions = (portion for one in ranges for portion in one.portions())
        self._missing = _AHEAD_BYTES
        self.passed(0)

    def passed(self, nbytes: int) -> None:
        """Ask for as many more bytes as were checked."""
        self._missing += nbytes
        while self._missing > 0 and (portion := next(self._portions, None)) is not None:
            portion.read_ahead()
            self._missing -= portion.stop - portion.start


def _counted(pieces: Iterable[Tensor], passed: Callable[[int], None]) -> Iterator[Tensor]:
    for piece in pieces:
        yield piece
        passed(len(piece))


def check(ranges: Iterable[CheckedRange]) -> None:
    """Raise a ``ValueError`` for the first damaged range.

    While bytes are summed, the system reads those after them. Threads would be no faster, and their
    stacks take memory.
    """
    every = [one for one in ranges if one.is_checked]
    ahead = _Ahead(every)
    for one in every:
        one.content.check(one, ahead.passed)
        if one.then is not None:
            one.then()


def _read(file: OpenFile, offset: int, nbytes: int) -> Iterator[Tensor]:
    """Yield bytes of a file in pieces, each overwritten by the next; short where the file ends."""
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
