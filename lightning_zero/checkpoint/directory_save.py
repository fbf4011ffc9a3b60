"""Writing a directory of torch.distributed.checkpoint from all ranks at once.

1. Every rank takes its checkpoint apart; rank 0's decides what the directory holds.
2. Rank 0 creates a folder under a temporary name; the others look whether they can see it.
3. Each rank writes a file of its own: its range of every spread tensor, cut into boxes. Rank 0 also
   writes what is not spread.
4. Each rank syncs its file and tells rank 0 where its boxes lie; rank 0 writes the table.
5. When all ranks have synced, rank 0 gives the folder its name, in exchange for an earlier one.

Nothing is gathered, and a rank copies no more than a buffer at a time. The alternative,
``torch.distributed.checkpoint.save`` with a planner, copies a whole box at a time, cannot let two
names share their bytes, and writes to the final name.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from lightning_zero.checkpoint.agreement import Outcome
from lightning_zero.checkpoint.archive import Archive
from lightning_zero.checkpoint.boxes import Box, boxes, dense_stride, inverse, memory_order
from lightning_zero.checkpoint.content import WEIGHTS, Content
from lightning_zero.checkpoint.directory import REST, TABLE, Keys
from lightning_zero.checkpoint.provenance import PROVENANCE, Provenance
from lightning_zero.checkpoint.skeleton import Skeleton, bytes_of
from lightning_zero.checkpoint.spread import Spread
from lightning_zero.checkpoint.target import TemporaryFolder
from lightning_zero.checkpoint.writer import Writer
from lightning_zero.comm import Comm


@dataclass(frozen=True)
class _Share:
    """A box that one rank wrote: of which tensor, and where."""

    key: str
    box: Box
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Tensor:
    """What the table tells of a tensor besides its boxes."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class DirectorySave:
    """One save of one checkpoint; all ranks construct and :meth:`run` it together.

    Args:
        checkpoint: What to save; spread tensors on every rank, the rest counts on rank 0.
        path: The directory's name, on a disk that all ranks share.
        comm: The ranks.
        provenance: What the directory tells about its origin.
        on_written: Called with the number of bytes of values that this rank has written since.
        parameters: For each optimizer, its parameters' names in the order of its groups.
    """

    def __init__(
        self,
        checkpoint: Mapping[str, Any],
        path: str,
        comm: Comm,
        provenance: Provenance,
        on_written: Callable[[int], object] = lambda nbytes: None,
        *,
        parameters: Sequence[Sequence[str]] = (),
    ) -> None:
        self.path = path
        self.comm = comm
        self.provenance = provenance
        self._on_written = on_written
        self._entries: dict[Keys, _Tensor | bytes] = {}
        self._parts: dict[str, Spread] = {}
        self._rest = b""
        outcome = Outcome()
        with outcome.attempt():
            content = Content.of(checkpoint, parameters)
            for where, value in content.entries.items():
                self._take(where, value)
            if comm.rank == 0:
                self._rest = _pickled(content.rest)
        self._agree(outcome)

    def _take(self, path: Keys, value: Any) -> None:
        """Take in one thing; of what is not spread only rank 0's counts."""
        if isinstance(value, Tensor):
            if not isinstance(value, Spread):
                if self.comm.rank:
                    return
                value = Spread.of_whole(value)
            self._parts[value.key] = value
            self._entries[path] = _Tensor(value.key, tuple(value.shape), value.dtype)
        elif self.comm.rank == 0:
            self._entries[path] = _pickled(value)

    def detach(self, comm: Comm) -> None:
        """Copy this rank's values to host memory, so that :meth:`run` may run in another thread."""
        self._parts = {
            key: part.with_part(part.part.to("cpu", copy=True)) for key, part in self._parts.items()
        }
        self.comm = comm

    def run(self) -> None:
        """Write the directory.

        Raises:
            Exception: On all ranks, if any rank failed; an earlier one of the name is unchanged.
        """
        keys = self._agreed_keys()
        outcome = Outcome()
        folder: TemporaryFolder | None = None
        try:
            if self.comm.rank == 0:
                with outcome.attempt():
                    folder = TemporaryFolder(self.path)
            self._agree(outcome)
            name = Path(self.comm.broadcast_object(folder and str(folder.path)))
            with outcome.attempt():
                if not name.is_dir():
                    raise FileNotFoundError(
                        f"{str(name)!r} is not there. checkpoint='dcp' needs a disk that all ranks"
                        " share; checkpoint='file' writes to any other place too"
                    )
            self._agree(outcome)
            shares: list[_Share] = []
            objects: dict[Keys, _Share] = {}
            with outcome.attempt():
                shares, objects = self._write(name, keys)
            self._agree(outcome)
            every = self.comm.gather_objects(shares)
            if folder is not None:
                with outcome.attempt():
                    self._write_table(name, every, objects)
                    folder.keep()
            self._agree(outcome)
        finally:
            if folder is not None:
                folder.close()

    def _agree(self, outcome: Outcome) -> None:
        outcome.agree(self.comm, f"Saving {self.path!r}")

    def _agreed_keys(self) -> list[str]:
        """What is written; rank 0 decides, and every rank must have its parts."""
        mine = [entry.key for entry in self._entries.values() if isinstance(entry, _Tensor)]
        keys: list[str] = list(dict.fromkeys(self.comm.broadcast_object(mine)))
        spread = [key for key in keys if not _is_of_one_rank(key)]
        outcome = Outcome()
        with outcome.attempt():
            missing = [key for key in spread if key not in self._parts]
            if missing:
                raise ValueError(
                    f"the checkpoint of this rank has no {missing[0]!r}, which that of rank 0 has."
                    " A hook that edits the checkpoint must do the same on every rank."
                )
        self._agree(outcome)
        return keys

    # -- this rank's file --------------------------------------------------------------------------

    def _write(self, folder: Path, keys: Sequence[str]) -> tuple[list[_Share], dict[Keys, _Share]]:
        shares: list[_Share] = []
        objects: dict[Keys, _Share] = {}
        position = 0
        name = f"__{self.comm.rank}_0.distcp"
        with _created(folder / name, self._on_written) as writer:
            for where, content in self._entries.items():
                if isinstance(content, bytes):
                    writer.write(position, content)
                    objects[where] = _Share("", Box((), ()), name, position, len(content))
                    position += len(content)
            for spread in (self._parts[key] for key in keys if key in self._parts):
                # A tensor without elements is nobody's, so rank 0 says that it is there.
                if not spread.numel() and self.comm.rank:
                    continue
                for box, part in boxes_of(spread):
                    write = functools.partial(_write_from, writer, position)
                    nbytes = write_archive(Skeleton.of(part), write)
                    shares.append(_Share(spread.key, box, name, position, nbytes))
                    position += nbytes
            writer.sync()
        return shares, objects

    # -- what rank 0 adds --------------------------------------------------------------------------

    def _write_table(
        self, folder: Path, shares: Sequence[Sequence[_Share]], objects: Mapping[Keys, _Share]
    ) -> None:
        by_key: dict[str, list[_Share]] = {}
        for share in (share for of_rank in shares for share in of_rank):
            by_key.setdefault(share.key, []).append(share)
        table = metadata.Metadata({}, {}, {}, metadata.StorageMeta())
        for path, entry in self._entries.items():
            for name in _names(path):
                if name in table.planner_data:
                    raise ValueError(f"two things in the checkpoint would have the name {name!r}")
                table.planner_data[name] = _told(path)
                if isinstance(entry, _Tensor):
                    _note_tensor(table, name, entry, by_key.get(entry.key, []))
                else:
                    table.state_dict_metadata[name] = metadata.BytesStorageMetadata()
                    table.storage_data[metadata.MetadataIndex(name)] = _info(objects[path])
        _write_file(folder / REST, self._rest)
        _write_file(folder / PROVENANCE, self.provenance.encoded())
        _write_file(folder / TABLE, pickle.dumps(table))


