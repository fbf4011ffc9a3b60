"""Checkpoints of parameters that tensor parallelism has cut: a file has whole tensors.

A part along the first dimension is a range of the whole tensor, and each rank writes its piece of
it. Any other part is scattered over the whole tensor. All ranks then put the whole together, one
tensor at a time, and each keeps an equal range of it to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.checkpoint.values.sharded_value import ShardedValue
from lightning_zero.comm import Communicator
from lightning_zero.optimizer import members, parameter_of, stepper_of
from lightning_zero.parameters import Piece
from lightning_zero.plan import Cut, cut_of
from lightning_zero.tensors import lasting_tensors


def joined(key: str, piece: Piece, part: Tensor, cut: Cut, comm: Communicator) -> ShardedValue:
    """Return the whole value of a cut parameter, of which each rank has ``part`` of a part."""
    slot = piece.range.slot
    shape = cut.whole_shape(slot.shape)
    stride = torch.empty(shape, device="meta").stride()
    is_range = cut.dim == 0 and slot.stride == stride
    if is_range:
        start = cut.rank * slot.numel + piece.range.start
        return ShardedValue.of(key, part, start, shape, stride, control=comm.control)
    with lasting_tensors(), torch.no_grad():
        parts = comm.parts_of_ranks(part.detach())
        # Every ``cut.size``-th rank has a range of the same part, in order.
        flat = (torch.cat(parts[first :: cut.size]) for first in range(cut.size))
        whole = cut.whole_of([one.as_strided(slot.shape, slot.stride) for one in flat]).flatten()
        number, count, numel = comm.control.rank, comm.control.world_size, prod(shape)
        start, stop = (numel * n // count for n in (number, number + 1))
        part = whole[start:stop].clone()
        return ShardedValue.of(key, part, start, shape, stride, control=comm.control)


def local_optimizer_states(
    optimizers: Iterable[Optimizer], states: Iterable[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return whole optimizer states with this rank's parts of those of cut parameters.

    Those of an optimizer that steps whole parameters stay whole. A state that does not fit its
    optimizer is returned as it is, to be refused.
    """
    given = [*states]
    held = [[] if stepper_of(one).is_whole else members(one) for one in optimizers]
    return [
        _local_optimizer_state(own, state) for own, state in zip(held, given, strict=False)
    ] + given[len(held) :]


def _local_optimizer_state(held: list[Any], state: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = [parameter_of(member) for member in held]
    has_cuts = any(map(cut_of, parameters))
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not has_cuts or not groups:
        return state
    ids = [key for group in groups for key in group["params"]]
    entries = dict(state["state"])
    for key, parameter in zip(ids, parameters, strict=False):
        cut, shape = cut_of(parameter), tuple(parameter.shape)
        if cut is not None and isinstance(entries.get(key), Mapping):
            entries[key] = {
                name: cut.part_of(value) if _is_whole(value, cut, shape) else value
                for name, value in entries[key].items()
            }
    return {**state, "state": entries}


def _is_whole(value: Any, cut: Cut, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == cut.whole_shape(shape)
