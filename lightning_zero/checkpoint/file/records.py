"""Reading the records of a ``torch.save`` archive, with their checksums."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_zero.checkpoint.checksums import Blocks, CheckedBytes, decoded_blocks
from lightning_zero.checkpoint.file.format import CHECKSUMS


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


def stored_records(path: Path, archive: zipfile.ZipFile) -> Iterator[CheckedBytes]:
    """Yield the storages of a file, with the checksums that it has."""
    infos = [info for info in archive.infolist() if _name(info) != CHECKSUMS]
    blocks: Sequence[Blocks | None] = [None] * len(infos)
    for info in archive.infolist():
        if _name(info) == CHECKSUMS:
            blocks = decoded_blocks(archive.read(info), [other.file_size for other in infos])
    for info, of_record in zip(infos, blocks, strict=True):
        if _is_storage(info) and info.compress_type == zipfile.ZIP_STORED:
            yield checked_record(path, archive, info, 0, of_record)


def checked_record(
    path: Path,
    archive: zipfile.ZipFile,
    info: zipfile.ZipInfo,
    offset: int,
    blocks: Blocks | None,
) -> CheckedBytes:
    """Return the bytes of a record of an archive that begins at ``offset`` of a file."""
    if blocks is not None and not blocks.fit(info.file_size):
        raise ValueError(f"its block checksums do not match the size of {info.filename!r}")
    place = offset + content_offset(archive, info)
    # A single CRC may be 0; in a file without checksums all are.
    whole = info.CRC if info.CRC or has_checksums(archive) else None
    return CheckedBytes(path, place, info.file_size, whole, blocks)


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
    return _name(info).startswith("data/")
