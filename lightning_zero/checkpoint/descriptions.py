"""Descriptions of an optimizer's states that ranks send each other, and the entries made of them.

A model may have very many parameters, most of whose states are alike. Alike ones share one
description, so that an exchange carries it once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from math import isnan
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lightning_zero.checkpoint.module_state import sharded
from lightning_zero.checkpoint.values.sharded_value import ShardedValue
from lightning_zero.comm import Communicator
from lightning_zero.parameters import Piece
from lightning_zero.tensors import is_wrapper, wrapper_of


class _StandIn:
    """A stand-in for a tensor that is cut into pieces, or that its owner holds whole.

    ``shape`` is that of the owner's tensor; ``None`` if the tensor is cut, as the parameter is.
    """

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...] | None) -> None:
        self.dtype, self.shape = dtype, shape

    def value(self, key: str, part: Tensor | None, piece: Any, comm: Communicator) -> ShardedValue:
        """Return the sharded value; ``part`` is ``None`` on a rank that holds nothing of it."""
        part = torch.empty(0, dtype=self.dtype) if part is None else part
        if self.shape is None:
            return sharded(key, piece, part, comm)
        stride = torch.empty(self.shape, device="meta").stride()
        flat = part.contiguous().reshape(-1)
        return ShardedValue.of(key, flat, 0, self.shape, stride, control=comm.control)


class _Wrapper:
    """A stand-in for a tensor that wraps others, which its owner holds whole."""

    def __init__(self, tensor: Tensor, values: dict[str, Any]) -> None:
        self.cls, self.dtype, self.values = type(tensor), tensor.dtype, values
        self.size, self.stride = tuple(tensor.shape), tensor.stride()

    def value(self, key: str, mine: Any, piece: Any, comm: Communicator) -> Tensor:
        """Return a wrapper of sharded values."""
        values = {
            name: entry(f"{key}.{name}", getattr(mine, name, None), described, piece, comm)
            for name, described in self.values.items()
        }
        return wrapper_of(self.cls, self.size, self.stride, self.dtype, values)


class _Number:
    """A stand-in for a tensor without dimensions, such as the count of steps."""

    def __init__(self, dtype: torch.dtype, value: bool | int | float) -> None:
        self.dtype, self.value = dtype, value

    def tensor(self) -> Tensor:
        """Return the number in a tensor of its own: a step adds to it in place."""
        return torch.tensor(self.value, dtype=self.dtype, device="cpu")


class Descriptions:
    """A maker of descriptions of states, one for all that are alike."""

    def __init__(self) -> None:
        self._leaves: dict[Any, Any] = {}
        self._states: dict[Any, dict[str, Any]] = {}

    def of(self, entries: Mapping[str, Any], piece: Any, *, is_whole: bool) -> dict[str, Any]:
        """Return a state with stand-ins for its tensors, but for small ones that are sent."""

        def stand_in(key: str, tensor: Tensor) -> Any:
            shape = tuple(tensor.shape)
            if is_whole and is_wrapper(tensor):
                held = vars(tensor).items()
                of_values = {k: stand_in(k, v) if isinstance(v, Tensor) else v for k, v in held}
                return _Wrapper(tensor, of_values)
            if is_whole and shape:
                return self._leaf(_StandIn, tensor.dtype, shape)
            is_cut = not is_whole and isinstance(piece, Piece) and shape == (piece.range.numel,)
            if is_cut and key != "step":
                return self._leaf(_StandIn, tensor.dtype, None)
            if not shape and type(tensor) is Tensor and not tensor.is_complex():
                number = tensor.item()
                if not isnan(number):  # whose bits a number may lose
                    return self._leaf(_Number, tensor.dtype, number)
            # On the host: a device's tensor is unpickled to the device of the same index, so each
            # rank would take memory on the devices of all others.
            return tensor.to("cpu")

        described = {
            key: stand_in(key, value)
            if isinstance(value, Tensor)
            else tree_map_only(Tensor, functools.partial(stand_in, key), value)
            for key, value in entries.items()
        }
        # Stored descriptions keep their leaves alive, so no other leaf has the same id.
        identity = tuple((key, id(leaf)) for key, leaf in described.items())
        return self._states.setdefault(identity, described)

    def _leaf(self, kind: Any, dtype: torch.dtype, fact: Any) -> Any:
        # By its text, which tells -0.0 from 0.0, and True from 1.
        key = kind, dtype, repr(fact)
        if key not in self._leaves:
            self._leaves[key] = kind(dtype, fact)
        return self._leaves[key]


def entry(key: str, mine: Any, described: Any, piece: Any, comm: Communicator) -> Any:
    """Return an entry with values in place of its stand-ins; ``mine`` is this rank's own."""
    if isinstance(described, _Number):
        return described.tensor()
    if isinstance(described, _StandIn | _Wrapper):
        return described.value(key, mine, piece, comm)
    leaves, tree = tree_flatten(described)
    own = [None] * len(leaves) if mine is None else tree_leaves(mine)
    parts = [
        entry(f"{key}.{number}", part, leaf, piece, comm)
        if isinstance(leaf, _StandIn | _Wrapper | _Number)
        else leaf
        for number, (leaf, part) in enumerate(zip(leaves, own, strict=True))
    ]
    return tree_unflatten(parts, tree)
