"""One plain file from all ranks by way of rank 0, record after record.

For disks that the ranks do not share, and for places that are no files (``memory://``, ``s3://``).
The bytes are those of the file that all ranks write together.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import fsspec
import torch
from torch import Tensor

from lightning_zero.checkpoint.checksums import PartChecksums, RecordChecksums, encoded_blocks
from lightning_zero.checkpoint.file.archive import Archive
from lightning_zero.checkpoint.file.atomic import TemporaryFile, target_of
from lightning_zero.checkpoint.values.chunk import BUFFER_BYTES
from lightning_zero.comm import Control, Outcome

Append = Callable[[bytes | memoryview], object]


def write_stream(
    path: str,
    archive: Archive,
    parts: Iterable[bytes | Tensor],
    sizes: Sequence[Sequence[int]],
    comm: Control,
) -> Outcome:
    """Write the file on rank 0, which receives the other ranks' parts one message at a time.

    Args:
        path: The final name.
        archive: Where every record lies.
        parts: This rank's part of every record but the last, made when its turn has come.
        sizes: For every rank, the bytes of its parts.
        comm: The ranks.
    """
    outcome = Outcome()
    content = _content(archive, parts, sizes, comm)
    if comm.rank == 0:
        with outcome.attempt(), _opened(path) as append:
            for chunk in content:
                append(chunk)
    # After an error the rest is received all the same: the other ranks are sending.
    for _ in content:
        pass
    return outcome


def _content(
    archive: Archive,
    parts: Iterable[bytes | Tensor],
    sizes: Sequence[Sequence[int]],
    comm: Control,
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the file on rank 0; send this rank's parts on the others."""
    checksums: list[int] = []
    found: list[RecordChecksums] = []
    for index, part in enumerate(parts):
        if comm.rank == 0:
            yield archive.seam(index, checksums)[1]
        part_checksums = PartChecksums()
        for chunk in _record(part, [of_rank[index] for of_rank in sizes], comm):
            part_checksums.add(chunk)
            yield chunk
        if comm.rank == 0:
            record = archive.records[index]
            found.append(RecordChecksums.of(record.name, record.nbytes, [part_checksums]))
            checksums.append(found[-1].whole)
    if comm.rank == 0:
        blocks = encoded_blocks(found)
        yield archive.seam(len(checksums), checksums)[1] + blocks
        checksums.append(zlib.crc32(blocks))
        yield archive.seam(len(checksums), checksums)[1]


def _record(part: bytes | Tensor, sizes: Sequence[int], comm: Control) -> Iterator[memoryview]:
    if isinstance(part, bytes):
        yield memoryview(part)
        return
    for _, message in comm.collect(part, sizes):
        yield from (chunk.to("cpu").numpy().data for chunk in torch.split(message, BUFFER_BYTES))


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Append]:
    """Open a place to append to, which gets its name when the context ends without an error."""
    target = target_of(path)
    if isinstance(target, Path):
        temporary = TemporaryFile(target)
        try:
            with os.fdopen(os.dup(temporary.descriptor), "wb") as file:
                yield file.write
            temporary.keep()
        finally:
            temporary.close()
        return
    file_system, url = fsspec.core.url_to_fs(path)
    file_system.makedirs(os.path.dirname(url), exist_ok=True)
    # A transaction shows the file under its name only when it is complete.
    with file_system.transaction, file_system.open(url, "wb") as file:
        yield lambda chunk: file.write(bytes(chunk))
