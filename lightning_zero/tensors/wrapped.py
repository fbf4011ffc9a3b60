"""Tensors without memory of their own that wrap others, such as states in 8 bits with scales.

They are taken apart and made again as ``pickle`` does: by their attributes, so that a class needs
no operation for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from lightning_zero.tensors import internals


def can_wrap(cls: type) -> bool:
    """Return whether tensors of a class answer torch's operations themselves."""
    return issubclass(cls, Tensor) and cls.__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_wrapper(value: Any) -> bool:
    """Return whether a value is a tensor that wraps others."""
    return can_wrap(type(value)) and any(isinstance(each, Tensor) for each in vars(value).values())


def unwrapped(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a tensor wraps, at any depth; itself if it wraps none."""
    if not is_wrapper(tensor):
        yield tensor
        return
    for value in vars(tensor).values():
        if isinstance(value, Tensor):
            yield from unwrapped(value)


def rewrapped(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``change`` of a tensor, or a new wrapper with ``change`` of all that it wraps."""
    if not is_wrapper(tensor):
        return change(tensor)
    with internals.as_plain_tensors():
        size, stride = tuple(tensor.shape), tensor.stride()
    values = {
        key: rewrapped(value, change) if isinstance(value, Tensor) else value
        for key, value in vars(tensor).items()
    }
    return wrapper_of(type(tensor), size, stride, tensor.dtype, values)


def wrapper_of(
    cls: type, size: tuple[int, ...], stride: tuple[int, ...], dtype: Any, values: Mapping[str, Any]
) -> Tensor:
    """Return a wrapper with these attributes; its constructor is not called."""
    device = next(value.device for value in values.values() if isinstance(value, Tensor))
    made: Tensor = internals.make_wrapper(cls, size, strides=stride, dtype=dtype, device=device)
    vars(made).update(values)
    return made


def bytes_held(tensor: Tensor) -> int:
    """Return the bytes of a tensor, or of all that it wraps."""
    return sum(each.nbytes for each in unwrapped(tensor))
