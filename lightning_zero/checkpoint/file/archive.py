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

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_zero.tensors import SECTOR

_ALIGNMENT = 64
"""Bytes to which records are aligned, as in ``torch.save``."""

_LARGE_BYTES = 2**20
"""Records from this size on are aligned to sectors, for direct I/O."""

ROOT = "archive/"
"""The folder in the archive that holds every record; torch takes it from the first record."""

_LIMIT = 0xFFFFFFFF
_UTF8_WITH_DESCRIPTOR = 0x0808
_NEW_YEAR_1980 = 0x0021


@dataclass(frozen=True)
class Record:
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
            least = position + len(_header(ROOT + name, nbytes, 0))
            alignment = SECTOR if nbytes >= _LARGE_BYTES else _ALIGNMENT
            offset = -(-least // alignment) * alignment
            records.append(Record(ROOT + name, nbytes, position, offset))
            position = records[-1].stop + len(_descriptor(0, nbytes))
        return cls(tuple(records))

    def with_record(self, name: str, nbytes: int) -> Archive:
        """Return the same archive with one more record at the end."""
        sizes = [(record.name.removeprefix(ROOT), record.nbytes) for record in self.records]
        return Archive.build([*sizes, (name, nbytes)])

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
        bare = len(_header(record.name, record.nbytes, 0))
        padding = record.offset - record.header_offset - bare
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


def _header(name: str, nbytes: int, padding: int) -> bytes:
    """Return a local header; sizes and checksum are in the descriptor."""
    # The extra field has a header of four bytes, which is there even without padding.
    extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    needed = 45 if nbytes >= _LIMIT else 20
    fields = (needed, _UTF8_WITH_DESCRIPTOR, 0, 0, _NEW_YEAR_1980, 0, 0, 0, len(name), len(extra))
    return struct.pack("<4sHHHHHIIIHH", b"PK\3\4", *fields) + name.encode() + extra


def _descriptor(checksum: int, nbytes: int) -> bytes:
    sizes = "QQ" if nbytes >= _LIMIT else "II"
    return struct.pack(f"<4sI{sizes}", b"PK\7\x08", checksum, nbytes, nbytes)


def _directory_entry(record: Record, checksum: int) -> bytes:
    far = [value for value in (record.nbytes,) * 2 if value >= _LIMIT]
    far += [record.header_offset] if record.header_offset >= _LIMIT else []
    extra = struct.pack(f"<HH{len(far)}Q", 1, 8 * len(far), *far) if far else b""
    needed = 45 if far else 20
    size, place = min(record.nbytes, _LIMIT), min(record.header_offset, _LIMIT)
    fields = (needed, needed, _UTF8_WITH_DESCRIPTOR, 0, 0, _NEW_YEAR_1980, checksum, size, size)
    rest = (len(record.name), len(extra), 0, 0, 0, 0, place)
    head = struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", *fields, *rest)
    return head + record.name.encode() + extra
