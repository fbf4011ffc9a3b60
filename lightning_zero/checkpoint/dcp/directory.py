"""Reading a directory of torch.distributed.checkpoint, whichever program wrote it.

    name/
        .metadata           a table: the shape, dtype and boxes of each tensor, and where they lie
        __0_0.distcp ...    concatenated torch.save archives, each a box of a tensor or an object
        meta.pt             everything but tensors, if a Lightning strategy wrote it
        lightning_zero.json who wrote it, if this package did

The table is a pickle. Reading it makes only the few classes that such a table consists of, so a
directory from a stranger cannot run code.
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import pickle
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from lightning_zero.checkpoint.file.format import (
    PROVENANCE,
    REST,
    TABLE,
    LaterFormat,
    check_version,
)
from lightning_zero.checkpoint.values.boxes import Box
from lightning_zero.checkpoint.values.lazy_tensor import LazyTensor
from lightning_zero.checkpoint.values.places import Chunk, damage_of, opened
from lightning_zero.tensors import internals

Keys = tuple[str | int, ...]
"""The path of an entry in nested dictionaries and lists."""


def is_directory(path: Path) -> bool:
    """Return whether ``path`` is a directory of torch.distributed.checkpoint."""
    return (path / TABLE).is_file()


@dataclass(frozen=True)
class StoredObject:
    """An object other than a tensor, as ``torch.save`` wrote it."""

    file: Path
    offset: int
    nbytes: int

    def read(self, *, weights_only: bool) -> Any:
        """Unpickle the object; if ``weights_only``, it may hold tensors and plain values only."""
        damage = damage_of(self.file, self.offset, self.nbytes)
        if damage is not None:
            raise ValueError(f"{str(self.file)!r} is damaged at byte {self.offset}: {damage}")
        with opened(self.file, self.offset, self.nbytes) as part:
            return internals.load_to_host(part, weights_only=weights_only)


@dataclass(frozen=True)
class Directory:
    """The content of a directory, by path; tied names share one tensor.

    The ``entries`` are not read yet. ``provenance`` is ``None`` if another program wrote it.
    """

    path: Path
    entries: dict[Keys, LazyTensor | StoredObject]
    provenance: dict[str, Any] | None

    @classmethod
    def open(cls, path: Path) -> Directory:
        """Read the table; raise unless it is consistent and fits the files and their sizes."""
        origin = _origin(path) or {}
        try:
            check_version(path, origin)
            content = (path / TABLE).read_bytes()
            table, checksum = _Table(content).load(), zlib.crc32(content)
            if origin.get("table", checksum) != checksum:
                raise ValueError(f"its table {TABLE!r} does not match its checksum")
            entries = dict(_entries(path, table, _sums(origin)))
            return cls(path, entries, origin or None)
        except (FileNotFoundError, PermissionError, MemoryError, LaterFormat):
            raise
        except Exception as error:
            # A damaged pickle can fail in any way.
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"{str(path)!r} cannot be read as a checkpoint: {reason}") from error

    @property
    def chunks(self) -> list[Chunk]:
        """Every box of every tensor, once."""
        tensors = (value for value in self.entries.values() if isinstance(value, LazyTensor))
        chunks = (chunk for tensor in tensors for chunk in tensor.places)
        return list(dict.fromkeys(chunk for chunk in chunks if isinstance(chunk, Chunk)))

    def damage(self) -> list[str]:
        """Return a line for each box and object that its checksums show to be damaged."""
        objects = (value for value in self.entries.values() if isinstance(value, StoredObject))
        places: list[Chunk | StoredObject] = [*self.chunks, *dict.fromkeys(objects)]
        return [
            f"{place.file.name} is damaged at byte {place.offset}: {reason}"
            for place in places
            if (reason := damage_of(place.file, place.offset, place.nbytes)) is not None
        ]

    @property
    def identity(self) -> str:
        """A fingerprint of the content: the number of files, and a checksum of sizes and tables."""
        files = sorted(file for file in self.path.iterdir() if file.is_file())
        index = [(file.name, file.stat().st_size) for file in files]
        tables = [self.path / name for name in (TABLE, PROVENANCE, REST)]
        held = [zlib.crc32(file.read_bytes()) for file in tables if file.is_file()]
        return f"{len(files)} files, checksum {zlib.crc32(repr((index, held)).encode()):08x}"


def _entries(
    path: Path, table: Any, sums: Mapping[tuple[str, int], Sequence[int]]
) -> Iterator[tuple[Keys, LazyTensor | StoredObject]]:
    if not isinstance(table, metadata.Metadata) or not isinstance(table.storage_data, Mapping):
        raise ValueError("its table has an unknown form, perhaps of another kind of storage")
    sizes = {
        name: _size(path, name) for name in {i.relative_path for i in table.storage_data.values()}
    }
    paths: Mapping[str, Keys] = table.planner_data or {}
    tied: dict[Any, LazyTensor] = {}
    for name, entry in table.state_dict_metadata.items():
        where = tuple(paths.get(name, (name,)))
        if isinstance(entry, metadata.BytesStorageMetadata):
            place = _place(table, sizes, name, None)
            yield where, StoredObject(path / place.relative_path, place.offset, place.length)
            continue
        tensor = _tensor(path, table, sizes, name, entry, sums)
        if tensor.places:
            tensor = tied.setdefault((tensor.places, tensor.shape), tensor)
        yield where, tensor


def _tensor(
    path: Path,
    table: metadata.Metadata,
    sizes: Mapping[str, int],
    name: str,
    entry: Any,
    sums: Mapping[tuple[str, int], Sequence[int]],
) -> LazyTensor:
    shape, dtype = tuple(entry.size), entry.properties.dtype
    chunks = []
    for part in entry.chunks:
        box = Box(tuple(part.offsets), tuple(part.sizes))
        if not box.is_inside(shape):
            raise ValueError(
                f"{name!r} of shape {shape} has no box of shape {box.sizes} at {box.offsets}"
            )
        place = _place(table, sizes, name, torch.Size(part.offsets))
        file = path / place.relative_path
        of_box = sums.get((place.relative_path, place.offset))
        chunks.append(Chunk(box, file, place.offset, place.length, dtype, of_box))
    held, needed = sum(chunk.box.numel for chunk in chunks), Box.whole(shape).numel
    if held != needed:
        raise ValueError(f"{name!r} of shape {shape} has {held} stored elements; expected {needed}")
    tensor = LazyTensor.of(chunks, shape, dtype)
    tensor.label = name
    return tensor


def _origin(path: Path) -> dict[str, Any] | None:
    """Return the record of a directory's origin, if this package wrote it; raise if damaged."""
    file = path / PROVENANCE
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_bytes())
        if not isinstance(record, dict) or not isinstance(record.get("sums", {}), dict):
            raise ValueError("it is not a JSON object of the expected form")
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is damaged: {error}") from error
    if not (path / REST).is_file():
        raise FileNotFoundError(f"the file {REST!r} of the checkpoint {str(path)!r} is missing")
    return record


