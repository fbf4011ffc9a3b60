"""The user's optimizer on pieces: its param groups pointed at them, and its states cut."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_leaves, tree_map_only, tree_map_with_path

from lightning_zero.optimizer.shared_state import with_inner
from lightning_zero.parameters import Piece
from lightning_zero.plan import Slot
from lightning_zero.tensors import internals, rewrapped

FindPiece = Callable[[Parameter], Piece | None]

internals.step_together(Piece)


def held_by(optimizer: Optimizer) -> list[Parameter]:
    """Return what is in an optimizer's param groups, in order."""
    return [member for group in optimizer.param_groups for member in group["params"]]


def parameter_of(member: Parameter) -> Parameter:
    """Return the module's parameter for a member of a param group."""
    return member.parameter if isinstance(member, Piece) else member


def point_at_pieces(optimizer: Optimizer, find_piece: FindPiece) -> dict[Piece, Parameter]:
    """Replace the engine's parameters in the param groups of ``optimizer`` by their pieces.

    Parameters of no engine stay. Another call takes in groups that were added since.

    Returns:
        The replaced parameters by piece. The optimizer's states are still keyed by the parameters.

    Raises:
        ValueError: A parameter is in two groups.
    """
    replaced: dict[Piece, Parameter] = {}
    for holder in with_inner(optimizer):
        seen: set[int] = set()
        for group in holder.param_groups:
            for index, member in enumerate(group["params"]):
                piece = member if isinstance(member, Piece) else find_piece(member)
                if piece is None:
                    continue
                if id(piece) in seen:
                    name, kind = piece.range.slot.name, type(optimizer).__name__
                    raise ValueError(
                        f"Parameter {name!r} appears in more than one param group of {kind}. Put"
                        " each parameter into one group."
                    )
                seen.add(id(piece))
                if piece is not member:
                    group["params"][index] = piece
                    replaced[piece] = member
    return replaced


def put_members(optimizer: Optimizer, others: Mapping[int, Parameter]) -> None:
    """Replace members of the param groups, given by id, in place."""
    for holder in with_inner(optimizer):
        for group in holder.param_groups:
            members = group["params"]
            members[:] = [others.get(id(member), member) for member in members]


def exchange(optimizer: Optimizer, old: Iterable[Parameter], new: Iterable[Parameter]) -> None:
    """Replace parameters in the param groups and as keys of the states."""
    others = {id(one): other for one, other in zip(old, new, strict=True)}
    put_members(optimizer, others)
    for holder in with_inner(optimizer):
        state: dict[Any, Any] = holder.state
        for key in [key for key in state if id(key) in others]:
            state[others[id(key)]] = state.pop(key)


def take_state(
    optimizer: Optimizer,
    replaced: Mapping[Piece, Parameter],
    part_of: Callable[[Mapping[str, Any], Piece], Mapping[str, Any] | None],
) -> None:
    """Replace the states of parameters by what ``part_of`` returns for their pieces, if anything.

    Tensors of the weight's dtype are cast to the master's first: an optimizer that made states
    before there were masters knew of no other dtype.
    """
    for holder in with_inner(optimizer):
        for piece, parameter in replaced.items():
            state = holder.state.pop(parameter, None)
            part = None if state is None else part_of(_as_of_master(state, piece), piece)
            if part is not None:
                holder.state[piece] = part


def _as_of_master(state: Mapping[str, Any], piece: Piece) -> Mapping[str, Any]:
    """Return a state with tensors of the weight's dtype cast to the master's."""
    of_weight = piece.weight_dtype

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(piece.dtype) if tensor.dtype is of_weight else tensor

    is_same = of_weight is piece.dtype or not isinstance(state, Mapping)
    return state if is_same else tree_map_only(Tensor, cast, {**state})


def cut_state(state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
    """Return the part of a whole parameter's optimizer state that belongs to ``piece``.

    Its tensors may share memory with the whole ones.
    """
    if not isinstance(state, Mapping):
        return state

    range_, device = piece.range, piece.device

    def part_of(key: str, tensor: Tensor) -> Tensor:
        if not is_of_elements(key, tensor, range_.slot):
            return tensor
        return range_.part_of(tensor).to(device)

    return _mapped(state, part_of)


def _mapped(state: Mapping[str, Any], change: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
    """Return a state with ``change`` of each entry's name and each tensor, also in containers."""
    return {
        key: change(key, value)
        if isinstance(value, Tensor)  # as most are, which a search would take ten times as long for
        else tree_map_only(Tensor, functools.partial(change, key), value)
        for key, value in state.items()
    }


def has_whole_state(optimizer: Optimizer, piece: Piece) -> bool:
    """Return whether the state of ``piece`` is that of its whole parameter and has to be cut."""
    if piece.shape == piece.range.slot.shape:
        return False
    states = [holder.state.get(piece, ()) for holder in with_inner(optimizer)]
    return any(
        is_of_elements(key, leaf, piece.range.slot)
        for state in states
        if isinstance(state, Mapping)
        for key, value in state.items()
        for leaf in tree_leaves(value)
    )


def is_of_torch(state_dict: Any) -> bool:
    """Return whether an optimizer's state dict has torch's format, not one of its own."""
    return isinstance(state_dict, Mapping) and {"state", "param_groups"} <= state_dict.keys()


def owned(state: Any) -> Any:
    """Return a state with its tensors cloned: not views of a file or of a larger tensor."""
    if not isinstance(state, Mapping):
        return state
    return _mapped(state, lambda _, tensor: rewrapped(tensor, Tensor.clone))


def is_of_elements(key: str, value: Any, member: Tensor | Slot) -> bool:
    """Return whether an entry of the state of a parameter or piece has a number per element.

    For a 0-d parameter the shape cannot tell ``exp_avg`` from the step count, so the name must.
    """
    is_alike = isinstance(value, Tensor) and value.shape == member.shape
    has_elements = isinstance(member, Slot) or member.numel() > 0
    return is_alike and key != "step" and has_elements


def with_entries(state: Mapping[str, Any], entry: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return a state with ``entry`` applied to each entry, also within containers.

    ``entry`` gets the entry's name, followed by the path within its container if it is in one.
    """

    def within(key: str, value: Any) -> Any:
        if isinstance(value, Tensor) or not isinstance(value, _CONTAINERS):
            return entry(key, value)
        return tree_map_with_path(lambda path, leaf: entry(f"{key}{keystr(path)}", leaf), value)

    return {key: within(key, value) for key, value in state.items()}


_CONTAINERS = (list, tuple, Mapping, deque)
