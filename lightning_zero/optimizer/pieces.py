"""The user's optimizer on pieces: its param groups pointed at them, and its states cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_leaves, tree_map_with_path

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


def put_members(optimizer: Optimizer, new: Mapping[int, Parameter]) -> None:
    """Replace members of the param groups by the ``new`` ones for their ids, in place."""
    for group in optimizer.param_groups:
        group["params"][:] = [new.get(id(one), one) for one in group["params"]]


def as_of_master(state: Mapping[str, Any], piece: Piece) -> Mapping[str, Any]:
    """Return a state with tensors of the weight's dtype cast to the master's."""
    of_weight = piece.plan.weight.dtype
    if of_weight is piece.dtype or not isinstance(state, Mapping):
        return state

    def cast(_: str, value: Any) -> Any:
        is_cast = isinstance(value, Tensor) and value.dtype is of_weight
        return value.to(piece.dtype) if is_cast else value

    return with_entries(state, cast)


def cut_state(state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
    """Return the part of a whole parameter's optimizer state that belongs to ``piece``.

    Its tensors may share memory with the whole ones.
    """
    if not isinstance(state, Mapping):
        return state

    range_, device = piece.range, piece.device

    def part_of(key: str, value: Any) -> Any:
        is_cut = is_of_elements(key, value, range_.slot)
        return range_.part_of(value).to(device) if is_cut else value

    return with_entries(state, part_of)


def is_whole_state(state: Any, piece: Piece) -> bool:
    """Return whether a state is that of a whole parameter, of which ``piece`` has a part."""
    if piece.shape == piece.range.slot.shape or not isinstance(state, Mapping):
        return False
    return any(
        is_of_elements(key, leaf, piece.range.slot)
        for key, value in state.items()
        for leaf in tree_leaves(value)
    )


def owned(state: Any) -> Any:
    """Return a state with its tensors cloned: not views of a file or of a larger tensor."""
    if not isinstance(state, Mapping):
        return state

    def clone(_: str, value: Any) -> Any:
        return rewrapped(value, Tensor.clone) if isinstance(value, Tensor) else value

    return with_entries(state, clone)


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