def _sums(origin: Mapping[str, Any]) -> dict[tuple[str, int], Sequence[int]]:
    """Return the block checksums of boxes by file and offset."""
    return {
        (file, int(offset)): sums
        for file, of_file in origin.get("sums", {}).items()
        for offset, sums in of_file.items()
    }


def _place(
    table: metadata.Metadata, sizes: Mapping[str, int], name: str, offsets: torch.Size | None
) -> Any:
    place = table.storage_data.get(metadata.MetadataIndex(name, offsets))
    if place is None:
        at = "" if offsets is None else f" at {tuple(offsets)}"
        raise ValueError(f"its table does not say where {name!r}{at} is stored")
    if getattr(place, "transform_descriptors", None):
        raise ValueError(
            f"{name!r} was transformed by {', '.join(place.transform_descriptors)} when it was"
            " written. Read it with torch.distributed.checkpoint"
        )
    start, stop, size = place.offset, place.offset + place.length, sizes[place.relative_path]
    if not 0 <= start <= stop <= size:
        raise ValueError(
            f"the file {place.relative_path!r} is too short: {name!r} would be at bytes"
            f" [{start}, {stop}) of {size}"
        )
    return place


def _size(path: Path, name: str) -> int:
    if Path(name).name != name:
        raise ValueError(f"its table names {name!r}, which is outside the folder")
    try:
        return os.stat(path / name).st_size
    except FileNotFoundError:
        raise FileNotFoundError(
            f"the file {name!r} of the checkpoint {str(path)!r} is missing"
        ) from None


class _Table(pickle.Unpickler):
    """An unpickler that makes only the classes that a table consists of."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _OF_A_TABLE:
            return _OF_A_TABLE[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] == "pathlib":  # the path it was saved to, on any system
            return pathlib.PurePosixPath
        raise ValueError(f"its table holds an object of {module}.{name}")


_OF_A_TABLE: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # Private, but every table has it, so no reader can do without it.
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
            *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            "_MEM_FORMAT_ENCODING",
        )
    },
}
