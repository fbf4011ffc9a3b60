"""Reading the records of a ``torch.save`` archive, with their checksums."""

from __future__ import annotations

import struct
import zipfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_zero.checkpoint.checksums import PartChecksums, decoded_blocks
from lightning_zero.checkpoint.file.format import CHECKSUMS
from lightning_zero.checkpoint.open_file import OpenFile
from lightning_zero.checkpoint.stored_bytes import StoredBytes
from lightning_zero.checkpoint.word_sums import BLOCK_BYTES


def has_checksums(archive: zipfile.ZipFile) -> bool:
    """Return whether the writer left checksums; torch can be told not to."""
    return any(info.CRC for info in archive.infolist())


def read_record(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Return the content of a record; raise a ``BadZipFile`` if it is damaged."""
    if has_checksums(archive):
        return archive.read(info)
    assert archive.fp is not None
    offset = content_offset(archive, info)
    archive.fp.seek(offset)
    return archive.fp.read(info.file_size)


def check_small_records(archive: zipfile.ZipFile) -> None:
    """Raise a ``BadZipFile`` if a record other than a storage is damaged, above all the pickle."""
    for info in archive.infolist():
        if not _is_storage(info):
            read_record(archive, info)


class StoredRecords:
    """The storages of a file, with the checksums that it has; an iterable of their bytes."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        infos = [info for info in archive.infolist() if _name(info) != CHECKSUMS]
        parts: Sequence[Sequence[PartChecksums]] = [()] * len(infos)
        for info in archive.infolist()[len(infos) :]:  # the last one, if there is one
            parts = decoded_blocks(archive.read(info), [other.file_size for other in infos])
        self._path, self._archive, self._file = path, archive, OpenFile(path)
        self._has_whole = has_checksums(archive)
        self._infos = sorted(
            (
                (info.header_offset, info, of_record)
                for info, of_record in zip(infos, parts, strict=True)
                if _is_storage(info) and info.compress_type == zipfile.ZIP_STORED
            ),
            key=lambda one: one[0],
        )
        self._starts = [start for start, *_ in self._infos]

    def __iter__(self) -> Iterator[StoredBytes]:
        for index, (_, info, _) in enumerate(self._infos):
            yield self._bytes(index, content_offset(self._archive, info))

    @property
    def num_filled(self) -> int:
        """The number of storages that are not empty."""
        return sum(info.file_size > 0 for _, info, _ in self._infos)

    def at(self, place: int, nbytes: int) -> StoredBytes | None:
        """Return the storage of this size whose content begins at a place of the file."""
        index = bisect_right(self._starts, place) - 1
        if index < 0 or self._infos[index][1].file_size != nbytes:
            return None
        return self._bytes(index, place)

    def _bytes(self, index: int, place: int) -> StoredBytes:
        _, info, parts = self._infos[index]
        # A single CRC may be 0; in a file without checksums all are.
        whole = info.CRC if self._has_whole else None
        if whole is not None and info.file_size <= BLOCK_BYTES:
            parts = ()  # it is read whole, and checked sooner than its blocks are found
        return StoredBytes(self._path, place, info.file_size, whole, parts, self._file)


def stored_record(
    path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, offset: int
) -> StoredBytes:
    """Return the bytes of a record of an archive that begins at ``offset`` of a file."""
    place = offset + content_offset(archive, info)
    # A single CRC may be 0; in a file without checksums all are.
    whole = info.CRC if has_checksums(archive) else None
    return StoredBytes(path, place, info.file_size, whole)


def content_offset(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> int:
    """Return where the bytes of a record begin in the archive, after its header."""
    assert archive.fp is not None
    archive.fp.seek(record.header_offset + 26)
    name, extra = struct.unpack("<HH", archive.fp.read(4))
    return int(record.header_offset) + 30 + int(name) + int(extra)


def _name(info: zipfile.ZipInfo) -> str:
    """Return a record's name without the archive's root folder."""
    return info.filename.partition("/")[2]


def _is_storage(info: zipfile.ZipInfo) -> bool:
    return info.filename.find("/data/") == info.filename.find("/")
