"""Archives of ``torch.save`` whose large tensors are not read yet.

``torch.load`` rebuilds an archive without its storages, and tells where each lies in the file, when
it finds itself under a ``FakeTensorMode``. Each tensor becomes a :class:`LazyTensor` that finds its
bytes in the file, which stays open. Small tensors are read and checked at once.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from lightning_zero.checkpoint.file.records import StoredRecords
from lightning_zero.checkpoint.stored_bytes import StoredBytes
from lightning_zero.checkpoint.values.boxes import Box, is_dense, memory_order
from lightning_zero.checkpoint.values.lazy_tensor import LazyTensor
from lightning_zero.checkpoint.values.places import InOneRow
from lightning_zero.checkpoint.word_sums import BLOCK_BYTES
from lightning_zero.tensors import internals, lasting_tensors, named_tensors, tensors_in

SMALL_BYTES = BLOCK_BYTES
"""Storages up to this size are read at once."""


class MustBeReadError(Exception):
    """Content of a file that cannot be left unread."""


def unread(path: Path, archive: zipfile.ZipFile, *, weights_only: bool) -> Any:
    """Return the content of a file, with its large tensors unread.

    Raises:
        MustBeReadError: The file holds something that cannot be left unread.
    """
    for info in archive.infolist():
        if info.filename.endswith("/byteorder") and archive.read(info).decode() != sys.byteorder:
            raise MustBeReadError("values in another byte order")
    rebuilding = _Rebuilding(StoredRecords(path, archive))
    with rebuilding, _seeming_fake(), lasting_tensors():
        value = internals.load_to_host(path, weights_only=weights_only)
    if rebuilding.leaves_any:
        raise MustBeReadError("storages without tensors")
    if rebuilding.leaves_tensors:  # else there is nothing to look for
        if any(isinstance(t, LazyTensor) and _is_seen_otherwise(t) for t in tensors_in(value)):
            raise MustBeReadError("conjugated or negated views")
        for name, tensor in named_tensors(value):
            if isinstance(tensor, LazyTensor):
                tensor.label = name
    return value


@contextlib.contextmanager
def _seeming_fake() -> Iterator[None]:
    """Enter a context in which torch believes that tensors are fake, though all of them are real.

    The mode itself would also make fake tensors of what objects create while they are unpickled.
    """
    with tracing(TracingContext(FakeTensorMode())):
        yield


class _Rebuilding(TorchFunctionMode):
    """A mode that turns tensors rebuilt without their storages into lazy tensors of the file.

    Attributes:
        leaves_tensors: Whether any tensor was left unread.
    """

    leaves_tensors = False

    def __init__(self, records: StoredRecords) -> None:
        super().__init__()
        self._records = records
        self._found: dict[Any, LazyTensor] = {}
        self._storages: dict[int | None, torch.UntypedStorage] = {}
        self._places: set[int] = set()

    @property
    def leaves_any(self) -> bool:
        """Return whether there are storages that belong to no tensor."""
        return len(self._places) < self._records.num_filled

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and args == ((0,),) and kwargs.get("device") == _META:
            # ``set_``, which makes a tensor from a storage, is a method that modes do not see.
            if "requires_grad" not in kwargs:
                return _Empty(kwargs["dtype"], self._rebuilt)
            # Of dtypes without a storage class, torch returns the tensor itself, not the result.
            empty = LazyTensor.of([], (0,), kwargs["dtype"])
            vars(empty)["set_"] = functools.partial(self._replace, empty)
            return empty
        if args and isinstance(args[0], LazyTensor):
            if func in _PASSED_OVER:
                return args[0]
            if func is Tensor.untyped_storage:  # to ask for the device of a fake one
                return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)

    def _replace(self, empty: LazyTensor, *place: Any) -> None:
        rebuilt = self._rebuilt(empty.dtype, *place, is_shared=False)
        torch.utils.swap_tensors(empty, rebuilt)  # type: ignore[no-untyped-call]

    def _rebuilt(
        self,
        dtype: torch.dtype,
        storage: torch.UntypedStorage,
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        *,
        is_shared: bool = True,
    ) -> Tensor:
        """Return the tensor over a storage that was not read."""
        # This mode need not see what follows, which would take twice as long.
        with internals.without_interception():
            nbytes = storage.nbytes()
            place = storage._checkpoint_offset if nbytes else -1
            if nbytes <= SMALL_BYTES or not is_dense(shape, stride):
                content = self._read(place, nbytes)
                return torch.empty(0, dtype=dtype, device="cpu").set_(
                    content, offset, shape, stride
                )
            self.leaves_tensors = True
            key = place, dtype, offset, tuple(shape), tuple(stride)
            if is_shared and key in self._found:
                return self._found[key]
            record, order = self._record(place, nbytes), memory_order(shape, stride)
            row = InOneRow(Box.whole(shape), dtype, record, order, offset)
            found = LazyTensor.of([row], shape, dtype, stride)
            return self._found.setdefault(key, found) if is_shared else found

    def _record(self, place: int | None, nbytes: int) -> StoredBytes:
        record = None if place is None else self._records.at(place, nbytes)
        if place is None or record is None:
            raise MustBeReadError("a storage without its own place in the file")
        self._places.add(place)
        return record

    def _read(self, place: int | None, nbytes: int) -> torch.UntypedStorage:
        if not nbytes:
            return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        if place not in self._storages:
            values = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._record(place, nbytes).read("a small tensor", 0, values)
            self._storages[place] = values.untyped_storage()
        return self._storages[place]


class _Empty:
    """A stand-in for an empty tensor, whose ``set_`` makes a tensor over a storage."""

    def __init__(self, dtype: torch.dtype, rebuilt: Callable[..., Tensor]) -> None:
        self._dtype, self._rebuilt = dtype, rebuilt

    def set_(self, *place: Any) -> Tensor:
        """Return the tensor for a storage, an offset, a shape and a stride."""
        return self._rebuilt(self._dtype, *place)


_META = torch.device("meta")
_PASSED_OVER = {
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    Tensor.requires_grad_,
    vars(torch._C.TensorBase)["_backward_hooks"].__set__,
}
"""Calls on a rebuilt tensor that would read it, and are skipped."""


def _is_seen_otherwise(tensor: LazyTensor) -> bool:
    """Return whether the elements are seen otherwise than they are stored."""
    with internals.as_plain_tensors():
        return tensor.is_conj() or tensor.is_neg()