def _names(path: Keys) -> list[str]:
    """The names under which programs look for what is at ``path``."""
    paths = [path, (WEIGHTS[1], *path[1:])] if path[0] == WEIGHTS[0] else [path]
    return [".".join(map(str, each)) for each in paths]


def _told(path: Keys) -> Keys:
    """The path for those who read everything: one, so that they read every weight once."""
    return (WEIGHTS[1], *path[1:]) if path[0] == WEIGHTS[0] else path


def _note_tensor(
    table: metadata.Metadata, name: str, tensor: _Tensor, shares: Sequence[_Share]
) -> None:
    ordered = sorted(shares, key=lambda share: share.box.offsets)
    held = sum(share.box.numel for share in ordered)
    assert held == prod(tensor.shape), f"{name} has {held} elements of {tensor.shape}"
    table.state_dict_metadata[name] = metadata.TensorStorageMetadata(
        metadata.TensorProperties(dtype=tensor.dtype),
        torch.Size(tensor.shape),
        [
            metadata.ChunkStorageMetadata(torch.Size(s.box.offsets), torch.Size(s.box.sizes))
            for s in ordered
        ],
    )
    for share in ordered:
        table.storage_data[metadata.MetadataIndex(name, share.box.offsets)] = _info(share)


def _info(share: _Share) -> Any:
    return filesystem._StorageInfo(share.file, share.offset, share.nbytes)


