"""The tensors in nested values, and in tensors that wrap others, such as states in 8 bits.

Wrappers are taken apart and rebuilt from their attributes, as ``pickle`` does, so that a class
needs no support for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_zero.tensors import internals

_WITHOUT_TENSORS = (type(None), str, bytes, int, float, bool, type)


def tensors_in(value: Any, *, within_objects: bool = True) -> list[Tensor]:
    """Return every tensor in nested tuples, lists, sets, mappings and dataclasses, in order.

    With ``within_objects`` the attributes of other objects are searched too.
    """
    found: list[Tensor] = []
    seen: dict[int, Any] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif not isinstance(item, _WITHOUT_TENSORS) and id(item) not in seen:
            # Kept alive, so that no other object gets its id.
            seen[id(item)] = item
            stack += reversed(_children(item, within_objects=within_objects))
    return found


def _children(value: Any, *, within_objects: bool) -> Sequence[Any]:
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, (dict, Mapping)):
        return list(value.values())
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if within_objects and hasattr(value, "__dict__") and not callable(value):
        return list(vars(value).values())
    return ()


def can_wrap(cls: type) -> bool:
    """Return whether a class of tensors overrides ``__torch_dispatch__``."""
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
