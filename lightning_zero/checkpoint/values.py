"""A sharded tensor in a state dict, and the chunks of which a range of its elements consists.

A rank owns a range of a tensor's elements in memory order, which may begin and end anywhere. A file
of ``torch.save`` has room for the whole, and each rank writes its range there. Directories know
only chunks, an offset and a size in each dimension. A range consists of a few chunks: elements
``[2, 10)`` of a 4 x 3 tensor are three::

    . . a
    b b b
    b b b
    c . .
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils._pytree import tree_map_only

from lightning_zero.comm import Control, SyncPoint
from lightning_zero.tensors import internals, lasting_tensors, properties, runs_outside

_CPU = torch.device("cpu")


class ShardedValue(Tensor):
    """A tensor of whole shape in a checkpoint; each rank has a part of its values.

    It may be renamed, dropped, moved, copied, cast and detached, as hooks that edit a checkpoint
    do. Any other use gathers the values, so all ranks make it together. Torch's planners of
    distributed checkpoints write its chunks.

    Attributes:
        key: Its name in errors and, unless another value has it too, its identity on every rank.
        part: This rank's values, ``[n]``, on any device; possibly empty. They are cast to the dtype
            of the whole when they are written.
        start: The index of the first of them in the memory order of the whole tensor.
        facts: Shape, stride and dtype of the whole, to be read without a call of torch.
        control: The ranks that have the parts.
        is_own: Whether it is a tensor of its own, not the module's or the optimizer's.
        value: The whole tensor once it was read, if ``is_own``, or once its address was taken.
    """

    key: str
    part: Tensor
    start: int
    facts: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
    control: Control
    is_own: bool
    value: Tensor | None

    @staticmethod
    def of(
        key: str,
        part: Tensor,
        start: int,
        shape: Iterable[int],
        stride: Iterable[int],
        control: Control,
        dtype: torch.dtype | None = None,
        *,
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

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer calls for metadata, and copy and cast parts; everything else needs values."""
        kwargs, first = kwargs or {}, args[0] if args else None
        if func in properties.FACTS:
            with internals.as_plain_tensors():
                return func(*args, **kwargs)
        if func is Tensor.detach and isinstance(first, ShardedValue) and first.value is not None:
            return first._detached()
        if isinstance(first, ShardedValue) and first.value is None:
            if func in _SAME or (func is Tensor.detach and not first.requires_grad):
                return first
            if func is Tensor.clone and not kwargs:
                return first.with_part(first.part.clone())
            if func in _CASTS and (cast := first._cast(func, args[1:], kwargs)) is not None:
                return cast
        return _call_with_wholes(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _call_with_wholes(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.with_part(self.part.clone()) if self.value is None else self.value.clone()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedValue({self.key!r}, shape={tuple(self.shape)}, {self.dtype})"

    def with_part(self, part: Tensor, dtype: torch.dtype | None = None) -> ShardedValue:
        """Return a value of its own with the values ``part``, by default of the same dtype."""
        shape, stride, own = self.facts
        given = self.key, part, self.start, shape, stride, self.control, dtype or own
        return ShardedValue.of(*given, is_own=True)

    def _cast(self, func: Any, args: Any, kwargs: Any) -> ShardedValue | None:
        """Return the result if a call at most casts the value; ``None`` if it does more."""
        if "memory_format" in kwargs:
            return None
        with internals.without_interception():
            probe = torch.empty((), dtype=self.facts[2], device=_CPU)
            result = func(probe, *args, **kwargs)
        if result is probe:
            return self
        if not isinstance(result, Tensor) or result.device != _CPU:
            return None
        part = self.part.to(self.facts[2]).to(result.dtype, copy=True)
        return self.with_part(part, result.dtype)

    def _detached(self) -> ShardedValue:
        """Return another of the same memory, as ``Parameter(value)`` needs it."""
        found = self.with_part(self.part)
        found.is_own = self.is_own
        found.value = None if self.value is None else self.value.detach()
        return found

    @runs_outside
    def read(self) -> Tensor:
        """Return the whole tensor, gathered from the ranks; a collective."""
        if self.value is not None:
            return self.value
        shape, stride, dtype = self.facts
        with internals.without_interception(), lasting_tensors():
            self.control.call(SyncPoint.VALUE, about=repr(self.key)).wait()
            # As bytes: torch cannot unpickle all dtypes, such as float8.
            parts = self.control.gather_objects((self.start, self.part_bytes.to("cpu", copy=True)))
            whole = torch.empty_strided(shape, stride, dtype=dtype, device=_CPU)
            flat = whole.as_strided((prod(shape),), (1,))
            for start, part in parts:  # of cut parameters, not in the order of the ranks
                flat[start : start + len(part) // dtype.itemsize] = part.view(dtype)
        if self.is_own:
            self.value = whole  # which the caller may change
        return whole

    def settled(self) -> Tensor:
        """Return what is to be saved: the value itself, or the whole tensor if it has one."""
        return self if self.value is None else self.value

    @property
    def part_bytes(self) -> Tensor:
        """This rank's values as they are written: bytes ``[n]``."""
        return self.part.to(self.facts[2]).view(torch.uint8)

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.facts[0]) * self.facts[2].itemsize

    @property
    def start_byte(self) -> int:
        """The byte offset of this rank's part in the whole tensor."""
        return self.start * self.facts[2].itemsize

    # -- for torch's planners ----------------------------------------------------------------------

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        shape, stride, _ = self.facts
        if not prod(shape):  # the same chunk on every rank, of which the planner takes one
            return [ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))]
        return [*chunks_in_memory(shape, stride, self.start, self.start + len(self.part))]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        shape, _, dtype = self.facts
        properties = TensorProperties(dtype=dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        shape, stride, dtype = self.facts
        order, start = memory_order(shape, stride), 0
        for chunk in self.__create_chunk_list__():
            stop = start + chunk.sizes.numel()
            if chunk.offsets == tuple(index.offset or ()):
                part = self.part[start:stop].to(dtype)
                return part.as_strided(chunk.sizes, dense_stride(chunk.sizes, order))
            start = stop
        raise KeyError(f"{self.key!r} has no chunk at {index.offset} on this rank")


def _call_with_wholes(func: Any, args: Any, kwargs: Any) -> Any:
    """Call ``func`` with whole tensors in place of sharded values.

    Raises:
        RuntimeError: It changed a value that is not the state dict's own.
    """
    wholes: list[tuple[ShardedValue, Tensor, int]] = []

    def whole(value: ShardedValue) -> Tensor:
        found = value.read()
        wholes.append((value, found, internals.version_of(found)))
        return found

    args, kwargs = tree_map_only(ShardedValue, whole, (args, kwargs))
    result = func(*args, **kwargs)
    for value, found, version in wholes:
        if func is Tensor.data_ptr:
            value.value = found
        if not value.is_own and internals.version_of(found) != version:
            raise RuntimeError(
                f"{value.key!r} in this state dict was changed in place, which would change the"
                " weights or states in use. Put a new tensor into the state dict, or change the"
                " parameter itself."
            )
    # What returns the tensor itself returns the sharded one.
    return next((value for value, found, _ in wholes if found is result), result)


_SAME = {Tensor.cpu, Tensor.contiguous, properties.GET_DATA}
_CASTS = {Tensor.to, Tensor.type, Tensor.half, Tensor.bfloat16, Tensor.float, Tensor.double}


# -- chunks ----------------------------------------------------------------------------------------


def chunks_in_memory(
    shape: Sequence[int], stride: Sequence[int], start: int, stop: int
) -> Iterator[ChunkStorageMetadata]:
    """Yield the fewest chunks that make up elements ``[start, stop)`` of a tensor in memory order.

    Each is a range of them.
    """
    if not shape and start < stop:
        yield ChunkStorageMetadata(torch.Size(), torch.Size())
        return
    order = memory_order(shape, stride)
    back = sorted(range(len(order)), key=order.__getitem__)
    lengths = [shape[dimension] for dimension in order]
    rows = [prod(lengths[place + 1 :]) for place in range(len(lengths))]
    while start < stop:
        # As many of the largest rows that begin here as there are up to the end of their dimension.
        outer = next(p for p, n in enumerate(rows) if start % n == 0 and start + n <= stop)
        offsets = [start // row % length for row, length in zip(rows, lengths, strict=True)]
        count = min((stop - start) // rows[outer], lengths[outer] - offsets[outer])
        sizes = [1] * outer + [count] + lengths[outer + 1 :]
        chunk = (torch.Size(values[d] for d in back) for values in (offsets, sizes))
        yield ChunkStorageMetadata(*chunk)
        start += count * rows[outer]


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions from the slowest to the fastest in memory."""
    # The stride of a dimension of size 1 says nothing.
    return tuple(sorted(range(len(shape)), key=lambda d: -stride[d] if shape[d] > 1 else -(2**62)))


def dense_stride(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the stride of a dense tensor whose dimensions have this order in memory."""
    stride, step = [0] * len(shape), 1
    for dimension in reversed(order):
        stride[dimension] = step
        step *= max(shape[dimension], 1)
    return tuple(stride)
