"""Torch's operations, as a dispatch mode sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The `_foreach_` operations that are element-wise; others (norm, max, mm) are not.
_FOREACH = _names(
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf"
    " erfc exp expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow"
    " reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero"
)
_FUSED = _names("adagrad adam adamw sgd")
# Element-wise without torch's tag for it, unless they change the shape.
_COPIES = _names(
    "_to_copy _unsafe_view alias clone copy detach expand fill lift_fresh masked_fill reshape view"
    " zero"
)
_OVERWRITES = _names("copy_ fill_ zero_")
_SHAPED = _names("_unsafe_view expand reshape view")
_NEW = _names(
    "empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like"
    " zeros_like"
)
_READS = _names("_local_scalar_dense equal")
_NAMESPACES = _names("aten prims prim profiler")


class Operation:
    """Facts about one of torch's operations that hold for any operands.

    A record made once per overload, as trials look all of them up for each operation.

    Args:
        func: The operation, one overload of it.

    Attributes:
        name: Its name.
        text: Its name with that of the overload.
        arguments: The names of its arguments.
        is_known: Whether it is one of torch's own.
        is_random: Whether it draws random numbers.
        is_element_wise: Whether each result element depends only on operands' elements at its
            index.
        is_on_lists: Whether its results depend only on operands at the same index of lists.
        is_host_read: Whether it reads one value on the host.
        is_shaped: Whether the numbers among its operands are sizes.
        is_new: Whether it takes only the shape of its operand, no values.
        is_data_sized: Whether the shape of its result depends on values.
    """

    def __init__(self, func: Any) -> None:
        arguments = func._schema.arguments
        self.name: str = func.overloadpacket.__name__
        self.text = str(func)
        self.arguments: list[str] = [argument.name for argument in arguments]
        self.is_known = func.namespace in _NAMESPACES
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.is_element_wise = _is_element_wise(func)
        self.is_on_lists = self.name.startswith(("_foreach_", "_fused_"))
        self.is_host_read = self.name in _READS
        self.is_shaped = self.name in _SHAPED
        self.is_new = self.name.rstrip("_") in _NEW
        self.is_data_sized = torch.Tag.dynamic_output_shape in func.tags
        numbered = [*enumerate(arguments)]
        self._written = [n for n, one in numbered if one.alias_info and one.alias_info.is_write]
        overwritten = 0 if self.name in _OVERWRITES else None
        self._read = [n for n, one in numbered if not one.is_out and n != overwritten]

    def operands(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the operands of a call by the index of their argument, ``None`` if not passed."""
        return [*args, *map(kwargs.get, self.arguments[len(args) :])]

    def written(self, operands: Sequence[Any]) -> list[Any]:
        """Return the operands that are changed."""
        return leaves_of(map(operands.__getitem__, self._written))

    def read(self, operands: Sequence[Any]) -> list[Any]:
        """Return the operands whose values are used, not those that are only overwritten."""
        return leaves_of(map(operands.__getitem__, self._read))


operation_of = cache(Operation)


def leaves_of(values: Iterable[Any]) -> list[Any]:
    """Return the values of an operation's arguments, those in lists one by one."""
    leaves: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            leaves += value
        else:
            leaves.append(value)
    return leaves


def _is_element_wise(func: Any) -> bool:
    name = func.overloadpacket.__name__.removesuffix("_")
    if name.startswith("_foreach_"):
        return name.removeprefix("_foreach_") in _FOREACH
    if name.startswith("_fused_"):
        return name.removeprefix("_fused_") in _FUSED
    if torch.Tag.pointwise in func.tags or name in _COPIES:
        return True
    # Some in-place operations lack the tag of their out-of-place counterpart.
    out_of_place = getattr(getattr(torch.ops.aten, name, None), func._overloadname, None)
    return out_of_place is not None and torch.Tag.pointwise in out_of_place.tags
