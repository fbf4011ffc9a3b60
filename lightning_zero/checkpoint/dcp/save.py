"""A directory of torch.distributed.checkpoint, as the format of a save.

Each rank writes a file of its own: its range of every sharded value, cut into boxes. Rank 0 also
writes what is not sharded, and at last the table of all boxes.

The alternative, ``torch.distributed.checkpoint.save`` with a planner, copies a whole box at a time,
cannot let two names share their bytes, and writes to the final name.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from typing_extensions import override

from lightning_zero.checkpoint.checksums import PartChecksums
from lightning_zero.checkpoint.dcp.content import WEIGHTS, Content
from lightning_zero.checkpoint.dcp.directory import Keys
from lightning_zero.checkpoint.file.atomic import Temporary, TemporaryFolder, target_of
from lightning_zero.checkpoint.file.format import PROVENANCE, REST, TABLE, Provenance
from lightning_zero.checkpoint.file.skeleton import Skeleton, archived, write_archive
from lightning_zero.checkpoint.file.writer import Writer
from lightning_zero.checkpoint.save import Save
from lightning_zero.checkpoint.values.boxes import Box, boxes, dense_stride, inverse, memory_order
from lightning_zero.checkpoint.values.sharded_value import ShardedValue
from lightning_zero.comm import Control

_ELSEWHERE = "checkpoint='file' writes to any other place too"


@dataclass(frozen=True)
class _Share:
    """An archive that one rank wrote: a box of a tensor, or the object at a path."""

    of: str | Keys
    box: Box
    file: str
    offset: int
    nbytes: int
    blocks: Sequence[int] = ()


@dataclass(frozen=True)
class _Tensor:
    """A tensor's entry in the table, besides its boxes."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class DirectorySave(Save):
    """A save to a directory, on a disk that all ranks share.

    Args:
        checkpoint: A Trainer's checkpoint.
        path: The directory's name.
        comm: The ranks.
        provenance: What the directory says about its origin.
        on_written: Called with the number of bytes that this rank has written since the last call.
        parameters: For each optimizer, its parameters' names in the order of its groups.
    """

    def __init__(
        self,
        checkpoint: Mapping[str, Any],
        path: str,
        comm: Control,
        provenance: Provenance,
        on_written: Callable[[int], object] = lambda nbytes: None,
        *,
        parameters: Sequence[Sequence[str]] = (),
    ) -> None:
        self._parameters = parameters
        self._entries: dict[Keys, _Tensor | bytes] = {}
        self._values: dict[str, ShardedValue] = {}
        self._rest = b""
        super().__init__(checkpoint, path, comm, provenance, on_written)

    @property
    @override
    def values(self) -> dict[str, ShardedValue]:
        return self._values

    @override
    def _take(self, checkpoint: Mapping[str, Any]) -> None:
        content = Content.of(checkpoint, self._parameters)
        for where, value in content.entries.items():
            if isinstance(value, ShardedValue):
                self._take_value(where, value)
            elif self.comm.rank == 0:  # of what is not sharded only rank 0's counts
                if isinstance(value, Tensor):
                    self._take_value(where, ShardedValue.of_whole(value))
                else:
                    self._entries[where] = _archived(value)
        if self.comm.rank == 0:
            self._rest = _archived(content.rest)

    def _take_value(self, path: Keys, value: ShardedValue) -> None:
        self._values[value.key] = value
        self._entries[path] = _Tensor(value.key, tuple(value.shape), value.dtype)

    @override
    def _copy_to_host(self) -> None:
        self._values = {
            key: value.with_part(value.part.to("cpu", copy=True))
            for key, value in self._values.items()
        }

    @override
    def _layout(self) -> list[str]:
        """Return the keys of all tensors, in the order in which they are written."""
        return list(self._values)

    @override
    def _create(self, layout: Sequence[str]) -> TemporaryFolder:
        target = target_of(self.path)
        if not isinstance(target, Path):
            raise ValueError(
                f"checkpoint='dcp' needs a disk that all ranks share, not a URL; {_ELSEWHERE}"
            )
        return TemporaryFolder(target)

    @override
    def _write(self, layout: Sequence[str], place: Path) -> list[_Share]:
        shares: list[_Share] = []
        position = 0
        name = f"__{self.comm.rank}_0.distcp"
        with _created(place / name, self.on_written) as writer:
            for where, content in self._entries.items():
                if isinstance(content, bytes):
                    writer.write(position, content)
                    shares.append(_Share(where, Box((), ()), name, position, len(content)))
                    position += len(content)
            for value in (self._values[key] for key in layout if key in self._values):
                # No rank has a part of a tensor without elements, so rank 0 writes it.
                if not value.numel() and self.comm.rank:
                    continue
                for box, part in boxes_of(value):
                    write = functools.partial(_write_from, writer, position)
                    nbytes, checksums = write_archive(part, write)
                    blocks = checksums.blocks
                    shares.append(_Share(value.key, box, name, position, nbytes, blocks))
                    position += nbytes
            writer.sync()
        return shares

    @override
    def _seal(self, layout: Sequence[str], temporary: Temporary, shares: Sequence[_Share]) -> None:
        table = pickle.dumps(self._table(shares))
        blocks: dict[str, dict[int, Sequence[int]]] = {}
        for share in shares:
            if share.blocks:
                blocks.setdefault(share.file, {})[share.offset] = share.blocks
        origin = self.provenance.encoded(table=zlib.crc32(table), blocks=blocks)
        for name, content in ((REST, self._rest), (PROVENANCE, origin), (TABLE, table)):
            with _created(temporary.path / name) as writer:
                writer.write(0, content)
                writer.sync()

    def _table(self, shares: Sequence[_Share]) -> metadata.Metadata:
        of: dict[str | Keys, list[_Share]] = {}
        for share in shares:
            of.setdefault(share.of, []).append(share)
        table = metadata.Metadata({}, {}, {}, metadata.StorageMeta())
        for path, entry in self._entries.items():
            for name in _names(path):
                if name in table.planner_data:
                    raise ValueError(f"two things in the checkpoint would have the name {name!r}")
                table.planner_data[name] = _path_in_table(path)
                if isinstance(entry, _Tensor):
                    _note_tensor(table, name, entry, of.get(entry.key, []))
                else:
                    table.state_dict_metadata[name] = metadata.BytesStorageMetadata()
                    table.storage_data[metadata.MetadataIndex(name)] = _info(of[path][0])
        return table

    @override
    def _stream(self, layout: Sequence[str], outside: Sequence[int]) -> NoReturn:
        raise FileNotFoundError(
            f"Saving {self.path!r} failed: rank {', '.join(map(str, outside))} does not see the"
            f" folder that rank 0 made. checkpoint='dcp' needs a disk that all ranks share;"
            f" {_ELSEWHERE}"
        )


