"""Saving to a directory of torch.distributed.checkpoint.

Each rank writes a file of its own: its range of every sharded value, cut into boxes. Rank 0 also
writes everything that is not sharded, and at last the table of all boxes.

The alternative, ``torch.distributed.checkpoint.save`` with a planner, copies a whole box at a time,
cannot share bytes between two names, and writes to the final name.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from typing_extensions import override

from lightning_zero.checkpoint.checksums import PartChecksums
from lightning_zero.checkpoint.dcp.content import WEIGHTS, entries_of
from lightning_zero.checkpoint.dcp.directory import Keys
from lightning_zero.checkpoint.file.atomic import Temporary, target_of
from lightning_zero.checkpoint.file.format import PROVENANCE, REST, TABLE, Provenance
from lightning_zero.checkpoint.file.skeleton import Skeleton, write_archive
from lightning_zero.checkpoint.file.writer import Writer
from lightning_zero.checkpoint.save import Save
from lightning_zero.checkpoint.values.boxes import Box, boxes_in_memory, dense_stride, memory_order
from lightning_zero.checkpoint.values.sharded_value import ShardedValue
from lightning_zero.comm import Control
from lightning_zero.tensors import is_wrapper

_ELSEWHERE = "Use checkpoint='file' to save anywhere else"


class _Share(NamedTuple):
    """An archive that one rank wrote: a box of a tensor, by key, or an object, by path."""

    of: str | Keys
    box: Box
    file: str
    offset: int
    nbytes: int
    sums: Sequence[int]

    @property
    def place(self) -> Any:
        """The archive's place, as an entry of the table."""
        return filesystem._StorageInfo(self.file, self.offset, self.nbytes)


class DirectorySave(Save):
    """A save of a Trainer's checkpoint to a directory, on a disk that all ranks share.

    ``parameters`` are, for each optimizer, its parameters' names in the order of its groups.
    """

    def __init__(
        self,
        checkpoint: Mapping[str, Any],
        path: str,
        control: Control,
        provenance: Provenance,
        on_written: Callable[[int], object] = lambda nbytes: None,
        *,
        parameters: Sequence[Sequence[str]] = (),
    ) -> None:
        self._parameters = parameters
        self._entries: dict[Keys, str | Skeleton] = {}  # the key of a value, or an object
        self._values: dict[str, ShardedValue] = {}
        self._rest: Skeleton | None = None
        super().__init__(checkpoint, path, control, provenance, on_written)

    @property
    @override
    def values(self) -> dict[str, ShardedValue]:
        return self._values

    @override
    def _take(self, checkpoint: Mapping[str, Any]) -> None:
        entries, rest = entries_of(checkpoint, self._parameters)
        for where, given in entries.items():
            value = given.settled() if isinstance(given, ShardedValue) else given
            if isinstance(value, ShardedValue):
                self._take_value(where, value)
            elif is_wrapper(value):
                raise ValueError(
                    f"{'.'.join(map(str, where))!r} is of the class {type(value).__name__}, whose"
                    " tensors wrap others. checkpoint='dcp' cannot store it. Use checkpoint='file'"
                )
            elif self.control.rank == 0:  # everything unsharded is taken from rank 0
                if isinstance(value, Tensor):
                    self._take_value(where, ShardedValue.of_whole(value))
                else:
                    self._entries[where] = _object(value)
        if self.control.rank == 0:
            self._rest = _object(rest)

    def _take_value(self, path: Keys, value: ShardedValue) -> None:
        self._values[value.key] = value
        self._entries[path] = value.key

    @override
    def _copy_to_host(self) -> None:
        self._values = {
            key: value.with_part(value.part.to("cpu", copy=True))
            for key, value in self._values.items()
        }
        self._entries = {
            path: entry if isinstance(entry, str) else entry.copied_to_host()
            for path, entry in self._entries.items()
        }
        self._rest = self._rest and self._rest.copied_to_host()

    @override
    def _layout(self) -> list[str]:
        """Return the keys of all tensors, in the order of writing."""
        return list(self._values)

    @override
    def _create(self, layout: Sequence[str]) -> Temporary:
        target = target_of(self.path)
        if not isinstance(target, Path):
            raise ValueError(
                f"checkpoint='dcp' needs a disk that all ranks share, not a URL. {_ELSEWHERE}"
            )
        return Temporary(target, None)

    @override
    def _write(self, layout: Sequence[str], place: Path) -> list[_Share]:
        shares: list[_Share] = []
        position = 0
        name = f"__{self.control.rank}_0.distcp"
        with _created(place / name, self.on_written) as writer:
            for of, box, skeleton in self._archives(layout):
                write = functools.partial(_write_from, writer, position)
                nbytes, checksums = write_archive(skeleton, write)
                sums = [block for part in checksums.parts for block in part.blocks]
                shares.append(_Share(of, box, name, position, nbytes, sums))
                position += nbytes
        return shares

    def _archives(self, layout: Sequence[str]) -> Iterator[tuple[str | Keys, Box, Skeleton]]:
        """Yield the archives that this rank writes, in the order of writing."""
        for path, entry in self._entries.items():
            if isinstance(entry, Skeleton):
                yield path, Box((), ()), entry
        for value in (self._values[key] for key in layout if key in self._values):
            # No rank has a part of a tensor without elements, so rank 0 writes it.
            if value.numel() or self.control.rank == 0:
                for box, part in boxes_of(value):
                    yield value.key, box, Skeleton.of(part)

    @override
    def _seal(self, layout: Sequence[str], temporary: Temporary, shares: Sequence[_Share]) -> None:
        table = pickle.dumps(self._table(shares))
        sums: dict[str, dict[int, Sequence[int]]] = {}
        for share in shares:
            if isinstance(share.of, str) and share.sums:
                sums.setdefault(share.file, {})[share.offset] = share.sums
        origin = self.provenance.encoded(table=zlib.crc32(table), sums=sums)
        assert self._rest is not None
        with _created(temporary.path / REST) as writer:
            write_archive(self._rest, writer.write)
        for name, content in ((PROVENANCE, origin), (TABLE, table)):
            with _created(temporary.path / name) as writer:
                writer.write(0, content)

    def _table(self, shares: Sequence[_Share]) -> metadata.Metadata:
        of: dict[str | Keys, list[_Share]] = {}
        for share in shares:
            of.setdefault(share.of, []).append(share)
        table = metadata.Metadata({}, {}, {}, metadata.StorageMeta())
        for path, entry in self._entries.items():
            paths = _paths(path)
            for name in (".".join(map(str, each)) for each in paths):
                if name in table.planner_data:
                    raise ValueError(f"two entries of the checkpoint would be named {name!r}")
                # One path for both names, so that programs that read everything read a weight once.
                table.planner_data[name] = paths[-1]
                if isinstance(entry, str):
                    _note_tensor(table, name, self._values[entry], of.get(entry, []))
                else:
                    table.state_dict_metadata[name] = metadata.BytesStorageMetadata()
                    table.storage_data[metadata.MetadataIndex(name)] = of[path][0].place
        return table

    @override
    def _stream(self, layout: Sequence[str], outside: Sequence[int]) -> NoReturn:
        raise FileNotFoundError(
            f"Saving {self.path!r} failed: the folder that rank 0 created is not visible on ranks"
            f" {list(outside)}. checkpoint='dcp' needs a disk that all ranks share. {_ELSEWHERE}"
        )


