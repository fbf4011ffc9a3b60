"""Steps of a lone toy parameter, which show what an optimizer keeps for a parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.optimizer.optimizer_copy import bare, copy_of, stepping_toys
from lightning_zero.optimizer.pieces import parameter_of
from lightning_zero.optimizer.steppers import members, stepper_of
from lightning_zero.parameters import Piece
from lightning_zero.tensors import bytes_held, is_wrapper


def state_bytes(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> StateBytes:
    """Return the size of a parameter's state, found by stepping a toy parameter in ``group``."""
    toy = Parameter(torch.zeros(_TOY_NUMEL, dtype=dtype))
    tensors = _tensors_of(optimizer, group, toy)
    per_element = sum(value.element_size() for value in tensors if value.shape == toy.shape)
    return StateBytes(per_element, sum(bytes_held(v) for v in tensors if v.shape != toy.shape))


def whole_state_bytes(
    optimizer: Optimizer, group: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype
) -> int:
    """Return the size of the state of a parameter that is stepped whole, in bytes.

    Raises:
        ValueError: Only the optimizer's real steps can tell.
    """
    try:
        meta = Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"))
        return sum(bytes_held(value) for value in _tensors_of(optimizer, group, meta))
    except Exception:
        # It reads values, which a small toy has. The toy's sizes can be told apart.
        small = [min(size, other) for size, other in zip(shape, _PRIMES, strict=False)]
    sizes = {math.prod(small): math.prod(shape), **dict(zip(small, shape, strict=False))}
    try:
        tensors = _tensors_of(optimizer, group, Parameter(torch.ones(small, dtype=dtype)))
    except Exception as error:
        kind = type(bare(optimizer)).__name__
        raise ValueError(
            f"The size of {kind}'s state cannot be predicted ({error}); MemoryMonitor measures it."
        ) from error
    return sum(
        math.prod(sizes.get(size, size) for size in value.shape) * value.element_size()
        for value in tensors
    )


def wraps_states(optimizer: Optimizer) -> bool:
    """Return whether the largest parameter's state, if kept whole, has tensors that wrap others."""
    pieces = [one for one in members(optimizer) if isinstance(one, Piece)]
    if not (stepper_of(optimizer).is_whole and pieces):
        return False
    largest = max(pieces, key=lambda piece: piece.range.slot.numel)
    of_toy = [
        group
        for group in bare(optimizer).param_groups
        if any(parameter_of(member) is largest.parameter for member in group["params"])
    ]
    toy = Parameter(torch.empty(largest.range.slot.shape, dtype=largest.dtype, device="meta"))
    try:
        return any(map(is_wrapper, _tensors_of(optimizer, of_toy[0], toy)))
    except Exception:
        return False  # it reads values; a save will tell


def _tensors_of(optimizer: Optimizer, group: Mapping[str, Any], toy: Parameter) -> list[Tensor]:
    number = next(n for n, other in enumerate(bare(optimizer).param_groups) if other is group)
    state = _state_of(optimizer, number, toy)
    return [value for value in tree_leaves(state) if isinstance(value, Tensor)]


def _state_of(optimizer: Optimizer, number: int, toy: Parameter) -> dict[str, Any]:
    """Return the state of ``toy`` after two steps in the param group of index ``number``."""
    copied = _copy_of_group(optimizer, number, toy)
    toy.grad = torch.ones_like(toy)
    _let_train(copied)
    with stepping_toys():
        for _ in range(2):
            copied.step()
    return dict(copied.state[toy])


def _let_train(optimizer: Optimizer) -> None:
    """Call ``train()``, without which some optimizers do not step."""
    if callable(train := getattr(optimizer, "train", None)):
        train()


def _copy_of_group(optimizer: Optimizer, number: int, toy: Parameter) -> Optimizer:
    """Return a copy of ``optimizer`` with one param group, which holds only ``toy``."""
    optimizer = bare(optimizer)
    with stepper_of(optimizer).holding_parts():
        stand_ins = [{own: [toy] for own in group["params"]} for group in optimizer.param_groups]
        return copy_of(optimizer, stand_ins, [number])


class StateBytes(NamedTuple):
    """Bytes of an optimizer's state, per element of a parameter and per parameter."""

    per_element: int
    per_parameter: int

    def of(self, numel: int) -> int:
        """Return the bytes for a piece of ``numel`` elements; empty ones are never stepped."""
        return self.per_element * numel + self.per_parameter if numel else 0

    def num_entries(self, dtype: torch.dtype) -> int:
        """Return how many tensors of ``dtype`` hold the numbers per element."""
        return -(-self.per_element // dtype.itemsize)


_TOY_NUMEL = 24
# Sizes of a small toy: large enough for optimizers that factor only large matrices.
_PRIMES = (131, 137, 139, 149, 151, 157, 163, 167)
