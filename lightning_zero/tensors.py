"""The tensors inside whatever a module takes and gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(
    value: Any, *, within_objects: bool = True, _seen: set[int] | None = None
) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, sets, mappings and dataclasses.

    Args:
        value: Where to look.
        within_objects: Look into the attributes of other objects too.
    """
    if isinstance(value, Tensor):
        yield value
        return
    if value is None or isinstance(value, (str, bytes, int, float, bool, type)):
        return
    seen = set() if _seen is None else _seen
    if id(value) in seen:
        return
    seen.add(id(value))
    children: Any
    if isinstance(value, (tuple, list, set, frozenset)):
        children = value
    elif isinstance(value, (dict, Mapping)):
        children = value.values()
    elif dataclasses.is_dataclass(value):
        children = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif within_objects and hasattr(value, "__dict__") and not callable(value):
        children = list(vars(value).values())
    else:
        return
    for child in children:
        yield from tensors_in(child, within_objects=within_objects, _seen=seen)
