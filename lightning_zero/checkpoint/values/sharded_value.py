"""A sharded tensor in a state dict: its whole shape, and this rank's part of the values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zero.checkpoint.values.boxes import is_dense
from lightning_zero.checkpoint.values.lazy_tensor import LazyTensor
from lightning_zero.checkpoint.values.read_on_use import ReadOnUse, call_with_values
from lightning_zero.comm import Control, SyncPoint
from lightning_zero.tensors import internals, lasting_tensors, properties, runs_outside

_CPU = torch.device("cpu")


class ElsewhereError(RuntimeError):
    """A read of values that other ranks have."""


class ShardedValue(ReadOnUse):
    """A tensor of whole shape in a checkpoint; each rank has a part of its values.

    It may be renamed, dropped, moved, copied, cast and detached, as hooks that edit a checkpoint
    do. Any other use gathers the values, so all ranks make it together.

    Attributes:
        key: Its identity, the same on every rank; often a ``state_dict`` name.
        part: This rank's values, ``[n]``, on any device; possibly empty. They are cast to the dtype
            of the whole when they are written.
        start: The index of the first of them in the memory order of the whole tensor.
        facts: Shape, stride and dtype of the whole, to be read without a call of torch.
        control: The ranks that have the parts; ``None`` if they cannot be gathered.
        is_own: Whether it is a tensor of its own, not the module's or the optimizer's.
    """

    WHOLE = "whole tensor at"
    """Prefix of the keys of tensors that one rank has whole; other keys are names."""

    key: str
    part: Tensor
    start: int
    facts: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
    control: Control | None
    is_own: bool

    @staticmethod
    def of(
        key: str,
        part: Tensor,
        start: int,
        shape: Iterable[int],
        stride: Iterable[int],
        dtype: torch.dtype | None = None,
        *,
        control: Control | None = None,
        is_own: bool = False,
    ) -> ShardedValue:
        """Return a tensor of which this rank has ``part``, from element ``start`` on."""
        facts = tuple(shape), tuple(stride), dtype or part.dtype
        with lasting_tensors():
            value = internals.make_wrapper(
                ShardedValue, facts[0], strides=facts[1], dtype=facts[2], device=_CPU
            )
        assert isinstance(value, ShardedValue)
        value.key, value.part, value.start, value.facts = key, part.detach(), start, facts
        value.control, value.is_own, value.value = control, is_own, None
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
        """Answer calls for metadata, and copy and cast parts; everything else needs values."""
        if func in properties.FACTS:
            with internals.as_plain_tensors():
                return func(*args, **(kwargs or {}))
        first = args[0]
        if func is Tensor.detach and not args[0].requires_grad:
            return args[0]
        if isinstance(first, ShardedValue) and first.value is None:
            if func in _SAME:
                return first
            if func is Tensor.clone and not kwargs:
                return first.with_part(first.part.clone())
            if func in _CASTS and (cast := first._cast(func, args[1:], kwargs or {})) is not None:
                return cast
        result, wholes = call_with_values(func, args, kwargs or {})
        # What returns the tensor itself returns the sharded one.
        return next((value for value, whole in wholes if whole is result), result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return call_with_values(func, args, kwargs or {})[0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.with_part(self.part.clone()) if self.value is None else self.value.clone()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedValue({self.key!r}, shape={tuple(self.shape)}, {self.dtype})"

    def with_part(self, part: Tensor) -> ShardedValue:
        """Return the same with the values ``part``."""
        return self._other(self.key, part, self.facts[2])

    def _other(self, key: str, part: Tensor, dtype: torch.dtype) -> ShardedValue:
        shape, stride, _ = self.facts
        more: Any = {"control": self.control, "is_own": True}
        return ShardedValue.of(key, part, self.start, shape, stride, dtype, **more)

    def _cast(self, func: Any, args: Any, kwargs: Any) -> ShardedValue | None:
        """Return the result if a call at most casts the value; ``None`` if it does more."""
        if "memory_format" in kwargs:
            return None
        dtype = self.facts[2]
        with internals.without_interception():
            probe = torch.empty((), dtype=dtype, device=_CPU)
            result = func(probe, *args, **kwargs)
        if result is probe:
            return self
        if not isinstance(result, Tensor) or result.device != _CPU:
            return None
        if result.dtype is dtype:
            return self.with_part(self.part.clone())
        return self._other(f"{self.key} as {result.dtype}", self.part, result.dtype)

    @override
    @runs_outside
    def read(self) -> Tensor:
        if self.value is not None:
            return self.value
        if self.control is None or not _may_gather:
            raise ElsewhereError(
                f"{self.key!r} in this state dict is sharded over the ranks, so its values cannot"
                " be read here. Read the parameter itself, within"
                " `with lightning_zero.gathered(module):` on all ranks."
            )
        shape, stride, dtype = self.facts
        with internals.without_interception(), lasting_tensors():
            self.control.call(SyncPoint.VALUE, about=repr(self.key)).wait()
            parts = self.control.gather_objects((self.start, self.part.to("cpu", copy=True)))
            whole = torch.empty_strided(shape, stride, dtype=dtype, device=_CPU)
            flat = whole.as_strided((prod(shape),), (1,))
            for start, part in parts:  # of cut parameters, not in the order of the ranks
                flat[start : start + len(part)] = part
        return whole

    @override
    def keep(self, whole: Tensor, *, is_changed: bool) -> None:
        if is_changed and not self.is_own:
            raise RuntimeError(_IN_PLACE.format(self.key))
        self.value = whole

    def settled(self) -> Tensor:
        """Return what is to be saved: the value itself, or the whole tensor if that may be another.

        Raises:
            RuntimeError: The whole tensor is another, but not one of its own.
        """
        if self.value is None or self.is_own:
            return self if self.value is None else self.value
        flat = self.value.as_strided((prod(self.facts[0]),), (1,))
        if not torch.equal(flat[self.start :][: len(self.part)], self.part.cpu()):
            raise RuntimeError(_IN_PLACE.format(self.key))
        return self

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


_may_gather = True


@contextlib.contextmanager
def without_gathering() -> Iterator[None]:
    """Enter a context, of one rank alone, in which reading values raises."""
    global _may_gather
    _may_gather = False
    try:
        yield
    finally:
        _may_gather = True


_IN_PLACE = (
    "{!r} in this state dict was changed in place, which would change the weights or states in use."
    " Put a new tensor into the state dict, or change the parameter itself."
)
_SAME = {Tensor.cpu, Tensor.contiguous, properties.GET_DATA}
_CASTS = {Tensor.to, Tensor.type, Tensor.half, Tensor.bfloat16, Tensor.float, Tensor.double}
