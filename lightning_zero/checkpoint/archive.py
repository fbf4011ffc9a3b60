"""Where every byte of a checkpoint file lies: the zip archive that ``torch.save`` writes.

A checkpoint is a zip of stored (uncompressed) **records**: one pickle, and one record per storage.
All sizes are known before the first byte is written, so the place of every record is arithmetic,
and many processes can write one file::

    header | data.pkl | descriptor header | data/0 | descriptor header | data/1 | ... | directory
           ^ aligned                      ^ aligned

The bytes between two records are a **seam**. A record's checksum is in the descriptor that follows
it, and in the directory at the end, so both are written last. The checksums are those of the zip
format: ``unzip -t`` and :mod:`zipfile` verify them.

The alternative, ``torch.save`` within ``torch.serialization.skip_data``, leaves space in the
same way, but loses tensors inside opaque objects, gives offsets only to readers that unpickle the
file, and leaves wrong checksums.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_ALIGNMENT = 64
"""Bytes to which records are aligned, as in ``torch.save``."""

_SECTOR = 512
_LARGE_BYTES = 2**20
"""Records from this size on are aligned to sectors of disks."""

ROOT = "archive/"
"""The folder in the archive that holds every record; torch takes it from the first record."""

_LIMIT = 0xFFFFFFFF
_UTF8_WITH_DESCRIPTOR = 0x0808
_NEW_YEAR_1980 = 0x0021


class Record(NamedTuple):
    """One member of the archive: its bytes are ``[offset, offset + nbytes)`` of the file."""

    name: str
    nbytes: int
    header_offset: int
    offset: int

    @property
    def stop(self) -> int:
        """One past the record's last byte in the file."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Archive:
    """The records of a file, in file order."""

    records: tuple[Record, ...]

    @classmethod
    def build(cls, sizes: Iterable[tuple[str, int]]) -> Archive:
        """Lay out records of ``(name, nbytes)`` one after another."""
        records: list[Record] = []
        position = 0
        for name, nbytes in sizes:
            record = _placed(ROOT + name, nbytes, position)
            records.append(record)
            position = record.offset + nbytes + _descriptor_nbytes(nbytes)
        return cls(tuple(records))

    def __reduce__(self) -> Any:
        # Places follow from the sizes, so that ranks need not exchange them.
        return Archive.build, (
            [(name.removeprefix(ROOT), size) for name, size, *_ in self.records],
        )

    def seam(self, index: int, checksums: Sequence[int]) -> tuple[int, bytes]:
        """Return offset and content of the seam before a record, or after the last one."""
        start, before = 0, b""
        if index > 0:
            previous = self.records[index - 1]
            start = previous.stop
            before = _descriptor(checksums[index - 1], previous.nbytes)
        if index == len(self.records):
            return start, before + self._directory(start + len(before), checksums)
        record = self.records[index]
        padding = record.offset - record.header_offset - _header_nbytes(record.name)
        return start, before + _header(record.name, record.nbytes, padding)

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        start, content = self.seam(len(self.records), [0] * len(self.records))
        return start + len(content)

    def _directory(self, offset: int, checksums: Sequence[int]) -> bytes:
        entries = b"".join(
            _directory_entry(record, checksum)
            for record, checksum in zip(self.records, checksums, strict=True)
        )
        count, nbytes = len(self.records), len(entries)
        end64 = struct.pack(
            "<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, nbytes, offset
        )
        locator = struct.pack("<4sIQI", b"PK\6\7", 0, offset + nbytes, 1)
        few, small, near = min(count, 0xFFFF), min(nbytes, _LIMIT), min(offset, _LIMIT)
        end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, few, few, small, near, 0)
        is_large = (few, small, near) != (count, nbytes, offset)
        return entries + (end64 + locator if is_large else b"") + end


def _placed(name: str, nbytes: int, position: int) -> Record:
    """Return the record whose header begins at ``position``."""
    alignment = _SECTOR if nbytes >= _LARGE_BYTES else _ALIGNMENT
    least = position + _header_nbytes(name)
    return Record(name, nbytes, position, -(-least // alignment) * alignment)


def _header_nbytes(name: str) -> int:
    """Return the size of a header without padding."""
    return _HEADER.size + len(name.encode()) + 4


def _descriptor_nbytes(nbytes: int) -> int:
    return 24 if nbytes >= _LIMIT else 16


_HEADER = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR = struct.Struct("<4sIII")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")


def _header(name: str, nbytes: int, padding: int) -> bytes:
    """Return a local header; sizes and checksum are in the descriptor."""
    # The extra field has a header of four bytes, which is there even without padding.
    extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    needed = 45 if nbytes >= _LIMIT else 20
    fields = (needed, _UTF8_WITH_DESCRIPTOR, 0, 0, _NEW_YEAR_1980, 0, 0, 0, len(name), len(extra))
    return _HEADER.pack(b"PK\3\4", *fields) + name.encode() + extra


def _descriptor(checksum: int, nbytes: int) -> bytes:
    if nbytes >= _LIMIT:
        return struct.pack("<4sIQQ", b"PK\7\x08", checksum, nbytes, nbytes)
    return _DESCRIPTOR.pack(b"PK\7\x08", checksum, nbytes, nbytes)


def _directory_entry(record: Record, checksum: int) -> bytes:
    far = [value for value in (record.nbytes,) * 2 if value >= _LIMIT]
    far += [record.header_offset] if record.header_offset >= _LIMIT else []
    extra = struct.pack(f"<HH{len(far)}Q", 1, 8 * len(far), *far) if far else b""
    needed = 45 if far else 20
    size, place = min(record.nbytes, _LIMIT), min(record.header_offset, _LIMIT)
    fields = (needed, needed, _UTF8_WITH_DESCRIPTOR, 0, 0, _NEW_YEAR_1980, checksum, size, size)
    rest = (len(record.name), len(extra), 0, 0, 0, 0, place)
    head = _ENTRY.pack(b"PK\1\2", *fields, *rest)
    return head + record.name.encode() + extra


def joined_checksum(parts: Sequence[tuple[int, int, int]], nbytes: int) -> int:
    """Return the CRC-32 of a record of ``nbytes``, given start, size and CRC of its parts.

    Appending ``n`` zero bytes multiplies a CRC by ``x**(8 n)`` modulo the CRC polynomial (M. Adler,
    ``crc32_combine`` of zlib).

    Raises:
        ValueError: The parts do not form the record.
    """
    whole = position = 0
    for start, size, checksum in sorted(parts):
        if start != position:
            break
        whole = (_times(_power_of_x(8 * size), whole) if whole else 0) ^ checksum
        position += size
    if position != nbytes or sum(size for _, size, _ in parts) != nbytes:
        raise ValueError(f"the parts of a record of {nbytes} bytes do not join at byte {position}")
    return whole


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
