"""A sharded tensor in a state dict: its whole shape, and this rank's part of the values."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_zero.checkpoint.values.boxes import is_dense
from lightning_zero.checkpoint.values.lazy_tensor import LazyTensor
from lightning_zero.tensors import internals, lasting_tensors, properties

_CPU = torch.device("cpu")


class ElsewhereError(RuntimeError):
    """A read of values that other ranks have."""


class ShardedValue(Tensor):
    """A tensor of whole shape in a checkpoint; each rank has a part of its values.

    It may be renamed, dropped, moved, copied, cast and detached, as hooks that edit a checkpoint
    do. Its values are not here, so reading them raises.

    Attributes:
        key: Its identity, the same on every rank; often a ``state_dict`` name.
        part: This rank's values, ``[n]``, on any device; possibly empty. They are cast to the dtype
            of the whole when they are written.
        start: The index of the first of them in the memory order of the whole tensor.
        facts: Shape, stride and dtype of the whole, to be read without a call of torch.
    """

    WHOLE = "whole tensor at"
    """Prefix of the keys of tensors that one rank has whole; other keys are names."""

    key: str
    part: Tensor
    start: int
    facts: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]

    @staticmethod
    def of(
        key: str,
        part: Tensor,
        start: int,
        shape: Iterable[int],
        stride: Iterable[int],
        dtype: torch.dtype | None = None,
    ) -> ShardedValue:
        """Return a tensor of which this rank has ``part``, from element ``start`` on."""
        facts = tuple(shape), tuple(stride), dtype or part.dtype
        with lasting_tensors():
            value = internals.make_wrapper(
                ShardedValue, facts[0], strides=facts[1], dtype=facts[2], device=_CPU
            )
        assert isinstance(value, ShardedValue)
        value.key, value.part, value.start, value.facts = key, part.detach(), start, facts
        return value

    @staticmethod
    def of_whole(value: Tensor, dtype: torch.dtype | None = None) -> ShardedValue:
        """Return a tensor that this rank has whole; tied tensors share a key and stay tied."""
        if isinstance(value, LazyTensor):
            key = f"{ShardedValue.WHOLE} {id(value)}"
            return ShardedValue.of(key, value, 0, value.shape, value.stride(), dtype)
        dense = value.detach()
        dense = dense if is_dense(dense.shape, dense.stride()) else dense.contiguous()
        place = f"{dense.data_ptr()} {tuple(dense.shape)} {dense.stride()} {dense.dtype}"
        key = f"{ShardedValue.WHOLE} {place}"
        if not dense.numel():
            flat, key = dense.reshape(-1), f"{key} {id(value)}"
        else:
            flat = dense.as_strided((dense.numel(),), (1,), dense.storage_offset())
        return ShardedValue.of(key, flat, 0, dense.shape, dense.stride(), dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer calls for metadata; everything else needs values that are not here."""
        if func in _SAME:
            return args[0]
        if func in properties.FACTS:
            with internals.as_plain_tensors():
                return func(*args, **(kwargs or {}))
        if func is Tensor.clone:
            return args[0].with_part(args[0].part.clone())
        if (dtype := _dtype_of_cast(func, args, kwargs)) is not None:
            value = args[0]
            key = f"{value.key} as {dtype}"
            shape, stride, _ = value.facts
            return ShardedValue.of(key, value.part, value.start, shape, stride, dtype)
        value = next((arg for arg in args if isinstance(arg, ShardedValue)), None)
        raise ElsewhereError(
            f"{value.key if value is not None else 'A tensor'!r} in this state dict is sharded over"
            " the ranks, so its values cannot be read here. Read the parameter itself, within"
            " `with lightning_zero.gathered(module):` on all ranks."
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ElsewhereError(f"{func} was called on a tensor that is sharded over the ranks.")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ElsewhereError(
            f"{self.key!r} is sharded over the ranks, so no single rank can pickle it. Save it with"
            " `trainer.save_checkpoint(path)` on all ranks."
        )

    def __deepcopy__(self, memo: Any) -> ShardedValue:
        return self.with_part(self.part.clone())

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedValue({self.key!r}, shape={tuple(self.shape)}, {self.dtype})"

    def with_part(self, part: Tensor) -> ShardedValue:
        """Return the same with the values ``part``."""
        return ShardedValue.of(self.key, part, self.start, *self.facts)

    @property
    def is_whole(self) -> bool:
        """Return whether :meth:`of_whole` made it, of a tensor that this rank has whole."""
        return self.key.startswith(self.WHOLE)

    @property
    def part_bytes(self) -> Tensor:
        """This rank's values as they are written: bytes ``[n]``."""
        part = self.part
        if isinstance(part, LazyTensor):
            lazy, part = part, torch.empty(part.numel(), dtype=part.dtype, device=_CPU)
            lazy.read_to(part, 0)
        return part.to(self.facts[2]).view(torch.uint8)

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.facts[0]) * self.facts[2].itemsize

    @property
    def start_byte(self) -> int:
        """The byte offset of this rank's part in the whole tensor."""
        return self.start * self.facts[2].itemsize


_SAME = {Tensor.detach, Tensor.cpu, Tensor.contiguous}
_CASTS = {
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.float: torch.float32,
    Tensor.double: torch.float64,
}


def _dtype_of_cast(func: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the dtype to which a call casts a sharded value, if that is all that it does."""
    given = [*args[1:], *(kwargs or {}).values()]
    if func is Tensor.to and len(given) == 1 and isinstance(given[0], torch.dtype):
        return given[0]
    return None if given else _CASTS.get(func)
