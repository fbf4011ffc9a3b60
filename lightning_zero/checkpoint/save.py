"""Writing one plain file from all ranks at once.

1. Every rank makes the :class:`Skeleton` of its checkpoint; rank 0's decides what the file holds.
2. Rank 0 creates a temporary file of the full size; the others look whether they can see it.
3. Each rank writes its parts of the spread tensors to their places; rank 0 also the rest.
4. Each rank syncs its writes; checksums go to rank 0, which writes the seams.
5. When all ranks have synced, rank 0 renames the file.

Whoever dies in between leaves the earlier file under the final name whole (``target.py``).

Where ranks do not share a file system, or the target is none (``memory://``, ``s3://``), every
tensor travels through rank 0, one message at a time, into the very same file.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import torch
from torch import Tensor

from lightning_zero.checkpoint.agreement import Outcome
from lightning_zero.checkpoint.archive import Archive, Record, joined_checksum
from lightning_zero.checkpoint.chunk import BUFFER_BYTES
from lightning_zero.checkpoint.provenance import PROVENANCE, Provenance
from lightning_zero.checkpoint.skeleton import Skeleton, bytes_of, size_of
from lightning_zero.checkpoint.spread import Spread
from lightning_zero.checkpoint.target import TemporaryFile, target_of
from lightning_zero.checkpoint.writer import Writer, write_at
from lightning_zero.comm import Comm

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Share:
    """What one rank contributes to a record: where in it, how much, and with which checksum."""

    index: int
    start: int
    nbytes: int
    checksum: int


class Save:
    """One save of one checkpoint; all ranks construct and :meth:`run` it together.

    Args:
        checkpoint: What to save; spread tensors on every rank, the rest counts on rank 0.
        path: A path or an ``fsspec`` URL.
        comm: The ranks.
        provenance: What the file tells about its origin.
        on_written: Called with the number of bytes that this rank has written since it was last.
    """

    def __init__(
        self,
        checkpoint: Any,
        path: str,
        comm: Comm,
        provenance: Provenance,
        on_written: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        self.path = path
        self._on_written = on_written
        self.comm = comm
        self.provenance = provenance
        outcome = Outcome()
        with outcome.attempt():
            self.skeleton = Skeleton.of(checkpoint)
        outcome.agree(comm, f"Saving {path!r}")

    def detach(self, comm: Comm) -> None:
        """Copy this rank's values to host memory, so that :meth:`run` may run in another thread."""
        self.skeleton = self.skeleton.copied_to_host()
        self.comm = comm

    def run(self) -> None:
        """Write the file.

        Raises:
            Exception: On all ranks, if any rank failed; an earlier file of the name is unchanged.
        """
        plan = self._plan()
        target = target_of(self.path)
        if isinstance(target, Path) and self._write_together(plan, target):
            return
        if self.comm.rank == 0:
            _tell_once(os.path.dirname(self.path))
        self._stream(plan)

    # -- what is written where ---------------------------------------------------------------------

    def _plan(self) -> _Plan:
        """Agree on what the file holds; rank 0 decides, and every rank must have its parts."""
        spreads = self.skeleton.spreads()
        plan = _Plan.of(self.skeleton, self.provenance) if self.comm.rank == 0 else None
        agreed: _Plan = self.comm.broadcast_object(plan and plan.without_contents())
        outcome = Outcome()
        with outcome.attempt():
            missing = [key for key in agreed.keys.values() if key not in spreads]
            if missing:
                raise ValueError(
                    f"the checkpoint of this rank has no {missing[0]!r}, which that of rank 0 has."
                    " A hook that edits the checkpoint must do the same on every rank."
                )
        self._agree(outcome)
        return plan or agreed

    def _parts(self, plan: _Plan) -> Iterator[tuple[int, Record, int, Tensor | bytes]]:
        """This rank's bytes: number and record, where in the record, and the bytes."""
        spreads = self.skeleton.spreads()
        for index, key in plan.keys.items():
            spread = spreads[key]
            part = spread.part_bytes
            if len(part):
                yield index, plan.archive.records[index], spread.start_byte, part
        for index, content in plan.contents.items():
            yield index, plan.archive.records[index], 0, content

    # -- all ranks at once -------------------------------------------------------------------------

    def _write_together(self, plan: _Plan, target: Path) -> bool:
        """Write the file from all ranks; ``False`` if they do not share the file system."""
        outcome = Outcome()
        temporary: TemporaryFile | None = None
        try:
            if self.comm.rank == 0:
                with outcome.attempt():
                    temporary = TemporaryFile(target)
                    temporary.reserve(plan.archive.nbytes)
            self._agree(outcome)
            name = self.comm.broadcast_object(temporary and str(temporary.path))
            if not all(self.comm.gather_objects(os.path.exists(name))):
                return False
            shares: list[_Share] = []
            with outcome.attempt():
                shares = self._write_parts(plan, name)
            self._agree(outcome)
            every = self.comm.gather_objects(shares)
            if temporary is not None:
                with outcome.attempt():
                    _write_seams(plan.archive, _checksums(plan.archive, every), temporary)
                    temporary.keep()
            self._agree(outcome)
            return True
        finally:
            if temporary is not None:
                temporary.close()

    def _agree(self, outcome: Outcome) -> None:
        outcome.agree(self.comm, f"Saving {self.path!r}")

    def _write_parts(self, plan: _Plan, name: str) -> list[_Share]:
        shares = []
        with Writer(name, self._on_written) as writer:
            for index, record, start, part in self._parts(plan):
                checksum = writer.write(record.offset + start, part)
                shares.append(_Share(index, start, len(part), checksum))
            writer.sync()
        return shares

    # -- through rank 0 ----------------------------------------------------------------------------

    def _stream(self, plan: _Plan) -> None:
        """Write the file on rank 0, which receives every other rank's parts one by one."""
        spreads = self.skeleton.spreads()
        sizes = self.comm.gather_objects(
            [len(spreads[key].part_bytes) for key in plan.keys.values()]
        )
        of_ranks = dict(zip(plan.keys, zip(*sizes, strict=True), strict=True))
        outcome = Outcome()
        with contextlib.ExitStack() as stack:
            sink = _Sink()
            if self.comm.rank == 0:
                with outcome.attempt():
                    sink = stack.enter_context(_opened(self.path))
            checksums: list[int] = []
            for index in range(len(plan.archive.records)):
                with outcome.attempt():
                    sink.write(plan.archive.seam(index, checksums)[1])
                checksum = 0
                for chunk in self._record(index, plan, of_ranks):
                    checksum = zlib.crc32(chunk, checksum)
                    # After an error the rest is received all the same: the others are sending.
                    if outcome.is_good:
                        with outcome.attempt():
                            sink.write(chunk)
                checksums.append(checksum)
            with outcome.attempt():
                sink.write(plan.archive.seam(len(checksums), checksums)[1])
                sink.commit(is_good=outcome.is_good)
                stack.close()  # a store may refuse a file at its very end
            self._agree(outcome)

    def _record(self, index: int, plan: _Plan, sizes: dict[int, Any]) -> Iterator[memoryview]:
        if index not in plan.keys:
            yield from (chunk for _, chunk in chunks(plan.contents.get(index)))
            return
        part = self.skeleton.spreads()[plan.keys[index]].part_bytes
        for _, message in self.comm.collect(part, sizes[index]):
            yield from (chunk for _, chunk in chunks(message))


