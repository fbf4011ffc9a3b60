"""Saving to the plain file that ``torch.save`` would have written.

Rank 0 works out where every record lies and creates the file at its full size. Each rank writes its
ranges of sharded values to their places. Rank 0 also writes the rest, and at last the checksums:
those of records in the seams between them, those of blocks in a record of their own.

If the ranks share no disk, or the target is not a file (``memory://``, ``s3://``), rank 0 writes
the same bytes, record after record, and the others send it their parts.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import torch
from torch import Tensor
from typing_extensions import override

from lightning_zero.checkpoint.checksums import (
    PartChecksums,
    PartSummer,
    RecordChecksums,
    decoded_parts,
    encoded_blocks,
    encoded_parts,
)
from lightning_zero.checkpoint.file.archive import Archive
from lightning_zero.checkpoint.file.atomic import Temporary, target_of
from lightning_zero.checkpoint.file.format import CHECKSUMS, PROVENANCE
from lightning_zero.checkpoint.file.skeleton import Content, Skeleton, size_of
from lightning_zero.checkpoint.file.writer import Writer, write_at
from lightning_zero.checkpoint.save import Save
from lightning_zero.checkpoint.values.places import BUFFER_BYTES
from lightning_zero.checkpoint.values.sharded_value import ShardedValue
from lightning_zero.comm import Outcome

log = logging.getLogger(__name__)

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class _Layout(NamedTuple):
    """The records of a file, and the keys of the sharded ones; rank 0 has the others.

    A record with their block checksums follows, whose size is known only at the end.
    """

    archive: Archive
    keys: dict[int, str]


class FileSave(Save):
    """A save to one plain file; ``path`` may be an ``fsspec`` URL."""

    _skeleton: Skeleton

    @override
    def _take(self, checkpoint: Any) -> None:
        self._skeleton = Skeleton.of(checkpoint)

    @override
    def _copy_to_host(self) -> None:
        self._skeleton = self._skeleton.copied_to_host()
        for name in ("_values", "_records"):
            vars(self).pop(name, None)

    @functools.cached_property
    def _values(self) -> dict[str, ShardedValue]:
        return self._skeleton.sharded_values()

    @property
    @override
    def values(self) -> dict[str, ShardedValue]:
        return self._values

    @functools.cached_property
    def _records(self) -> list[tuple[str, Content]]:
        return self._skeleton.records((PROVENANCE, self.provenance.encoded()))

    @override
    def _layout(self) -> _Layout:
        records = self._records
        archive = Archive.build([(name, size_of(content)) for name, content in records])
        keys = {
            index: content.key
            for index, (_, content) in enumerate(records)
            if isinstance(content, ShardedValue)
        }
        return _Layout(archive, keys)

    @override
    def _create(self, layout: _Layout) -> Temporary | None:
        target = target_of(self.path)
        return Temporary(target, layout.archive.nbytes) if isinstance(target, Path) else None

    def _parts(self, layout: _Layout) -> Iterator[tuple[int, bytes | Tensor]]:
        """Yield, for every record, where this rank's part begins in it, and the part."""
        values = self.values
        records = self._records if self.control.rank == 0 else []
        for index in range(len(layout.archive.records)):
            if index in layout.keys:
                value = values[layout.keys[index]]
                yield value.start_byte, value.part_bytes if value.part.numel() else _NOTHING
            else:
                content: Any = records[index][1] if records else b""
                yield 0, content

    @override
    def _write(self, layout: _Layout, place: Path) -> list[bytes]:
        shares: list[tuple[int, PartChecksums]] = []
        with Writer(place, self.on_written) as writer:
            for index, (start, part) in enumerate(self._parts(layout)):
                if len(part):
                    offset = layout.archive.records[index].offset
                    shares.append((index, writer.write(offset + start, part, start)))
            writer.sync()
        return [encoded_parts(shares)]

    @override
    def _seal(self, layout: _Layout, temporary: Temporary, shares: Sequence[bytes]) -> None:
        parts: list[list[PartChecksums]] = [[] for _ in layout.archive.records]
        for of_rank in shares:
            for number, checksums in decoded_parts(of_rank):
                parts[number].append(checksums)
        records = [
            RecordChecksums.of(record.name, record.nbytes, of_record)
            for record, of_record in zip(layout.archive.records, parts, strict=True)
        ]
        blocks = encoded_blocks(records)
        archive = layout.archive.with_record(CHECKSUMS, len(blocks))
        write_at(temporary.descriptor, archive.records[-1].offset, blocks)
        wholes = [*(record.whole for record in records), zlib.crc32(blocks)]
        for index in range(len(wholes) + 1):
            write_at(temporary.descriptor, *archive.seam(index, wholes))

    # -- through rank 0 ----------------------------------------------------------------------------

    @override
    def _stream(self, layout: _Layout, outside: Sequence[int]) -> None:
        outcome = Outcome()
        content = self._streamed(layout)
        if self.control.rank == 0:
            _log_once(os.path.dirname(self.path))
            with outcome.attempt(), _opened(self.path) as append:
                for chunk in content:
                    append(chunk)
        # Receive the rest even after an error, since the other ranks are sending it.
        for _ in content:
            pass
        self.agree(outcome)

    def _streamed(self, layout: _Layout) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the file on rank 0; send this rank's parts on the others."""
        own = [(start, len(part)) for start, part in self._parts(layout)]
        places = self.control.gather_objects(own)
        archive = layout.archive
        checksums: list[RecordChecksums] = []
        wholes: list[int] = []
        for index, (_, part) in enumerate(self._parts(layout)):
            starts, sizes = zip(*(of_rank[index] for of_rank in places), strict=True)
            summers = [PartSummer(start) for start in starts]
            if self.control.rank == 0:
                yield archive.seam(index, wholes)[1]
            # Of cut parameters, the ranks' parts are not in the order of the ranks.
            order = sorted(range(1, len(starts)), key=starts.__getitem__)
            for rank, chunk in self._collected(part, sizes, order):
                summers[rank].add(chunk)
                yield chunk
            if self.control.rank == 0:
                record = archive.records[index]
                parts = [summer.checksums for summer in summers]
                checksums.append(RecordChecksums.of(record.name, record.nbytes, parts))
                wholes.append(checksums[-1].whole)
        if self.control.rank == 0:
            blocks = encoded_blocks(checksums)
            archive = archive.with_record(CHECKSUMS, len(blocks))
            yield archive.seam(len(wholes), wholes)[1] + blocks
            wholes.append(zlib.crc32(blocks))
            yield archive.seam(len(wholes), wholes)[1]

    def _collected(
        self, part: bytes | Tensor, sizes: Sequence[int], order: Sequence[int]
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield the ranks and the bytes of their parts on rank 0, in the order of the record."""
        if isinstance(part, bytes):
            yield 0, memoryview(part)
            return
        for rank, message in self.control.collect(part, sizes, order):
            for chunk in torch.split(message, BUFFER_BYTES):
                yield rank, chunk.to("cpu").numpy().data


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Callable[[bytes | memoryview], object]]:
    """Open a target to append to, which gets its name if the context ends without an error."""
    target = target_of(path)
    if isinstance(target, Path):
        temporary = Temporary(target, 0)
        try:
            with os.fdopen(os.dup(temporary.descriptor), "wb") as file:
                yield file.write
            temporary.keep()
        finally:
            temporary.close()
        return
    file_system, url = fsspec.core.url_to_fs(path)
    file_system.makedirs(os.path.dirname(url), exist_ok=True)
    # In a transaction the file gets its name only once it is complete.
    with file_system.transaction, file_system.open(url, "wb") as file:
        yield lambda chunk: file.write(bytes(chunk))


@functools.cache
def _log_once(folder: str) -> None:
    log.info(
        "%r is not a folder that all ranks share, so checkpoints are streamed through rank 0.",
        folder,
    )
