"""Gathering a parameter's whole state from what each rank keeps of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lightning_zero.comm import Communicator
from lightning_zero.optimizer.known import Way
from lightning_zero.optimizer.pieces import is_of_elements, owned
from lightning_zero.parameters import Piece
from lightning_zero.tensors import rewrapped


class Keeper(Protocol):
    """What knows which states this rank keeps: a stepper."""

    way: Way

    @property
    def is_whole(self) -> bool:
        """Return whether states are of whole parameters."""

    def keeps_state_of(self, piece: Piece) -> bool:
        """Return whether this rank has the state of a parameter, or a part of it."""

    def part_of(self, state: Mapping[str, Any], piece: Piece) -> Mapping[str, Any] | None:
        """Return a copy of the part of a parameter's state that this rank keeps, if any."""


def gather_state(own: Any, piece: Piece, keeper: Keeper, comm: Communicator) -> Any:
    """Return a copy of a parameter's whole state, ``None`` if it has none; a collective.

    Args:
        own: What this rank keeps of it.
        piece: This rank's piece of the parameter.
        keeper: Knows which rank keeps what.
        comm: The ranks.
    """
    mine = own if keeper.keeps_state_of(piece) else None
    if keeper.way is Way.ALL_AT_ONCE:
        return owned(mine)
    if keeper.is_whole:
        return _from_owner(mine, piece, comm)
    start, stop = piece.range.start, piece.range.stop
    sent = tree_map_only(Tensor, lambda value: value.detach().cpu(), mine)
    of_ranks = comm.control.gather_objects(_OfRank(start, stop, sent))
    of_copy = [of_ranks[rank] for rank in comm.mesh.shard.ranks]
    held = [one for one in of_copy if one.state is not None]
    if not held:
        return None
    if not isinstance(held[0].state, Mapping):
        return owned(held[0].state if mine is None else mine)
    return _assembled(held, held[0] if mine is None else _OfRank(start, stop, mine), piece)


def _from_owner(mine: Any, piece: Piece, comm: Communicator) -> Any:
    """Return a copy of the state that one rank of each copy has; a collective.

    Tensors are brought one at a time: each rank holds no more than the state, and one of them.
    """
    control, sends = comm.control, mine is not None and comm.is_in_first_copy
    inside: list[Tensor] = []  # of tensors that wrap others, what they wrap

    def noted(tensor: Tensor) -> Tensor:
        inside.append(tensor.detach())
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    form = tree_map_only(Tensor, partial(rewrapped, change=noted), mine) if sends else None
    devices = [tensor.device.type for tensor in inside]
    found = [one for one in control.gather_objects((form, devices) if sends else None) if one]
    if not found:
        return None
    form, devices = found[0]
    values, kinds = iter(inside), iter(devices)

    def brought(like: Tensor) -> Tensor:
        own, kind = next(values, None), next(kinds)
        buffer = torch.zeros(like.nbytes, dtype=torch.uint8, device=comm.device)
        if own is not None and like.nbytes:
            buffer.copy_(own.reshape(-1).contiguous().view(torch.uint8))
        control.sum(buffer, "an exchange of values")
        value = buffer.view(like.dtype).reshape(like.shape)
        return value.to("cpu" if kind == "cpu" else piece.parameter.device)

    return tree_map_only(Tensor, partial(rewrapped, change=brought), form)


class _OfRank(NamedTuple):
    """What a rank keeps of a parameter's state: that of its elements ``[start, stop)``."""

    start: int
    stop: int
    state: Any


def _assembled(held: Sequence[_OfRank], model: _OfRank, piece: Piece) -> dict[str, Any]:
    """Return a parameter's state from what all ranks keep that have elements of it.

    What has no number per element is a copy of that of ``model``.
    """
    slot, device = piece.range.slot, piece.parameter.device
    part = torch.empty(model.stop - model.start, device="meta")

    def whole(key: str, own: Any, *values: Any) -> Any:
        is_none = key != "step" and isinstance(own, Tensor) and own.shape == part.shape
        if not is_of_elements(key, own, part) and not (is_none and not slot.numel):
            return own.detach().clone() if isinstance(own, Tensor) else own
        flat = torch.empty(slot.numel, dtype=own.dtype, device=device)
        for (start, stop, _), value in zip(held, values, strict=True):
            flat[start:stop] = value
        return flat.as_strided(slot.shape, slot.stride)

    found = {}
    for key, value in model.state.items():
        leaves, tree = tree_flatten(value)
        columns = zip(leaves, *(tree_leaves(one.state[key]) for one in held), strict=True)
        found[key] = tree_unflatten([whole(key, *column) for column in columns], tree)
    return found
