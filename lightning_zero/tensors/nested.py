"""Tensors in the nested values that a module takes and returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

_WITHOUT_TENSORS = (type(None), str, bytes, int, float, bool, type)


def tensors_in(value: Any, *, within_objects: bool = True) -> list[Tensor]:
    """Return every tensor in nested tuples, lists, sets, mappings and dataclasses, in order.

    With ``within_objects`` the attributes of other objects are searched too.
    """
    found: list[Tensor] = []
    seen: dict[int, Any] = {}
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            found.append(one)
        elif not isinstance(one, _WITHOUT_TENSORS) and id(one) not in seen:
            # Kept alive, so that no other object gets its id.
            seen[id(one)] = one
            left += reversed(_children(one, within_objects=within_objects))
    return found


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dictionaries, lists and tuples, each with its path."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from named_tensors(item, f"{name}/{key}" if name else str(key))


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
