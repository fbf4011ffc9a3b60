"""Reading and writing safetensors files: a JSON header, then the bytes of all tensors.

The format is eight bytes with the header's length, the header ``{name: {dtype, shape,
data_offsets}}``, and the data. It is simple enough to need no package.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.files import Place, mapped, put_in_place, temporary
from lightning_zero.checkpoint.values import ShardedValue

INDEX = "model.safetensors.index.json"
"""The file that says which file of a folder holds which tensor, as Hugging Face has it."""

SINGLE = "model.safetensors"
"""The only file of a folder without an index."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_MOST_HEADER_BYTES = 100_000_000


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, or of a folder with an index or one file, mapped to memory."""
    if path.is_file():
        return _read_file(path)
    index = _index_of(path)
    if index.suffix != ".json":
        return _read_file(index)
    places: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
    tensors: dict[str, Tensor] = {}
    for file in dict.fromkeys(places.values()):
        if Path(file).name != file or not (path / file).is_file():
            raise FileNotFoundError(f"the index {str(index)!r} names {file!r}, which is missing")
        found = _read_file(path / file)
        for name in (name for name, place in places.items() if place == file):
            if name not in found:
                raise ValueError(
                    f"the index {str(index)!r} places {name!r} in {file!r}, which does not hold it"
                )
            tensors[name] = found[name]
    return tensors


def _index_of(folder: Path) -> Path:
    """Return the only file of a folder or its index; of both the file, as Hugging Face does."""
    for name in (SINGLE, INDEX):
        if (folder / name).exists():
            return folder / name
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise FileNotFoundError(
            f"{str(folder)!r} has no {INDEX} and {len(files)} safetensors files; expected an index,"
            " or exactly one file"
        )
    return files[0]


def _read_file(path: Path) -> dict[str, Tensor]:
    nbytes = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MOST_HEADER_BYTES, nbytes - 8):
                raise ValueError(f"its header would be {length} bytes long")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        header.pop("__metadata__", None)
        places = [_place(name, entry, 8 + length, nbytes) for name, entry in header.items()]
        return dict(zip(header, mapped(path, places), strict=True))
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise ValueError(f"{str(path)!r} is damaged or not a safetensors file: {error}") from error


def _place(name: str, entry: Mapping[str, Any], first: int, nbytes: int) -> Place:
    """Return a tensor's place in a file of ``nbytes`` whose data begins at byte ``first``."""
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name!r} has the unknown dtype {entry['dtype']!r}")
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    needed = prod(shape) * dtype.itemsize
    if not 0 <= start <= stop <= nbytes - first or stop - start != needed:
        raise ValueError(
            f"{name!r} of shape {shape} needs {needed} bytes, but its place is bytes"
            f" [{start}, {stop}) of {nbytes - first}"
        )
    return dtype, shape, first + start, first + stop


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], *, max_bytes: int | None = None
) -> list[Path]:
    """Write tensors to one file, or to a folder of files of at most ``max_bytes``.

    A tensor larger than that gets its own file.
    """
    for name, value in tensors.items():
        if value.dtype not in _NAMES:
            raise ValueError(f"safetensors files cannot hold {name!r} of dtype {value.dtype}.")
    if max_bytes is None:
        _write_file(path, tensors)
        return [path]
    groups: list[dict[str, Tensor]] = []
    room = 0
    for name, value in tensors.items():
        if not groups or value.nbytes > room:
            groups.append({})
            room = max_bytes
        groups[-1][name] = value
        room -= value.nbytes
    path.mkdir(parents=True, exist_ok=True)
    count = len(groups)
    names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    files = [path / name for name in (names if count > 1 else [SINGLE][:count])]
    for file, group in zip(files, groups, strict=True):
        _write_file(file, group)
    # Of an earlier model, the index would be read first, and its files be taken for this one's.
    for old in [*path.glob("model*.safetensors"), path / INDEX]:
        if old not in files and (old.name in (SINGLE, INDEX) or _SHARD.fullmatch(old.name)):
            old.unlink(missing_ok=True)
    if count > 1:
        total = sum(value.nbytes for value in tensors.values())
        places = {n: file.name for file, group in zip(files, groups, strict=True) for n in group}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return files


def _write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name, value in tensors.items():
        start, stop = stop, stop + value.nbytes
        shape = list(value.shape)
        header[name] = {"dtype": _NAMES[value.dtype], "shape": shape, "data_offsets": [start, stop]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with temporary(path) as place:
        with place.open("r+b") as file:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
            for value in tensors.values():
                file.write(_bytes_of(value).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(place, path)


def _bytes_of(value: Tensor) -> Tensor:
    if isinstance(value, ShardedValue):  # which is cast as it is written
        return value.part_bytes
    return value.detach().contiguous().view(-1).view(torch.uint8)
