"""Bytes of every tensor that is alive, counted by following each operation.

The count knows nothing of units or stages: it follows storages from the operation that makes them
until nobody holds them. It counts fake tensors like real ones, so a dry run and a real
run are measured by the same ruler.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KeptBeyond = Callable[[Any, tuple[Any, ...], Any], Iterable[tuple[Tensor, int]]]
_Storages = dict[int, "weakref.ref[torch.UntypedStorage]"]


class LiveBytes(TorchDispatchMode):
    """A context that counts the storages that operations within it make.

    Args:
        resizing: Ask every storage for its size after every operation, because something resizes
            them. Without it a storage's first size counts, which is much faster.
        on_operation: Called after every operation.
        kept_beyond: Says of an operation, its arguments and its result which outputs hold more
            bytes than their storages show, and how many.
    """

    def __init__(
        self,
        *,
        resizing: bool = False,
        on_operation: Callable[[], None] | None = None,
        kept_beyond: KeptBeyond | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0  # the most bytes that were alive at once since the last restart
        self._resizing = resizing
        self._on_operation = on_operation
        self._kept_beyond = kept_beyond
        self._live: _Storages = {}
        self._ignored: _Storages = {}
        self._total = 0

    def follow(self, tensors: Iterable[Any]) -> None:
        """Count these too, which were there before."""
        for storage in _storages(tensors):
            self._count(storage)

    def ignore(self, tensors: Iterable[Any]) -> None:
        """Leave the storages of these tensors out of the count."""
        for storage in _storages(tensors):
            forget = functools.partial(self._ignored.pop, storage._cdata)
            self._ignored[storage._cdata] = weakref.ref(storage, forget)

    def count(self) -> int:
        """Bytes alive now."""
        if not self._resizing:
            return self._total
        held = (ref() for ref in tuple(self._live.values()))
        return sum(storage.nbytes() for storage in held if storage is not None)

    def restart(self) -> int:
        """Begin a new peak at what is alive now; returns the old one."""
        before, self.peak = self.peak, self.count()
        return before

    def _count(self, storage: torch.UntypedStorage, more: int = 0) -> None:
        key, size = storage._cdata, storage.nbytes() + more
        if key in self._live or key in self._ignored:
            return
        self._total += size

        def end(_: Any) -> None:
            # The address is free for another storage as soon as this one is gone.
            del self._live[key]
            self._total -= size

        self._live[key] = weakref.ref(storage, end)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            out = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            # A number read from a tensor without data (`.item()`, `if x.any()`) is taken as zero.
            dtype = args[0].dtype
            return False if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0
        if self._kept_beyond is not None:
            for tensor, more in self._kept_beyond(func, args, out):
                self._count(tensor.untyped_storage(), more)
        for storage in _storages(tree_leaves(out)):
            self._count(storage)
        self.peak = max(self.peak, self.count())
        if self._on_operation is not None:
            self._on_operation()
        return out


def _storages(values: Iterable[Any]) -> Iterable[torch.UntypedStorage]:
    for value in values:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            yield value.untyped_storage()
