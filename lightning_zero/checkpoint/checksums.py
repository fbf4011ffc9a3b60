"""Checksums of a checkpoint's content: of whole records and of blocks.

A zip archive has one checksum per record (CRC-32), which is slow to compute and useful only to a
reader of the whole record. Files by this package also have one per block of ``BLOCK_BYTES``, so
that a rank that reads a range of a tensor checks only the blocks that the range touches. Blocks are
counted from the start of each **part** that one rank wrote, so that no block is shared between
ranks. Whole blocks have a sum of words (``word_sums.py``); shorter ones, at the ends of parts, have
a CRC. Consecutive whole blocks are read and summed together, in a **run**::

    record   part of rank 0                         | part of rank 1
    blocks   block 0 | block 1 | block 2 | short 3  | block 0 | short 1
    runs     one of three blocks         | one      | one     | one
"""

from __future__ import annotations

import functools
import itertools
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lightning_zero.checkpoint.word_sums import BLOCK_BYTES, word_sums


class PartChecksums(NamedTuple):
    """Checksums of bytes ``[start, start + nbytes)`` of a record, a part that one rank wrote.

    Attributes:
        start: Where the part begins in the record.
        nbytes: Its size.
        whole: The CRC of all of it; 0 once it is in a file, which has only the record's.
        blocks: The checksums of its blocks, numbers of 64 bits.
    """

    start: int
    nbytes: int
    whole: int
    blocks: array[int] | memoryview

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


class Run(NamedTuple):
    """Consecutive blocks of a record, bytes ``[start, stop)``, and their expected checksums."""

    start: int
    stop: int
    expected: array[int] | memoryview

    def damage_in(self, content: memoryview) -> tuple[int, int] | None:
        """Return the first damaged range of these bytes, given what was read; ``None`` if intact.

        ``content`` is writable, as torch wants the memory of its tensors.
        """
        if len(content) % BLOCK_BYTES:  # a short block, which is always alone
            is_intact = zlib.crc32(content) == self.expected[0]
            return None if is_intact else (self.start, self.stop)
        found = word_sums(content).tolist()
        if found == list(self.expected):
            return None
        pairs = zip(found, self.expected, strict=True)
        first = next(number for number, (one, other) in enumerate(pairs) if one != other)
        return self.start + first * BLOCK_BYTES, self.start + (first + 1) * BLOCK_BYTES


_MOST_BLOCKS = 32
"""The most blocks of a run, 2 MiB: its bytes are still in the cache when they are summed."""


def runs(parts: Iterable[PartChecksums], start: int, stop: int) -> Iterator[Run]:
    """Yield the blocks that bytes ``[start, stop)`` of a record touch, in order.

    A block that is touched only in part, or that is short, is a run of its own.
    """
    for part in parts:
        end = part.start + part.nbytes
        if end <= start or stop <= part.start:
            continue
        number = max(0, start - part.start) // BLOCK_BYTES
        limit = -(-(min(stop, end) - part.start) // BLOCK_BYTES)
        while number < limit:
            begin = part.start + number * BLOCK_BYTES
            num_inside = (min(stop, end) - begin) // BLOCK_BYTES if begin >= start else 0
            count = min(max(num_inside, 1), _MOST_BLOCKS)
            last = min(begin + count * BLOCK_BYTES, end)
            yield Run(begin, last, part.blocks[number : number + count])
            number += count


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


def decoded_blocks(content: bytes, sizes: Iterable[int]) -> list[list[PartChecksums]]:
    """Decode the parts of each record and their block checksums, given the records' ``sizes``."""
    numbers = memoryview(content).cast("q")
    found, position = [], 0
    for nbytes in sizes:
        num_parts = numbers[position] if position < len(numbers) else -1
        starts = numbers[position + 1 : position + 1 + max(num_parts, 0)].tolist()
        position += 1 + num_parts
        if num_parts < 0 or len(starts) != num_parts:
            raise ValueError("its block checksums do not match its records")
        parts = []
        for start, stop in itertools.pairwise([*starts, nbytes]):
            if start > stop:
                raise ValueError("its block checksums do not match its records")
            count = -(-(stop - start) // BLOCK_BYTES)
            sums = numbers[position : position + count]
            parts.append(PartChecksums(start, stop - start, 0, sums))
            position += count
        found.append(parts)
    if position != len(numbers):
        raise ValueError(f"its block checksums have {len(numbers)} numbers; expected {position}")
    return found


# -- CRC-32 of concatenated byte strings, without the bytes ----------------------------------------


def joined_checksum(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC-32 of two concatenated byte strings, given their CRCs and the second's length.

    Appending ``n`` zero bytes multiplies a CRC by ``x**(8 n)`` modulo the CRC polynomial (M. Adler,
    ``crc32_combine`` of zlib).
    """
    if not first:
        return second
    return _times(_power_of_x(8 * second_nbytes), first) ^ second


_POLYNOMIAL = 0xEDB88320  # bit-reversed: the highest bit is x**0


def _times(one: int, other: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
    return product


@functools.lru_cache(4096)
def _power_of_x(exponent: int) -> int:
    result, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            result = _times(square, result)
        square = _times(square, square)
        exponent >>= 1
    return result
