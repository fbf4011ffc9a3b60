"""A tensor in a loaded checkpoint that is not read yet: its shape, and where its values lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.checksums import CheckedRange
from lightning_zero.checkpoint.values.boxes import Box, boxes_in_memory, dense_stride, memory_order
from lightning_zero.checkpoint.values.chunk import Chunk, InOneRow, Pieces
from lightning_zero.tensors import internals, lasting_tensors, properties

_CPU = torch.device("cpu")

Part = Chunk | InOneRow | Pieces
"""The place of the values of a box, which can read them."""


class LazyTensor(Tensor):
    """A tensor of whole shape that is read on use, and only as far as it is used.

    A rank that takes its own range of it reads only that range. Any other use reads the whole, so a
    hook that computes with it or edits it sees an ordinary tensor.

    Attributes:
        chunks: Where the boxes that make up the tensor lie.
        value: The whole tensor once it may have been changed, ``None`` before.
    """

    chunks: tuple[Part, ...]
    value: Tensor | None

    @staticmethod
    def of(
        chunks: Iterable[Part],
        shape: Iterable[int],
        dtype: torch.dtype,
        stride: Iterable[int] | None = None,
    ) -> LazyTensor:
        """Return the tensor that ``chunks`` make up."""
        size = torch.Size(shape)
        with lasting_tensors():
            strides = torch.empty(size, device="meta").stride() if stride is None else tuple(stride)
            lazy = internals.make_wrapper(
                LazyTensor, size, strides=strides, dtype=dtype, device=_CPU
            )
        assert isinstance(lazy, LazyTensor)
        lazy.chunks, lazy.value = tuple(chunks), None
        return lazy

    @staticmethod
    def of_pieces(
        pieces: Callable[[], Iterable[Tensor]], shape: Iterable[int], dtype: torch.dtype
    ) -> LazyTensor:
        """Return the tensor whose values are ``pieces``, concatenated and cast to ``dtype``."""
        return LazyTensor.of([Pieces(Box.whole(tuple(shape)), pieces)], shape, dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer calls for metadata without reading, read a range for a range, else the whole."""
        kwargs = kwargs or {}
        if func in properties.FACTS:
            with internals.as_plain_tensors():
                return func(*args, **kwargs)
        if func is Tensor.detach:
            return args[0]
        if func is Tensor.as_strided and not kwargs and args[0]._is_range(*args[1:]):
            return args[0].part(args[3], args[3] + args[1][0])
        return _call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _call(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.read().clone()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, {self.dtype}, {len(self.chunks)} chunks)"

    def laid_out(self, stride: Sequence[int]) -> Tensor:
        """Return the same tensor with its elements, and so its ranges, in another memory order."""
        if self.value is not None or tuple(stride) == self.stride():
            return self
        return LazyTensor.of(self.chunks, self.shape, self.dtype, stride)

    def read(self) -> Tensor:
        """Return the whole tensor, newly read unless it may have been changed."""
        if self.value is not None:
            return self.value
        # Modes that intercept the caller's functions must not see these.
        with internals.without_interception(), lasting_tensors():
            whole = torch.empty_strided(
                tuple(self.shape), self.stride(), dtype=self.dtype, device=_CPU
            )
            self._fill(Box.whole(self.shape), whole)
        return whole

    def part(self, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` in memory order, ``[n]``, reading no others."""
        if self.value is not None:
            return self._changed(start, stop)
        with internals.without_interception(), lasting_tensors():
            flat = torch.empty(stop - start, dtype=self.dtype, device=_CPU)
        self.read_to(flat, start)
        return flat

    @property
    def row(self) -> InOneRow | None:
        """The place of all elements, if a file has them in a row in the tensor's memory order."""
        chunk = self.chunks[0] if len(self.chunks) == 1 and self.value is None else None
        if not isinstance(chunk, InOneRow) or chunk.box.sizes != self.shape:
            return None
        order = memory_order(self.shape, self.stride())
        is_same = dense_stride(self.shape, order) == dense_stride(self.shape, chunk.order)
        return chunk if is_same else None

    def read_to(self, out: Tensor, start: int) -> None:
        """Read elements from ``start`` on into ``out``, ``[n]``, which may have another dtype."""
        stop, position = start + out.numel(), int(out.storage_offset())
        if self.value is not None:
            out.copy_(self._changed(start, stop))
            return
        order = memory_order(self.shape, self.stride())
        with internals.without_interception(), torch.no_grad():
            for box in boxes_in_memory(self.shape, self.stride(), start, stop):
                stride = dense_stride(box.sizes, order)
                self._fill(box, out.as_strided(box.sizes, stride, position))
                position += box.numel

    def _changed(self, start: int, stop: int) -> Tensor:
        assert self.value is not None
        return self.value.as_strided((stop - start,), (1,), start)

    def ranges(self, name: str, start: int, stop: int) -> Iterator[CheckedRange]:
        """Yield the bytes that :meth:`part` reads."""
        if self.value is None:
            for box in boxes_in_memory(self.shape, self.stride(), start, stop):
                for chunk, shared in self._overlaps(box):
                    yield from chunk.ranges(name, shared.seen_from(chunk.box))

    def _fill(self, box: Box, out: Tensor) -> None:
        for chunk, shared in self._overlaps(box):
            chunk.read(shared.seen_from(chunk.box), out[shared.seen_from(box).slices])

    def _overlaps(self, box: Box) -> Iterator[tuple[Part, Box]]:
        for chunk in self.chunks:
            shared = chunk.box.overlap(box)
            if shared is not None:
                yield chunk, shared

    def _is_range(self, size: Any = (), stride: Any = (), offset: Any = None) -> bool:
        is_flat = tuple(stride) == (1,) and len(size) == 1 and offset is not None
        return is_flat and 0 <= offset <= offset + size[0] <= self.numel()


def in_memory(value: Tensor) -> Tensor:
    """Return ``value`` in memory; a lazy one is read without keeping what was read."""
    return value.read() if isinstance(value, LazyTensor) else value


def _call(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` with whole tensors, and keep those that the caller may change afterwards."""
    wholes: list[tuple[LazyTensor, Tensor, int]] = []

    def whole(value: Any) -> Any:
        if isinstance(value, LazyTensor):
            wholes.append((value, (found := value.read()), found._version))
            return found
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(whole(item) for item in value)
        return {k: whole(v) for k, v in value.items()} if type(value) is dict else value

    result = func(*whole(args), **whole(dict(kwargs)))
    for lazy, found, version in wholes:
        if found._version != version or _shares(result, found):
            lazy.value = found
    return result


def _shares(result: Any, tensor: Tensor) -> bool:
    if isinstance(result, (list, tuple)):
        return any(_shares(item, tensor) for item in result)
    # Even a result that is not a tensor may be a view: an array, a storage, an address.
    return not isinstance(result, (bool, int, float, complex, str, torch.Size, type(None))) and (
        not isinstance(result, Tensor)
        or (
            result.layout == torch.strided
            and result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        )
    )
