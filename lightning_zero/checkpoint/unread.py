"""Archives of ``torch.save`` whose large tensors are neither read nor mapped.

A private mapping of a file counts as memory that may be needed, so the system refuses to map a file
that is larger than its memory. Here ``torch.load`` rebuilds an archive without its storages, and
each tensor becomes a :class:`LazyTensor` that finds its bytes in the file, which stays open. Small
tensors are read at once.
"""

from __future__ import annotations

import dataclasses
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_zero.checkpoint.checksums import CheckedRange, check
from lightning_zero.checkpoint.file.records import stored_records
from lightning_zero.checkpoint.open_file import OpenFile
from lightning_zero.checkpoint.values.boxes import Box, is_dense, memory_order
from lightning_zero.checkpoint.values.chunk import InOneRow, read_bytes
from lightning_zero.checkpoint.values.lazy_tensor import LazyTensor
from lightning_zero.tensors import is_wrapper, lasting_tensors, tensors_in

SMALL_BYTES = 2**20
"""Tensors up to this size are read at once."""


class NeedsMapping(Exception):
    """Content of a file that cannot be left unread, but can be mapped."""


def are_supported() -> bool:
    """Return whether this torch tells where a storage that it does not read lies; 2.13 does."""
    return hasattr(torch.serialization, "_is_meta_location")


def unread(path: Path, archive: zipfile.ZipFile, *, weights_only: bool) -> Any:
    """Return the content of a file, with its large tensors unread.

    Raises:
        NeedsMapping: The file holds something that cannot be left unread.
    """
    order = {info.filename.partition("/")[2]: info for info in archive.infolist()}.get("byteorder")
    if order is not None and archive.read(order).decode() != sys.byteorder:
        raise NeedsMapping("values in another byte order")
    with _Unread(path, archive):
        value = torch.load(path, map_location="meta", weights_only=weights_only)
    if any(map(is_wrapper, tensors_in(value))):
        raise NeedsMapping("tensors that wrap others")
    return value


class _Unread(TorchFunctionMode):
    """A mode that turns tensors rebuilt without their storages into lazy tensors of the file."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        super().__init__()
        file = OpenFile(path)
        self._records = {
            record.offset: dataclasses.replace(record, kept=file)
            for record in stored_records(path, archive)
        }
        self._read: dict[int, torch.UntypedStorage] = {}
        self._found: dict[Any, LazyTensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and args == ((0,),):
            if kwargs.keys() != {"dtype", "device"}:
                raise NeedsMapping("a tensor whose dtype has no storage type")
            # ``set_``, which makes a tensor from a storage, is a method that modes do not see.
            return _Empty(kwargs["dtype"], self.rebuilt)
        if args and isinstance(args[0], LazyTensor) and func in _PASSED_OVER:
            return args[0]
        return func(*args, **kwargs)

    def rebuilt(
        self,
        dtype: torch.dtype,
        storage: torch.UntypedStorage,
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> Tensor:
        """Return the tensor over a storage that was not read."""
        place = int(getattr(storage, "_checkpoint_offset", -1))
        if place not in self._records and storage.nbytes():
            raise NeedsMapping("a storage without its own place in the file")
        # Whether a complex tensor is a conjugate is set later.
        is_small = storage.nbytes() <= SMALL_BYTES or dtype.is_complex
        if is_small or not is_dense(shape, stride):
            with lasting_tensors():
                tensor = torch.empty(0, dtype=dtype)
                return tensor.set_(self._in_memory(place), offset, shape, stride)
        content = self._records[place]
        key = place, dtype, offset, tuple(shape), tuple(stride)
        if key not in self._found:
            order = memory_order(shape, stride)
            row = InOneRow(Box.whole(shape), dtype, content, order, offset)
            self._found[key] = LazyTensor.of([row], shape, dtype, stride)
        return self._found[key]

    def _in_memory(self, place: int) -> torch.UntypedStorage:
        if place not in self._records:
            return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        if place not in self._read:
            content = self._records[place]
            check([CheckedRange("a small tensor", content, 0, content.nbytes)])
            self._read[place] = read_bytes(content).untyped_storage()
        return self._read[place]


class _Empty(NamedTuple):
    """A stand-in for an empty tensor, whose ``set_`` makes a tensor over a storage."""

    dtype: torch.dtype
    rebuilt: Callable[..., Tensor]

    def set_(self, *place: Any) -> Tensor:
        """Return the tensor for a storage, an offset, a shape and a stride."""
        return self.rebuilt(self.dtype, *place)


_PASSED_OVER = {
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    Tensor.requires_grad_,
    vars(torch._C.TensorBase)["_backward_hooks"].__set__,
}
"""Calls on a rebuilt tensor that would read it, and are skipped."""
