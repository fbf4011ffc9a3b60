"""Writing one plain file from all ranks at once.

1. Every rank makes the :class:`Skeleton` of its checkpoint; rank 0's decides what the file holds.
2. Rank 0 creates a temporary file of the full size; the others look whether they can see it.
3. Each rank writes its parts of the spread tensors to their places; rank 0 also the rest.
4. Each rank syncs its writes; checksums go to rank 0, which writes the seams.
5. When all ranks have synced, rank 0 renames the file.

Whoever dies in between leaves the earlier file under the final name whole. The temporary file is
locked by rank 0 while it lives; one that nobody locks was left behind by a dead process, and the
next save removes it.

Where ranks do not share a file system, or the target is none (``memory://``, ``s3://``), every
tensor travels through rank 0, one message at a time, into the very same file.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import logging
import os
import re
import secrets
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from lightning_zero.checkpoint.agreement import Outcome
from lightning_zero.checkpoint.archive import Archive, Record, joined_checksum
from lightning_zero.checkpoint.chunk import BUFFER_BYTES
from lightning_zero.checkpoint.skeleton import Skeleton, bytes_of, size_of
from lightning_zero.checkpoint.spread import Spread
from lightning_zero.comm import Comm

log = logging.getLogger(__name__)

FORMAT = 1
"""Number of the file format, to tell files of later versions by."""

PROVENANCE = "lightning_zero.json"
"""The record that tells who wrote a file."""

TABLE = ".metadata"
"""The file that makes a folder a directory of torch.distributed.checkpoint."""

SUFFIX = ".saving"
"""How the names of unfinished files and folders end."""

_ASIDE = ".aside"

_TEMPORARY = re.compile(rf"\.(?P<name>.+)\.[0-9a-f]{{8}}(?P<suffix>{SUFFIX}|{_ASIDE})")


@dataclass(frozen=True)
class Provenance:
    """Who wrote a file; stage 0 stands for a conversion."""

    stage: int
    world_size: int
    precision: str
    format: int = FORMAT

    def encoded(self) -> bytes:
        """The content of the record."""
        return json.dumps(asdict(self)).encode()


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
        temporary: Temporary | None = None
        try:
            if self.comm.rank == 0:
                with outcome.attempt():
                    temporary = Temporary(target)
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
        descriptor = os.open(name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for index, record, start, part in self._parts(plan):
                checksum = 0
                for first, chunk in chunks(part):
                    checksum = zlib.crc32(chunk, checksum)
                    write_at(descriptor, record.offset + start + first, chunk)
                    self._on_written(len(chunk))
                shares.append(_Share(index, start, len(part), checksum))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
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


def _write_seams(archive: Archive, checksums: Sequence[int], temporary: Temporary) -> None:
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


def write_at(descriptor: int, offset: int, content: bytes | memoryview) -> None:
    """Write all of ``content`` at a place of a file."""
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


# -- targets ---------------------------------------------------------------------------------------


class Temporary:
    """A file that is written under a temporary name and renamed when it is whole."""

    def __init__(self, target: Path) -> None:
        self.target = target
        check_target(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        self.path, self.descriptor = self._create()

    def _create(self) -> tuple[Path, int]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        while True:
            path = self.target.parent / f".{self.target.name}.{secrets.token_hex(4)}{SUFFIX}"
            descriptor = os.open(path, flags, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass  # somebody took it for a leftover before it was locked
            except OSError:
                return path, descriptor  # a file system without locks: its leftovers stay
            if path.exists():
                return path, descriptor
            os.close(descriptor)

    def reserve(self, nbytes: int) -> None:
        """Give the file its size."""
        os.truncate(self.descriptor, nbytes)

    def keep(self) -> None:
        """Give the file its final name; its content is synced already."""
        put_in_place(self.path, self.target)

    def close(self) -> None:
        """Let go of the file, and remove it unless it was kept."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        os.close(self.descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files and folders whose writers are dead: nobody holds their locks."""
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match is None:
            continue
        if match["suffix"] == _ASIDE:
            _bring_back(path, folder / match["name"])
            continue
        with contextlib.suppress(OSError):
            mode = os.O_RDONLY if path.is_dir() else os.O_RDWR
            descriptor = os.open(path, mode | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_all(path)
            finally:
                os.close(descriptor)


def remove_all(path: Path) -> None:
    """Remove a file, a link, or a folder with what is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        os.unlink(path)


def check_target(target: Path) -> None:
    """Raise an ``IsADirectoryError`` if the name is that of a folder that is no checkpoint."""
    is_folder = target.is_dir() and not target.is_symlink()
    if is_folder and any(target.iterdir()) and not (target / TABLE).is_file():
        raise IsADirectoryError(
            f"{str(target)!r} is a folder with other things than a checkpoint; save under another"
            " name"
        )


def put_in_place(temporary: Path, target: Path) -> None:
    """Give a file or folder its final name; what had the name before goes."""
    check_target(target)
    is_folder = target.is_dir() and not target.is_symlink()
    if not is_folder and not temporary.is_dir():
        os.replace(temporary, target)
    elif not os.path.lexists(target):
        os.rename(temporary, target)
    else:
        _exchange(temporary, target)
        remove_all(temporary)
    _sync_folder(target.parent)


def _exchange(temporary: Path, target: Path) -> None:
    """Swap two names at once; where the system cannot, one after the other."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if swap and not swap(here, os.fsencode(temporary), here, os.fsencode(target), exchange):
        return
    aside = temporary.with_suffix(_ASIDE)
    os.rename(target, aside)
    os.rename(temporary, target)
    os.rename(aside, temporary)


def _bring_back(aside: Path, target: Path) -> None:
    """Undo half an exchange, in the middle of which a process died."""
    with contextlib.suppress(OSError):
        if os.path.lexists(target):
            remove_all(aside)
        else:
            os.rename(aside, target)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Sink:
    """Where rank 0 streams to; on the other ranks a place that swallows everything."""

    def write(self, content: bytes | memoryview) -> None:
        """Append."""

    def commit(self, *, is_good: bool) -> None:
        """Give what was written its final name, if it is good."""


class _FileSink(_Sink):
    def __init__(self, temporary: Temporary) -> None:
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
        temporary = Temporary(target)
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


def target_of(path: str) -> Path | str:
    """A local path where there is one, else the URL."""
    file_system, local = fsspec.core.url_to_fs(path)
    return Path(local) if isinstance(file_system, LocalFileSystem) else path


def remove(path: str) -> None:
    """Remove a checkpoint, file or folder, if it exists."""
    file_system, local = fsspec.core.url_to_fs(path)
    if file_system.exists(local):
        file_system.rm(local, recursive=True)
