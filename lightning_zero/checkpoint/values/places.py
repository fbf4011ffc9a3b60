"""The places of values in files, for tensors that are read later.

``InOneRow`` is a box of a tensor at an offset of a file. A ``Chunk`` is a box in a directory's
file, a ``torch.save`` archive among others. Whichever program wrote it, the archive has one dense
tensor, whose bytes lie in one record, so it is in one row too. Nothing is unpickled but the
tensor's own description.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import pickle
import sys
import zipfile
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.checksums import PartChecksums
from lightning_zero.checkpoint.file.records import read_record, stored_record
from lightning_zero.checkpoint.stored_bytes import StoredBytes
from lightning_zero.checkpoint.values.boxes import Box, is_dense, memory_order
from lightning_zero.checkpoint.word_sums import BLOCK_BYTES

BUFFER_BYTES = 8 * 2**20
"""The most bytes that a rank copies at a time, to a file or from a chunk."""


@dataclass(frozen=True)
class InOneRow:
    """A box of a tensor whose values lie contiguously in a file.

    Attributes:
        box: Which of the tensor's elements.
        dtype: Their dtype.
        content: Bytes of the file that hold them, and maybe others.
        order: The dimensions from the slowest to the fastest in the file.
        start: How many elements of ``content`` lie before them.
    """

    box: Box
    dtype: torch.dtype
    content: StoredBytes
    order: tuple[int, ...]
    start: int = 0

    def offset(self, index: int) -> int:
        """Return the file offset of the element at ``index`` in memory order."""
        return self.content.offset + (self.start + index) * self.dtype.itemsize

    def check(self, name: str) -> None:
        """Raise a ``ValueError`` if the values are damaged; ``name`` is the tensor's."""
        size = self.dtype.itemsize
        self.content.check(name, self.start * size, (self.start + self.box.numel) * size)

    def read(self, name: str, region: Box, out: Tensor, *, checks: bool) -> None:
        """Copy ``region``, counted from the box's first element, to ``out`` of its shape."""
        if not region.numel:
            return
        sizes, part = self.box.permuted(self.order).sizes, region.permuted(self.order)
        target = out.permute(self.order)
        if not sizes:
            sizes, part, target = (1,), Box((0,), (1,)), out.view(1)
        if checks and not self.content.parts and not self._is_direct(target):
            # A single checksum covers all of a tensor, which is copied in portions.
            checks = False
            if region == self.box:
                self.check(name)
        row = functools.partial(self.read_row, name, checks=checks)
        self._fill(row, 0, sizes, part, target)

    def read_row(self, name: str, start: int, out: Tensor, *, checks: bool) -> None:
        """Read elements from ``start`` on in memory order into ``out``, ``[n]`` of their dtype."""
        place = (self.start + start) * self.dtype.itemsize
        flat = out.as_strided((out.numel(),), (1,))  # a single element may have any stride
        self.content.read(name, place, flat.view(torch.uint8), checks=checks)

    def _is_direct(self, out: Tensor) -> bool:
        return out.dtype == self.dtype and out.is_contiguous() and out.device.type == "cpu"

    def _fill(
        self,
        read_row: Callable[[int, Tensor], None],
        first: int,
        sizes: tuple[int, ...],
        region: Box,
        out: Tensor,
    ) -> None:
        """Read a region of the tensor at ``first`` whose dimensions are in memory order."""
        row = prod(sizes[1:])
        first, count = first + region.offsets[0] * row, region.sizes[0]
        inner = Box(region.offsets[1:], region.sizes[1:])
        if inner.sizes == sizes[1:] and self._is_direct(out):
            read_row(first, out.view(-1))
            return
        if row * self.dtype.itemsize > BUFFER_BYTES and len(sizes) > 1:
            for index in range(count):
                self._fill(read_row, first + index * row, sizes[1:], inner, out[index])
            return
        at_once = max(1, BUFFER_BYTES // (row * self.dtype.itemsize))
        for begin in range(0, count, at_once):
            number = min(at_once, count - begin)
            rows = torch.empty(number * row, dtype=self.dtype, device="cpu")
            read_row(first + begin * row, rows)
            inside = (slice(None), *inner.slices)
            wanted = rows.view(number, *sizes[1:])[inside]
            out[begin : begin + number].copy_(wanted)


@dataclass(frozen=True)
class Chunk:
    """The place of a box of a tensor: ``nbytes`` of a file from ``offset`` on are its archive.

    ``sums`` are the checksums of its blocks, if this package wrote it.
    """

    box: Box
    file: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    sums: Sequence[int] | None = field(default=None, compare=False)

    def check(self, name: str) -> None:
        """Raise a ``ValueError`` if the values are damaged; ``name`` is the tensor's."""
        self.place.check(name)

    def read(self, name: str, region: Box, out: Tensor, *, checks: bool) -> None:
        """Copy ``region``, counted from the box's first element, to ``out`` of its shape."""
        self.place.read(name, region, out, checks=checks)

    @cached_property
    def place(self) -> InOneRow:
        """The place of the values, as the archive describes it.

        Raises:
            ValueError: The archive does not have a tensor of this shape and dtype.
        """
        try:
            with (
                opened(self.file, self.offset, self.nbytes) as part,
                zipfile.ZipFile(part) as archive,
            ):
                return _place_of(archive, self)
        except FileNotFoundError:
            raise
        except Exception as error:
            # A damaged archive can fail in any way.
            raise ValueError(
                f"{str(self.file)!r} is damaged or not a checkpoint: at byte {self.offset} there"
                f" is no tensor of shape {self.box.sizes}, {self.dtype}: {error}"
            ) from error


def _place_of(archive: zipfile.ZipFile, chunk: Chunk) -> InOneRow:
    records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if "byteorder" in records:
        order = read_record(archive, records["byteorder"]).decode()
        if order != sys.byteorder:
            raise ValueError(f"it was written on a {order}-endian machine")
    described = _Description(io.BytesIO(read_record(archive, records["data.pkl"]))).load()
    if not isinstance(described, _Described):
        raise ValueError(f"it holds a {type(described).__name__}")
    if described.dtype != chunk.dtype or described.shape != chunk.box.sizes:
        raise ValueError(f"it has a tensor of shape {described.shape}, {described.dtype}")
    record = records[f"data/{described.key}"]
    nbytes = chunk.box.numel * chunk.dtype.itemsize
    is_whole = is_dense(described.shape, described.stride) and record.file_size >= nbytes
    if record.compress_type or described.offset or not is_whole:
        raise ValueError("its values are not stored contiguously")
    content = stored_record(chunk.file, archive, record, chunk.offset)
    if chunk.sums is not None:
        part = PartChecksums(0, content.nbytes, 0, array("q", chunk.sums))
        if len(part.blocks) != -(-part.nbytes // BLOCK_BYTES):
            raise ValueError("its block checksums do not match its size")
        content = dataclasses.replace(content, parts=[part])
    dimensions = memory_order(described.shape, described.stride)
    return InOneRow(chunk.box, chunk.dtype, content, dimensions)


@dataclass(frozen=True)
class _Described:
    key: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Description(pickle.Unpickler):
    """An unpickler that makes a description of a pickle's one tensor, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch._utils" and name in _REBUILDERS:
            return _REBUILDERS[name]
        if module in ("torch", "torch.storage"):
            dtype = getattr(torch, name, None)
            return dtype if isinstance(dtype, torch.dtype) else name
        raise ValueError(f"it holds an object of {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _described(storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> _Described:
    # The storage's class tells the dtype; dtypes without a class come at the end.
    dtype = next((value for value in rest if isinstance(value, torch.dtype)), None)
    dtype = dtype or _dtype_of_storage(storage[1])
    return _Described(str(storage[2]), dtype, offset, tuple(size), tuple(stride))


def _dtype_of_storage(name: str) -> torch.dtype:
    dtype: torch.dtype
    for dtype, known in torch.storage._dtype_to_storage_type_map().items():
        if known == name:
            return dtype
    raise ValueError(f"the storage class {name} has no known dtype")


_REBUILDERS: dict[str, Callable[..., Any]] = {
    "_rebuild_tensor_v2": _described,
    "_rebuild_tensor_v3": _described,
    "_rebuild_parameter": lambda data, *rest: data,
}


class _Slice(io.RawIOBase):
    """A part of a file as a file object."""

    def __init__(self, descriptor: int, offset: int, nbytes: int) -> None:
        self._descriptor, self._offset, self._nbytes = descriptor, offset, nbytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        if base + offset < 0:
            raise OSError("it is too short")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._nbytes - self._position)]
        count = os.preadv(self._descriptor, [view], self._offset + self._position)
        self._position += count
        return count

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def opened(file: Path, offset: int, nbytes: int) -> io.BufferedReader:
    """Open a part of ``file`` as a file."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    return io.BufferedReader(_Slice(descriptor, offset, nbytes), 2**14)


def damage_of(file: Path, offset: int, nbytes: int) -> str | None:
    """Return how an archive within a file is damaged, by its checksums; ``None`` if intact."""
    try:
        with opened(file, offset, nbytes) as part, zipfile.ZipFile(part) as archive:
            bad = archive.testzip()
    except Exception as error:
        # A damaged archive can fail in any way.
        return str(error) or type(error).__name__
    return bad and f"Bad CRC-32 for file {bad!r}"
