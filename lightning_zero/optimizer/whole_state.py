"""Whole states of an optimizer, put together from the ranks' parts for users who ask for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lightning_zero.comm import Communicator, SyncPoint
from lightning_zero.optimizer.pieces import is_of_elements, parameter_of, pieces_of
from lightning_zero.optimizer.steppers import Stepper
from lightning_zero.optimizer.twin import with_inner
from lightning_zero.parameters import Piece


@contextmanager
def whole_states(stepper: Stepper, comm: Communicator) -> Iterator[None]:
    """Enter a context in which an optimizer has parameters and their whole states, as under DDP.

    A collective; each rank needs memory for all states. Changes within it are lost, except those
    to the parameters.
    """
    optimizer = stepper.optimizer
    kind = type(optimizer).__name__
    comm.control.call(SyncPoint.STATES, about=f"of {kind}").wait()
    holders = list(with_inner(optimizer))
    made: dict[int, Any] = {}
    for holder in holders:
        for group in holder.param_groups:
            members = [*map(parameter_of, group["params"])]
            made.setdefault(id(group), {**group, "params": members})
        made.setdefault(id(holder.param_groups), [made[id(g)] for g in holder.param_groups])
        if id(holder.state) not in made:
            made[id(holder.state)] = _whole(holder.state, pieces_of(optimizer), stepper, comm)
    before = [dict(vars(holder)) for holder in holders]
    for holder in holders:  # a wrapper may share dictionaries and lists, under any name
        vars(holder).update({k: made[id(v)] for k, v in vars(holder).items() if id(v) in made})
    try:
        yield
    finally:
        for holder, own in zip(holders, before, strict=True):
            vars(holder).update({key: value for key, value in own.items() if id(value) in made})


def _whole(
    state: Mapping[Any, Any], pieces: Sequence[Piece], stepper: Stepper, comm: Communicator
) -> defaultdict[Any, Any]:
    """Return states by parameter; what belongs to no piece is the same object."""
    whole: defaultdict[Any, Any] = defaultdict(dict)
    for piece in pieces:
        is_here = stepper.keeps_state_of(piece) if stepper.is_whole else piece.numel() > 0
        mine = state.get(piece) if is_here else None
        sent = tree_map_only(Tensor, lambda value: value.detach().cpu(), mine)
        of_ranks = comm.control.gather_objects(_Part(piece.range.start, piece.range.stop, sent))
        parts = [of_ranks[rank] for rank in comm.transport.axis.ranks]
        held = [part for part in parts if part.state is not None]
        if held:
            is_whole = stepper.is_whole or not isinstance(held[0].state, Mapping)
            whole[piece.parameter] = held[0].state if is_whole else _assembled(held, piece)
    own = set(pieces)
    whole.update({key: value for key, value in state.items() if key not in own})
    return whole


class _Part(NamedTuple):
    """A rank's part of the state of one parameter."""

    start: int
    stop: int
    state: Any


def _assembled(held: Sequence[_Part], piece: Piece) -> dict[str, Any]:
    """Return a parameter's state from the parts of all ranks that have elements of it."""
    slot, device, first = piece.range.slot, piece.parameter.device, held[0]
    part = torch.empty(first.stop - first.start, device="meta")

    def whole(key: str, *values: Any) -> Any:
        if not is_of_elements(key, values[0], part):
            return values[0]
        flat = torch.empty(slot.numel, dtype=values[0].dtype, device=device)
        for (start, stop, _), value in zip(held, values, strict=True):
            flat[start:stop] = value
        return flat.as_strided(slot.shape, slot.stride)

    found = {}
    for key, value in first.state.items():
        leaves, tree = tree_flatten(value)
        others = [tree_leaves(part.state[key]) for part in held[1:]]
        columns = zip(leaves, *others, strict=True)
        found[key] = tree_unflatten([whole(key, *column) for column in columns], tree)
    return found
