"""What a tensor of a directory is in a loaded checkpoint: its shape, and where its values lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.buffer import lasting_tensors
from lightning_zero.checkpoint.boxes import Box, boxes, inverse, memory_order
from lightning_zero.checkpoint.chunk import Chunk

_CPU = torch.device("cpu")


class Stored(Tensor):
    """A tensor of whole shape that is read when its values are asked for, and as far as they are.

    A rank that takes its own range of it reads that range only. Any other use reads the whole: a
    hook that computes with it or edits it finds an ordinary tensor.

    Attributes:
        chunks: Where the boxes that make up the tensor lie.
        value: The whole, when somebody may have changed it; ``None`` before.
    """

    chunks: tuple[Chunk, ...]
    value: Tensor | None

    @staticmethod
    def of(
        chunks: Iterable[Chunk],
        shape: Iterable[int],
        dtype: torch.dtype,
        stride: Iterable[int] | None = None,
    ) -> Stored:
        """The tensor that ``chunks`` make up."""
        size = torch.Size(shape)
        with lasting_tensors():
            strides = torch.empty(size, device="meta").stride() if stride is None else tuple(stride)
            stored = Tensor._make_wrapper_subclass(
                Stored, size, strides=strides, dtype=dtype, device=_CPU
            )
        assert isinstance(stored, Stored)
        stored.chunks, stored.value = tuple(chunks), None
        return stored

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let metadata through, read a range where a range is asked for, and else the whole."""
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
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
        return f"Stored(shape={tuple(self.shape)}, {self.dtype}, {len(self.chunks)} chunks)"

    def laid_out(self, stride: Sequence[int]) -> Tensor:
        """The same tensor with its elements in another order, so that a range is of that order."""
        if self.value is not None or tuple(stride) == self.stride():
            return self
        return Stored.of(self.chunks, self.shape, self.dtype, stride)

    def read(self) -> Tensor:
        """The whole tensor, in memory of its own."""
        if self.value is not None:
            return self.value
        # Whatever intercepts the caller's functions has no business in here.
        with torch._C.DisableTorchFunction(), lasting_tensors():
            whole = torch.empty_strided(
                tuple(self.shape), self.stride(), dtype=self.dtype, device=_CPU
            )
            self._fill(Box.whole(self.shape), whole)
        return whole

    def part(self, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` in the tensor's memory order, ``[n]``, in memory of their own.

        Nothing else is read.
        """
        if self.value is not None:
            return self.value.as_strided((stop - start,), (1,), start)
        order = memory_order(self.shape, self.stride())
        with torch._C.DisableTorchFunction(), lasting_tensors():
            flat = torch.empty(stop - start, dtype=self.dtype, device=_CPU)
            position = 0
            for box in boxes([self.shape[dimension] for dimension in order], start, stop):
                target = flat[position : position + box.numel].view(box.sizes)
                self._fill(box.permuted(inverse(order)), target.permute(inverse(order)))
                position += box.numel
        return flat

    def _fill(self, box: Box, out: Tensor) -> None:
        for chunk in self.chunks:
            shared = chunk.box.overlap(box)
            if shared is not None:
                chunk.read(shared.seen_from(chunk.box), out[shared.seen_from(box).slices])

    def _is_range(self, size: Any = (), stride: Any = (), offset: Any = None) -> bool:
        is_flat = tuple(stride) == (1,) and len(size) == 1 and offset is not None
        return is_flat and 0 <= offset <= offset + size[0] <= self.numel()


def in_memory(value: Tensor) -> Tensor:
    """``value`` in memory; one that is stored is read and not kept."""
    return value.read() if isinstance(value, Stored) else value


def _call(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call with whole tensors, and keep those that the caller may change from now on."""
    wholes: list[tuple[Stored, Tensor, int]] = []

    def whole(value: Any) -> Any:
        if isinstance(value, Stored):
            wholes.append((value, (found := value.read()), found._version))
            return found
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(whole(item) for item in value)
        return {k: whole(v) for k, v in value.items()} if type(value) is dict else value

    result = func(*whole(args), **whole(dict(kwargs)))
    for stored, found, version in wholes:
        if found._version != version or _shares(result, found):
            stored.value = found
    return result


def _shares(result: Any, tensor: Tensor) -> bool:
    if isinstance(result, (list, tuple)):
        return any(_shares(item, tensor) for item in result)
    # What is no tensor may be a view all the same: an array, a storage, an address.
    return not isinstance(result, (bool, int, float, complex, str, torch.Size, type(None))) and (
        not isinstance(result, Tensor)
        or (
            result.layout == torch.strided
            and result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        )
    )


METADATA: set[Any] = {
    Tensor.storage_offset,
    *(Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.__hash__, Tensor.__len__, torch.numel),
    *(torch.is_floating_point, torch.is_complex, torch.is_tensor),
    *(
        getattr(Tensor, name).__get__
        for name in (
            *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad"),
            *("is_meta", "is_cpu", "is_cuda", "is_sparse", "is_quantized", "nbytes", "itemsize"),
        )
    ),
}
"""What tells about a tensor without its values."""
