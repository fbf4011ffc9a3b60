"""The plain file that ``torch.save`` would have written, as the format of a save.

Rank 0 works out where every record lies and creates the file at its full size. Each rank writes its
ranges of sharded values to their places, rank 0 also the rest, and at last the checksums: in the
seams between the records, and of all blocks in a record of its own.
"""

from __future__ import annotations

import functools
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import override

from lightning_zero.checkpoint.checksums import (
    BLOCK_NBYTES,
    PartChecksums,
    RecordChecksums,
    encoded_blocks,
    num_blocks,
)
from lightning_zero.checkpoint.file.archive import Archive
from lightning_zero.checkpoint.file.atomic import Temporary, TemporaryFile, target_of
from lightning_zero.checkpoint.file.format import CHECKSUMS, PROVENANCE
from lightning_zero.checkpoint.file.skeleton import Content, Skeleton, size_of
from lightning_zero.checkpoint.file.stream import write_stream
from lightning_zero.checkpoint.file.writer import Writer, write_at
from lightning_zero.checkpoint.save import Save
from lightning_zero.checkpoint.values.sharded_value import ShardedValue

log = logging.getLogger(__name__)


class _Share(NamedTuple):
    """One rank's contribution to a record: its number, and what was written where in it."""

    number: int
    checksums: PartChecksums


@dataclass(frozen=True)
class _Layout:
    """The records of a file.

    Attributes:
        archive: Where they lie; the last has the checksums of the others' blocks.
        keys: The keys of those that are sharded, by number; rank 0 has the others.
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

    @property
    @override
    def values(self) -> dict[str, ShardedValue]:
        return self._skeleton.sharded_values()

    @property
    def _records(self) -> list[tuple[str, Content]]:
        return self._skeleton.records((PROVENANCE, self.provenance.encoded()))

    @override
    def _layout(self) -> _Layout:
        records = self._records
        sizes = [(name, size_of(content)) for name, content in records]
        checksums = CHECKSUMS, BLOCK_NBYTES * sum(num_blocks(nbytes) for _, nbytes in sizes)
        archive = Archive.build([*sizes, checksums])
        keys = {
            index: content.key
            for index, (_, content) in enumerate(records)
            if isinstance(content, ShardedValue)
        }
        return _Layout(archive, keys)

    @override
    def _create(self, layout: _Layout) -> TemporaryFile | None:
        target = target_of(self.path)
        return TemporaryFile(target, layout.archive.nbytes) if isinstance(target, Path) else None

    def _parts(self, layout: _Layout) -> Iterator[tuple[int, bytes | Tensor]]:
        """Yield this rank's part of every record, and where in the record it begins."""
        values, records = self.values, self._records
        for index in range(len(layout.archive.records) - 1):
            if index in layout.keys:
                value = values[layout.keys[index]]
                yield value.start_byte, value.part_bytes
            else:
                yield 0, self._own(records[index][1])

    def _own(self, content: Any) -> bytes | Tensor:
        return content if self.comm.rank == 0 else b""

    @override
    def _write(self, layout: _Layout, place: Path) -> list[_Share]:
        shares = []
        with Writer(place, self.on_written) as writer:
            for index, (start, part) in enumerate(self._parts(layout)):
                if len(part):
                    offset = layout.archive.records[index].offset
                    shares.append(_Share(index, writer.write(offset + start, part, start)))
            writer.sync()
        return shares

    @override
    def _seal(self, layout: _Layout, temporary: Temporary, shares: Sequence[_Share]) -> None:
        parts: list[list[PartChecksums]] = [[] for _ in layout.archive.records]
        for share in shares:
            parts[share.number].append(share.checksums)
        *records, last = layout.archive.records
        checksums = [
            RecordChecksums.of(record.name, record.nbytes, of_record)
            for record, of_record in zip(records, parts, strict=False)
        ]
        blocks = encoded_blocks(checksums)
        write_at(temporary.descriptor, last.offset, blocks)
        wholes = [*(checksum.whole for checksum in checksums), zlib.crc32(blocks)]
        for index in range(len(wholes) + 1):
            write_at(temporary.descriptor, *layout.archive.seam(index, wholes))

    @override
    def _stream(self, layout: _Layout, outside: Sequence[int]) -> None:
        if self.comm.rank == 0:
            _log_once(os.path.dirname(self.path))
        sizes = self.comm.gather_objects([len(part) for _, part in self._parts(layout)])
        parts = (part for _, part in self._parts(layout))
        outcome = write_stream(self.path, layout.archive, parts, sizes, self.comm)
        self.agree(outcome)


@functools.cache
def _log_once(folder: str) -> None:
    log.info(
        "%r is no folder that all ranks share, so checkpoints are streamed through rank 0.", folder
    )