@dataclass(frozen=True)
class _Plan:
    """The records of a file.

    Attributes:
        archive: Where they lie.
        keys: Of those that are spread over the ranks, the keys.
        contents: Of the others, the bytes; rank 0 has them.
    """

    archive: Archive
    keys: dict[int, str]
    contents: dict[int, Tensor | bytes]

    @classmethod
    def of(cls, skeleton: Skeleton, provenance: Provenance) -> _Plan:
        contents: dict[int, Tensor | bytes] = dict(
            enumerate([skeleton.pickled, sys.byteorder.encode(), b"3\n", provenance.encoded()])
        )
        sizes = [
            (name, len(contents[index]))
            for index, name in enumerate(["data.pkl", "byteorder", "version", PROVENANCE])
        ]
        keys: dict[int, str] = {}
        for number, stored in enumerate(skeleton.storages):
            index = len(sizes)
            sizes.append((f"data/{number}", size_of(stored)))
            if isinstance(stored, Spread):
                keys[index] = stored.key
            else:
                contents[index] = bytes_of(stored)
        return cls(Archive.build(sizes), keys, contents)

    def without_contents(self) -> _Plan:
        """What the other ranks need to know."""
        return _Plan(self.archive, self.keys, {})


@functools.cache
def _tell_once(folder: str) -> None:
    log.info(
        "%r is no folder that all ranks share, so checkpoints are streamed through rank 0.", folder
    )


