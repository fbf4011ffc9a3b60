"""A whole tensor that lies in several places, and is put together when it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zero.checkpoint.values.sharded_value import ShardedValue
from lightning_zero.tensors import internals, lasting_tensors


class Deferred(ShardedValue):
    """A contiguous tensor of which this process has all values, but not in one row of memory.

    It stands in a checkpoint like any :class:`ShardedValue`, and holds no memory: each use of
    :attr:`part` reads the values anew.

    Attributes:
        read: Gives the values, ``[n]``.
    """

    read: Callable[[], Tensor]

    @staticmethod
    def reading(
        key: str, read: Callable[[], Tensor], shape: Iterable[int], dtype: torch.dtype
    ) -> Deferred:
        """Return the tensor of ``shape`` whose values ``read`` gives, cast to ``dtype``."""
        shape = tuple(shape)
        strides = torch.empty(shape, device="meta").stride()
        with lasting_tensors():
            made = internals.make_wrapper(Deferred, shape, strides=strides, dtype=dtype)
        assert isinstance(made, Deferred)
        made.key, made.start, made.read = key, 0, read
        return made

    @property
    @override
    def part(self) -> Tensor:  # type: ignore[override]
        return self.read()

    def cast(self, dtype: torch.dtype) -> Deferred:
        """Return the same in another dtype."""
        return Deferred.reading(self.key, self.read, self.shape, dtype)
