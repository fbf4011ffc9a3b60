"""Bytes of all live tensors, counted by intercepting every operation.

The count knows nothing of units or stages: it follows each storage from the operation that creates
it until it is freed. Fake tensors count like real ones, so a dry run and a real run are measured
the same way.

CPU kernels keep more than torch reports for tensors without data (torch 2.13):

* a loss is computed per element and summed in the same storage, which keeps its size;
* a norm of half-precision inputs with fp32 weights keeps its statistics in fp32.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_Storages = dict[int, "weakref.ref[torch.UntypedStorage]"]

_aten = torch.ops.aten
_LOSSES = {
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.binary_cross_entropy.default,
}
_WEIGHT_OF_NORM = {
    _aten.native_layer_norm.default: 2,
    _aten.native_group_norm.default: 1,
    _aten.native_batch_norm.default: 1,
}
"""The index of the weight among a norm's arguments."""


class LiveBytes(TorchDispatchMode):
    """A context that counts the storages that operations in it create, by their initial size.

    ``as_on_cpu`` adds what CPU kernels would keep if the tensors had data.
    """

    def __init__(self, *, as_on_cpu: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0  # the most bytes alive at once since the last restart
        self._as_on_cpu = as_on_cpu
        self._live: _Storages = {}
        self._ignored: _Storages = {}
        self._total = 0

    def follow(self, tensors: Iterable[Any]) -> None:
        """Also count these tensors, which already exist."""
        for storage in _storages(tensors):
            self._count(storage)

    def ignore(self, tensors: Iterable[Any]) -> None:
        """Leave the storages of these tensors out of the count."""
        for storage in _storages(tensors):
            forget = functools.partial(self._ignored.pop, storage._cdata)
            self._ignored[storage._cdata] = weakref.ref(storage, forget)

    def count(self) -> int:
        """Return the bytes alive now."""
        return self._total

    def restart(self) -> int:
        """Reset the peak to the bytes alive now; return the old peak."""
        before, self.peak = self.peak, self.count()
        return before

    def _count(self, storage: torch.UntypedStorage, more: int = 0) -> None:
        key, size = storage._cdata, storage.nbytes() + more
        if key in self._live or key in self._ignored:
            return
        self._total += size

        def end(_: Any) -> None:
            # As soon as this storage is gone, another may have its address.
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
        for tensor, more in _kept_beyond(func, args, out) if self._as_on_cpu else ():
            self._count(tensor.untyped_storage(), more)
        for storage in _storages(tree_leaves(out)):
            self._count(storage)
        self.peak = max(self.peak, self.count())
        return out


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for value in values:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            yield value.untyped_storage()


def _kept_beyond(func: Any, args: tuple[Any, ...], out: Any) -> Iterator[tuple[Tensor, int]]:
    """Yield the outputs of an operation that hold more than their size, with the extra bytes."""
    if func in _LOSSES:
        if out.shape != args[0].shape:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
            yield out, max(0, prod(shape) - 1) * out.itemsize
    elif func in _WEIGHT_OF_NORM:
        weight = args[_WEIGHT_OF_NORM[func]]
        for statistic in out[1:3] if weight is not None else ():
            yield statistic, statistic.numel() * max(0, weight.itemsize - statistic.itemsize)