def _is_of_one_rank(key: str) -> bool:
    return key.startswith(Spread.WHOLE)


# -- boxes -----------------------------------------------------------------------------------------


def boxes_of(spread: Spread) -> Iterator[tuple[Box, Spread]]:
    """This rank's part of a tensor, cut into boxes, each as a tensor of its own."""
    if spread.part.numel() == spread.numel():
        yield Box.whole(spread.shape), spread
        return
    order = memory_order(spread.shape, spread.stride())
    shape = [spread.shape[dimension] for dimension in order]
    position = 0
    for box in boxes(shape, spread.start, spread.start + len(spread.part)):
        part = spread.part[position : position + box.numel]
        position += box.numel
        own = box.permuted(inverse(order))
        stride = dense_stride(own.sizes, order)
        yield own, Spread.of(spread.key, part, 0, own.sizes, stride, spread.dtype)


def write_archive(skeleton: Skeleton, write: Callable[[int, Tensor | bytes], int]) -> int:
    """Write what ``torch.save`` would write, by places in it; returns the bytes.

    ``write`` takes a place and bytes, and returns their CRC-32.
    """
    contents: list[Tensor | bytes] = [skeleton.pickled, sys.byteorder.encode(), b"3\n"]
    names = ["data.pkl", "byteorder", "version"]
    for number, stored in enumerate(skeleton.storages):
        names.append(f"data/{number}")
        contents.append(stored.part_bytes if isinstance(stored, Spread) else bytes_of(stored))
    archive = Archive.build((n, len(c)) for n, c in zip(names, contents, strict=True))
    checksums = [
        write(record.offset, content)
        for record, content in zip(archive.records, contents, strict=True)
    ]
    for index in range(len(names) + 1):
        write(*archive.seam(index, checksums))
    return archive.nbytes


def _pickled(value: Any) -> bytes:
    """An object as ``torch.save`` would write it, for readers on any device."""
    skeleton, file = Skeleton.of(value), io.BytesIO()
    for key in skeleton.spreads():
        raise ValueError(
            f"the sharded {key!r} is inside of an object, where checkpoint='dcp' has no place for"
            " it. Use checkpoint='file'"
        )

    def write(place: int, content: Tensor | bytes) -> int:
        content = content if isinstance(content, bytes) else content.cpu().numpy().tobytes()
        file.seek(place)
        file.write(content)
        return zlib.crc32(content)

    write_archive(skeleton, write)
    return file.getvalue()


@contextlib.contextmanager
def _created(
    path: Path, on_written: Callable[[int], object] = lambda nbytes: None
) -> Iterator[Writer]:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    with Writer(path, on_written) as writer:
        yield writer


def _write_from(writer: Writer, start: int, place: int, content: Tensor | bytes) -> int:
    return writer.write(start + place, content)


def _write_file(path: Path, content: bytes) -> None:
    with _created(path) as writer:
        writer.write(0, content)
        writer.sync()
