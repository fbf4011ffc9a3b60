"""Reading a directory of torch.distributed.checkpoint, by whatever program it was written.

    name/
        .metadata           a table: of every tensor its shape, dtype and boxes, and where they lie
        __0_0.distcp ...    archives of torch.save in a row, each a box of a tensor or an object
        meta.pt             what Lightning's strategies put beside: everything that is no tensor
        lightning_zero.json who wrote it, if this package did

The table is a pickle. It is read without making anything but the few classes that such a table
consists of, so a directory from a stranger cannot run code.
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from lightning_zero.checkpoint.boxes import Box
from lightning_zero.checkpoint.chunk import Chunk, read_bytes
from lightning_zero.checkpoint.provenance import FORMAT, PROVENANCE
from lightning_zero.checkpoint.stored import Stored

TABLE = ".metadata"
"""The file that makes a folder a directory of torch.distributed.checkpoint."""

REST = "meta.pt"
"""What is no tensor, under the name that Lightning's strategies give it."""

Keys = tuple[str | int, ...]
"""Where in nested dictionaries and lists something stands."""


def is_directory(path: Path) -> bool:
    """Whether ``path`` is a directory of torch.distributed.checkpoint."""
    return (path / TABLE).is_file()


@dataclass(frozen=True)
class StoredObject:
    """An object that is no tensor, as ``torch.save`` wrote it."""

    file: Path
    offset: int
    nbytes: int

    def read(self, *, weights_only: bool) -> Any:
        """Make the object, of tensors and plain values only unless told otherwise."""
        content = read_bytes(self.file, self.offset, self.nbytes)
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=weights_only)


@dataclass(frozen=True)
class Directory:
    """What a directory holds, by the path of each thing; tied names share one tensor.

    Attributes:
        path: The folder.
        entries: Tensors and objects, none of which is read yet.
    """

    path: Path
    entries: dict[Keys, Stored | StoredObject]

    @classmethod
    def open(cls, path: Path) -> Directory:
        """Read the table, and compare it with the files' sizes.

        Raises:
            FileNotFoundError: A file that the table names is missing.
            ValueError: The table is damaged, or it does not fit itself or the files.
        """
        try:
            table = _Table((path / TABLE).read_bytes()).load()
            return cls(path, dict(_entries(path, table)))
        except (FileNotFoundError, PermissionError, MemoryError):
            raise
        except Exception as error:
            # A damaged pickle can fail in any way.
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"{str(path)!r} cannot be read as a checkpoint: {reason}") from error

    @property
    def chunks(self) -> list[Chunk]:
        """Every box of every tensor, once."""
        tensors = (value for value in self.entries.values() if isinstance(value, Stored))
        return list(dict.fromkeys(chunk for tensor in tensors for chunk in tensor.chunks))

    @property
    def objects(self) -> list[StoredObject]:
        """Every object that is no tensor, once."""
        found = (value for value in self.entries.values() if isinstance(value, StoredObject))
        return list(dict.fromkeys(found))

    @property
    def provenance(self) -> dict[str, Any] | None:
        """Who wrote the directory, if this package did."""
        file = self.path / PROVENANCE
        told = json.loads(file.read_text()) if file.is_file() else None
        return told if isinstance(told, dict) else None

    def check_version(self) -> None:
        """Raise a ``ValueError`` if a later version of this package wrote it."""
        told = self.provenance
        if told is not None and int(told.get("format", 0)) > FORMAT:
            raise ValueError(
                f"{str(self.path)!r} has format {told['format']} of a later lightning-zero, this"
                f" one reads up to {FORMAT}; update the package"
            )


def _entries(path: Path, table: Any) -> Iterator[tuple[Keys, Stored | StoredObject]]:
    if not isinstance(table, metadata.Metadata) or not isinstance(table.storage_data, Mapping):
        raise ValueError("its table is of another kind, as some writers of other storages have it")
    sizes = {name: _size(path, name) for name in {i.relative_path for i in _places(table)}}
    paths: Mapping[str, Keys] = table.planner_data or {}
    tied: dict[Any, Stored] = {}
    for name, stored in table.state_dict_metadata.items():
        where = tuple(paths.get(name, (name,)))
        if isinstance(stored, metadata.BytesStorageMetadata):
            place = _place(table, sizes, name, None)
            yield where, StoredObject(path / place.relative_path, place.offset, place.length)
            continue
        tensor = _tensor(path, table, sizes, name, stored)
        yield (
            where,
            tied.setdefault((tensor.chunks, tensor.shape), tensor) if tensor.chunks else tensor,
        )


def _tensor(
    path: Path, table: metadata.Metadata, sizes: Mapping[str, int], name: str, stored: Any
) -> Stored:
    shape, dtype = tuple(stored.size), stored.properties.dtype
    chunks = []
    for part in stored.chunks:
        box = Box(tuple(part.offsets), tuple(part.sizes))
        if not box.is_inside(shape):
            raise ValueError(f"{name!r} of shape {shape} has no box {box.sizes} at {box.offsets}")
        place = _place(table, sizes, name, torch.Size(part.offsets))
        file = path / place.relative_path
        chunks.append(Chunk(box, file, place.offset, place.length, dtype))
    held, needed = sum(chunk.box.numel for chunk in chunks), Box.whole(shape).numel
    if held != needed:
        raise ValueError(f"{name!r} of shape {shape} has {held} elements there, not {needed}")
    return Stored.of(chunks, shape, dtype)


def _places(table: metadata.Metadata) -> Iterator[Any]:
    yield from table.storage_data.values()


def _place(
    table: metadata.Metadata, sizes: Mapping[str, int], name: str, offsets: torch.Size | None
) -> Any:
    place = table.storage_data.get(metadata.MetadataIndex(name, offsets))
    if place is None:
        at = "" if offsets is None else f" at {tuple(offsets)}"
        raise ValueError(f"its table does not say where {name!r}{at} lies")
    if getattr(place, "transform_descriptors", None):
        raise ValueError(
            f"{name!r} was transformed by {', '.join(place.transform_descriptors)} when it was"
            " written; read it with torch.distributed.checkpoint"
        )
    if (
        place.offset < 0
        or place.length < 0
        or place.offset + place.length > sizes[place.relative_path]
    ):
        raise ValueError(
            f"the file {place.relative_path!r} is too short: {name!r} would be at bytes"
            f" [{place.offset}, {place.offset + place.length}) of {sizes[place.relative_path]}"
        )
    return place


def _size(path: Path, name: str) -> int:
    if Path(name).name != name:
        raise ValueError(f"its table names {name!r}, which is outside of it")
    try:
        return os.stat(path / name).st_size
    except FileNotFoundError:
        raise FileNotFoundError(
            f"the file {name!r} of the checkpoint {str(path)!r} is missing"
        ) from None


class _Table(pickle.Unpickler):
    """Makes a table, and nothing that a table does not consist of."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _OF_A_TABLE:
            return _OF_A_TABLE[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] == "pathlib":  # where it was saved, on whatever system
            return pathlib.PurePosixPath
        raise ValueError(f"its table holds an object of {module}.{name}")


_OF_A_TABLE: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # Private, but it is what every table has: no reader can do without it.
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