def _paths(path: Keys) -> list[Keys]:
    """Return all paths at which programs look for the entry at ``path``."""
    return [path, (WEIGHTS[1], *path[1:])] if path[0] == WEIGHTS[0] else [path]


def _note_tensor(
    table: metadata.Metadata, name: str, value: ShardedValue, shares: Sequence[_Share]
) -> None:
    ordered = sorted(shares, key=lambda share: share.box.offsets)
    held = sum(share.box.numel for share in ordered)
    assert held == value.numel(), f"{name} has {held} elements of {tuple(value.shape)}"
    table.state_dict_metadata[name] = metadata.TensorStorageMetadata(
        metadata.TensorProperties(dtype=value.dtype),
        value.shape,
        [
            metadata.ChunkStorageMetadata(torch.Size(s.box.offsets), torch.Size(s.box.sizes))
            for s in ordered
        ],
    )
    for share in ordered:
        table.storage_data[metadata.MetadataIndex(name, share.box.offsets)] = share.place


# -- boxes -----------------------------------------------------------------------------------------


def boxes_of(value: ShardedValue) -> Iterator[tuple[Box, ShardedValue]]:
    """Cut this rank's part of a tensor into boxes, each a value of its own."""
    if value.part.numel() == value.numel():
        yield Box.whole(value.shape), value
        return
    order = memory_order(value.shape, value.stride())
    stop = value.start + len(value.part)
    position = 0
    for box in boxes_in_memory(value.shape, value.stride(), value.start, stop):
        part = value.part[position : position + box.numel]
        position += box.numel
        stride = dense_stride(box.sizes, order)
        yield box, ShardedValue.of(value.key, part, 0, box.sizes, stride, value.dtype)


def _object(value: Any) -> Skeleton:
    """Take an object apart; raise if one of its tensors is sharded."""
    skeleton = Skeleton.of(value)
    for key in skeleton.sharded_values():
        raise ValueError(
            f"the sharded tensor {key!r} is inside an object, where checkpoint='dcp' cannot store"
            " it. Use checkpoint='file'"
        )
    return skeleton


@contextlib.contextmanager
def _created(
    path: Path, on_written: Callable[[int], object] = lambda nbytes: None
) -> Iterator[Writer]:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    with Writer(path, on_written) as writer:
        yield writer
        writer.sync()


def _write_from(writer: Writer, start: int, place: int, content: Tensor | bytes) -> PartChecksums:
    return writer.write(start + place, content)
