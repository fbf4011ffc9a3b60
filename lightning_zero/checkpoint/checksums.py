"""CRC-32 checksums of what a checkpoint holds: of whole records and of blocks.

A zip archive has one checksum per record, of use only to a reader of the whole record. Files by
this package also have one per block of ``BLOCK_BYTES``, so that a rank that reads a range of a
tensor checks the blocks that the range touches.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

BLOCK_BYTES = 2**17
"""Bytes of a record that share a checksum; the last block of a record may be shorter."""

BLOCK_NBYTES = 4
"""Bytes of the checksum of a block."""

_AT_ONCE = 8 * BLOCK_BYTES


class PartChecksums:
    """Checksums of consecutive bytes of a record, cut at the ends of its blocks."""

    def __init__(self, start: int = 0) -> None:
        self.start, self.nbytes = start, 0
        self.pieces: list[int] = []

    def add(self, content: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(content)
        while view:
            within = (self.start + self.nbytes) % BLOCK_BYTES
            if not within or not self.nbytes:
                self.pieces.append(0)
            piece = view[: BLOCK_BYTES - within]
            self.pieces[-1] = zlib.crc32(piece, self.pieces[-1])
            self.nbytes += len(piece)
            view = view[len(piece) :]


class RecordChecksums(NamedTuple):
    """The checksum of a record, and those of its blocks."""

    whole: int
    blocks: list[int]

    @classmethod
    def of(cls, name: str, nbytes: int, parts: Iterable[PartChecksums]) -> RecordChecksums:
        """Join the checksums of the parts that ranks wrote of a record; raise unless they fit."""
        blocks: list[int] = []
        position = 0
        for part in sorted(parts, key=lambda part: part.start):
            if part.nbytes and part.start != position:
                break
            stop = part.start + part.nbytes
            for piece in part.pieces:
                within = position % BLOCK_BYTES
                size = min(BLOCK_BYTES - within, stop - position)
                if within:
                    blocks[-1] = joined_checksum(blocks[-1], piece, size)
                else:
                    blocks.append(piece)
                position += size
        if position != nbytes:
            raise ValueError(f"the ranks' parts of {name!r} do not fit together at byte {position}")
        whole = 0
        for start, block in zip(range(0, nbytes, BLOCK_BYTES), blocks, strict=True):
            whole = joined_checksum(whole, block, min(BLOCK_BYTES, nbytes - start))
        return cls(whole, blocks)


def encoded_blocks(records: Iterable[RecordChecksums]) -> bytes:
    """Return the checksums of all blocks, record after record."""
    return array("I", [block for record in records for block in record.blocks]).tobytes()


def decoded_blocks(content: bytes, sizes: Iterable[int]) -> list[array[int]]:
    """Return the checksums of the blocks of records, whose ``sizes`` are given, by record."""
    blocks = array("I", content)
    found, position = [], 0
    for nbytes in sizes:
        found.append(blocks[position : position + num_blocks(nbytes)])
        position += num_blocks(nbytes)
    if position != len(blocks):
        raise ValueError(f"it has checksums of {len(blocks)} blocks, not of {position}")
    return found


def num_blocks(nbytes: int) -> int:
    """Return how many blocks a record of ``nbytes`` has."""
    return -(-nbytes // BLOCK_BYTES)


@dataclass(frozen=True)
class CheckedBytes:
    """Bytes of a file, and their checksums.

    ``whole`` is the CRC-32 of all, if the writer did not leave it out; ``blocks`` are those of each
    block, which other programs' files do not have.
    """

    file: Path
    offset: int
    nbytes: int
    whole: int | None
    blocks: Sequence[int] | None = None

    def can_check(self, start: int, stop: int) -> bool:
        """Return whether there are checksums for bytes ``[start, stop)`` alone."""
        is_all = (start, stop) == (0, self.nbytes)
        return self.blocks is not None or (self.whole is not None and is_all)

    def check(self, name: str, start: int, stop: int) -> None:
        """Raise a ``ValueError`` unless bytes ``[start, stop)`` and their blocks are right."""
        with self.opened() as descriptor:
            for first, last, expected in self._units(start, stop):
                if _checksum_of(descriptor, self.offset + first, last - first) != expected:
                    raise ValueError(
                        f"{str(self.file)!r} is damaged: bytes [{first}, {last}) of {name!r}, which"
                        f" begin at byte {self.offset + first} of the file, are not those that were"
                        " written. Load another checkpoint, or another copy of this one"
                    )

    def read_ahead(self, start: int, stop: int) -> None:
        """Let the system start to read bytes ``[start, stop)``, where it can be asked to."""
        if hasattr(os, "posix_fadvise"):
            with self.opened() as descriptor:
                place, advice = self.offset + start, os.POSIX_FADV_WILLNEED
                os.posix_fadvise(descriptor, place, stop - start, advice)

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Open the file, in a context."""
        descriptor = os.open(self.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _units(self, start: int, stop: int) -> Iterator[tuple[int, int, int | None]]:
        if self.blocks is None:
            yield 0, self.nbytes, self.whole
            return
        for index in range(start // BLOCK_BYTES, num_blocks(stop)):
            first = index * BLOCK_BYTES
            yield first, min(first + BLOCK_BYTES, self.nbytes), self.blocks[index]


class CheckedRange(NamedTuple):
    """Bytes ``[start, stop)`` of ``content``, which are a part of the tensor ``name``."""

    name: str
    content: CheckedBytes
    start: int
    stop: int

    @property
    def is_checked(self) -> bool:
        """Return whether there is something to check, and checksums to compare it with."""
        return self.start < self.stop and self.content.can_check(self.start, self.stop)


def check(ranges: Iterable[CheckedRange]) -> None:
    """Raise a ``ValueError`` for the first range that is damaged.

    While one is added up, the system reads the next. Threads would do no better, and their stacks
    are memory.
    """
    every = [one for one in ranges if one.is_checked]
    for one, following in itertools.zip_longest(every, every[1:]):
        if following is not None:
            following.content.read_ahead(following.start, following.stop)
        one.content.check(one.name, one.start, one.stop)


def _checksum_of(descriptor: int, offset: int, nbytes: int) -> int:
    checksum = 0
    while nbytes:
        content = os.pread(descriptor, min(nbytes, _AT_ONCE), offset)
        if not content:
            return -1  # the file ends here
        checksum = zlib.crc32(content, checksum)
        offset, nbytes = offset + len(content), nbytes - len(content)
    return checksum


# -- arithmetic ------------------------------------------------------------------------------------


def joined_checksum(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC-32 of two byte strings in a row, from their CRCs and the second one's length.

    Appending ``n`` zero bytes multiplies a CRC by ``x**(8 n)`` modulo the CRC polynomial (M. Adler,
    ``crc32_combine`` of zlib).
    """
    if second_nbytes == BLOCK_BYTES:
        a, b, c, d = _times_block()
        shifted = a[first & 255] ^ b[first >> 8 & 255] ^ c[first >> 16 & 255] ^ d[first >> 24]
        return shifted ^ second
    return _times(_power_of_x(8 * second_nbytes), first) ^ second


_POLYNOMIAL = 0xEDB88320  # bit-reversed: the highest bit is x**0


@functools.cache
def _times_block() -> list[list[int]]:
    """Return, for each byte of a CRC, its products with ``x**(8 * BLOCK_BYTES)``."""
    power = _power_of_x(8 * BLOCK_BYTES)
    return [[_times(power, byte << shift) for byte in range(256)] for shift in (0, 8, 16, 24)]


def _times(one: int, other: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
    return product


def _power_of_x(exponent: int) -> int:
    result, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            result = _times(square, result)
        square = _times(square, square)
        exponent >>= 1
    return result