def _write_seams(archive: Archive, checksums: Sequence[int], temporary: TemporaryFile) -> None:
    """Write what lies between the records, and sync."""
    for index in range(len(checksums) + 1):
        start, seam = archive.seam(index, checksums)
        write_at(temporary.descriptor, start, seam)
    os.fsync(temporary.descriptor)


def _checksums(archive: Archive, shares: Sequence[Sequence[_Share]]) -> list[int]:
    """The checksum of each record, from those of the shares that ranks wrote of it."""
    by_record: dict[int, list[_Share]] = {}
    for share in (share for of_rank in shares for share in of_rank):
        by_record.setdefault(share.index, []).append(share)
    checksums = []
    for index, record in enumerate(archive.records):
        checksum, position = 0, 0
        for share in sorted(by_record.get(index, []), key=lambda share: share.start):
            assert share.start == position, f"{record.name} has a hole at byte {position}"
            checksum = joined_checksum(checksum, share.checksum, share.nbytes)
            position += share.nbytes
        assert position == record.nbytes, f"{record.name} has a hole at byte {position}"
        checksums.append(checksum)
    return checksums


def chunks(content: Tensor | bytes | None) -> Iterator[tuple[int, memoryview]]:
    """The bytes of ``content`` in host memory, a buffer's worth at a time, with their places."""
    if content is None or len(content) == 0:
        return
    if isinstance(content, bytes):
        yield 0, memoryview(content)
        return
    for number, chunk in enumerate(torch.split(content, BUFFER_BYTES)):
        yield number * BUFFER_BYTES, chunk.to("cpu").numpy().data


class _Sink:
    """Where rank 0 streams to; on the other ranks a place that swallows everything."""

    def write(self, content: bytes | memoryview) -> None:
        """Append."""

    def commit(self, *, is_good: bool) -> None:
        """Give what was written its final name, if it is good."""


class _FileSink(_Sink):
    def __init__(self, temporary: TemporaryFile) -> None:
        self._temporary = temporary
        self._position = 0

    def write(self, content: bytes | memoryview) -> None:
        write_at(self._temporary.descriptor, self._position, content)
        self._position += len(content)

    def commit(self, *, is_good: bool) -> None:
        if is_good:
            os.fsync(self._temporary.descriptor)
            self._temporary.keep()


class _RemoteSink(_Sink):
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.is_good = False

    def write(self, content: bytes | memoryview) -> None:
        self._file.write(bytes(content))

    def commit(self, *, is_good: bool) -> None:
        self.is_good = is_good


@contextlib.contextmanager
def _opened(path: str) -> Iterator[_Sink]:
    target = target_of(path)
    if isinstance(target, Path):
        temporary = TemporaryFile(target)
        try:
            yield _FileSink(temporary)
        finally:
            temporary.close()
        return
    file_system, url = fsspec.core.url_to_fs(path)
    file_system.makedirs(os.path.dirname(url), exist_ok=True)
    # A transaction shows the file under its name only when it is complete.
    with file_system.transaction, file_system.open(url, "wb") as file:
        sink = _RemoteSink(file)
        yield sink
        if not sink.is_good:
            file_system.transaction.files.clear()