def _names(path: Keys) -> list[str]:
    """Return the names under which programs look for what is at ``path``."""
    paths = [path, (WEIGHTS[1], *path[1:])] if path[0] == WEIGHTS[0] else [path]
    return [".".join(map(str, each)) for each in paths]


def _path_in_table(path: Keys) -> Keys:
    """Return one path for programs that read everything, so that they read a weight once."""
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


# -- boxes -----------------------------------------------------------------------------------------


def boxes_of(value: ShardedValue) -> Iterator[tuple[Box, ShardedValue]]:
    """Cut this rank's part of a tensor into boxes, each a tensor of its own."""
    if value.part.numel() == value.numel():
        yield Box.whole(value.shape), value
        return
    order = memory_order(value.shape, value.stride())
    shape = [value.shape[dimension] for dimension in order]
    position = 0
    for box in boxes(shape, value.start, value.start + len(value.part)):
        part = value.part[position : position + box.numel]
        position += box.numel
        own = box.permuted(inverse(order))
        stride = dense_stride(own.sizes, order)
        yield own, ShardedValue.of(value.key, part, 0, own.sizes, stride, value.dtype)


def _archived(value: Any) -> bytes:
    """Return an object as ``torch.save`` would write it; none of its tensors is sharded."""
    for key in Skeleton.of(value).sharded_values():
        raise ValueError(
            f"the sharded {key!r} is inside of an object, where checkpoint='dcp' has no place for"
            " it. Use checkpoint='file'"
        )
    return archived(value)


@contextlib.contextmanager
def _created(
    path: Path, on_written: Callable[[int], object] = lambda nbytes: None
) -> Iterator[Writer]:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    with Writer(path, on_written) as writer:
        yield writer


def _write_from(writer: Writer, start: int, place: int, content: Tensor | bytes) -> PartChecksums:
    return writer.write(start + place, content)
