"""The user's optimizer on pieces: which one may be cut, and how it is pointed at them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_zero.optimizer.probe import probe
from lightning_zero.optimizer.taint import Way
from lightning_zero.optimizer.twin import bare, twin_of, with_inner
from lightning_zero.parameters import Piece
from lightning_zero.tensors import internals

FindPiece = Callable[[Parameter], Piece | None]

internals.step_together(Piece)

_CURE = (
    "ZeRO gives each rank a flat part of every parameter, which only an element-wise optimizer"
    " (SGD, Adam, AdamW, Adagrad, RMSprop, ...) can step. Use one of those, or strategy='ddp'."
)


def check_can_be_cut(optimizer: Any) -> None:
    """Raise unless every element of a parameter may be stepped by itself.

    Raises:
        ValueError: It cannot be proved; see :func:`probe`.
    """
    verdict = probe(optimizer)
    if verdict.way is not Way.BY_ELEMENT:
        raise ValueError(f"{type(bare(optimizer)).__name__} {verdict.reason}. {_CURE}")


def members(optimizer: Optimizer) -> list[Parameter]:
    """Return the pieces and parameters in an optimizer's param groups, in their order."""
    return [member for group in optimizer.param_groups for member in group["params"]]


def pieces_of(optimizer: Optimizer) -> list[Piece]:
    """Return the pieces in an optimizer's param groups."""
    return [member for member in members(optimizer) if isinstance(member, Piece)]


def parameter_of(member: Parameter) -> Parameter:
    """Return the module's parameter for a member of a param group."""
    return member.parameter if isinstance(member, Piece) else member


def point_at_pieces(optimizer: Optimizer, find_piece: FindPiece) -> dict[Piece, Parameter]:
    """Replace the engine's parameters in the groups of ``optimizer`` by their pieces.

    Parameters of no engine are left alone. Calling it again takes in groups that were added since.

    Returns:
        The parameters that were replaced; the state is still theirs.

    Raises:
        ValueError: A parameter is in two groups.
    """
    replaced: dict[Piece, Parameter] = {}
    for holder in with_inner(optimizer):
        seen = {id(piece) for piece in pieces_of(holder)}
        for group in holder.param_groups:
            for index, parameter in enumerate(group["params"]):
                piece = None if isinstance(parameter, Piece) else find_piece(parameter)
                if piece is None:
                    continue
                if id(piece) in seen:
                    name, kind = piece.range.slot.name, type(optimizer).__name__
                    raise ValueError(
                        f"Parameter {name!r} appears in more than one param group of {kind}. Put"
                        " each parameter into one group."
                    )
                seen.add(id(piece))
                group["params"][index] = piece
                replaced[piece] = parameter
    return replaced


def take_state(
    optimizer: Optimizer,
    replaced: Mapping[Piece, Parameter],
    part_of: Callable[[Mapping[str, Any], Piece], Mapping[str, Any] | None],
) -> None:
    """Let the pieces have the state of their parameters, or what ``part_of`` makes of it."""
    for holder in with_inner(optimizer):
        for piece, parameter in replaced.items():
            if parameter in holder.state:
                part = part_of(holder.state.pop(parameter), piece)
                if part is not None:
                    holder.state[piece] = owned(part)


def cut_state(state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
    """Return the part of a whole parameter's optimizer state that belongs to ``piece``.

    Its tensors may share memory with the whole ones.
    """

    def part_of(key: str, tensor: Tensor) -> Tensor:
        if not is_per_element(key, tensor, piece):
            return tensor
        return piece.range.part_of(tensor).to(piece.device)

    return {
        key: tree_map_only(Tensor, functools.partial(part_of, key), value)
        for key, value in state.items()
    }


def owned(state: Any) -> Any:
    """Return a state with its tensors in memory of their own: not in a file or a larger one."""
    if not isinstance(state, Mapping):
        return state
    return tree_map_only(Tensor, lambda tensor: tensor.clone(), {**state})


def is_per_element(key: str, value: Any, piece: Piece) -> bool:
    """Return whether an entry of a whole parameter's state has one number for each element.

    For a 0-d parameter the shape cannot tell ``exp_avg`` from the step count, so the name must.
    """
    return isinstance(value, Tensor) and value.shape == piece.parameter.shape and key != "step"


def state_bytes(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> StateBytes:
    """Return the size of a parameter's state, found by stepping a toy parameter in ``group``."""
    groups = bare(optimizer).param_groups
    number = next(index for index, other in enumerate(groups) if other is group)
    twin, toy = _twin_of_group(optimizer, number, dtype)
    twin.step()
    tensors = [value for value in twin.state[toy].values() if isinstance(value, Tensor)]
    per_element = sum(value.element_size() for value in tensors if value.shape == toy.shape)
    return StateBytes(per_element, sum(v.nbytes for v in tensors if v.shape != toy.shape))


def missing_in_state(
    optimizer: Optimizer, number: int, options: Mapping[str, Any], state: Mapping[str, Any]
) -> str | None:
    """Return the name of the first thing that an optimizer misses when it goes on from a state.

    A toy is stepped with it.

    Args:
        optimizer: The optimizer that is to go on.
        number: Which of its param groups.
        options: What a checkpoint has for the group.
        state: What it has for a parameter of the group.
    """
    # What is not one number per element is one number.
    numbers = {k: v for k, v in state.items() if not isinstance(v, Tensor) or not v.dim()}
    shaped = {k: v.dtype for k, v in state.items() if k not in numbers}
    on_host = {key: False for key in ("capturable", "fused", "foreach") if key in options}
    try:
        twin, toy = _twin_of_group(optimizer, number, torch.float32)
        zeros = {key: torch.zeros_like(toy, dtype=dtype) for key, dtype in shaped.items()}
        group = {**options, **on_host, "params": [toy]}
        # As `load_state_dict` ends: older checkpoints are given the options of later versions.
        of_toy = {toy: {**owned(numbers), **zeros}}
        twin.__setstate__({"state": of_toy, "param_groups": [group]})
        with torch.random.fork_rng(devices=[]):
            twin.step()
    except KeyError as error:
        return str(error.args[0]) if error.args else "something"
    except Exception:
        return None  # what a toy on the host cannot do says nothing of the state
    return None


def _twin_of_group(
    optimizer: Optimizer, number: int, dtype: torch.dtype
) -> tuple[Optimizer, Parameter]:
    """Return a copy of ``optimizer`` that has one group with a toy, and the toy with a gradient."""
    optimizer = bare(optimizer)
    toy = Parameter(torch.zeros(_TOY_NUMEL, dtype=dtype))
    stand_ins = [{own: [toy] for own in group["params"]} for group in optimizer.param_groups]
    twin = twin_of(optimizer, stand_ins, [number])
    toy.grad = torch.ones_like(toy)
    return twin, toy


class StateBytes(NamedTuple):
    """Bytes of an optimizer's state: for each element of a parameter, and for the parameter."""

    per_element: int
    per_parameter: int

    def of(self, numel: int) -> int:
        """Return the bytes for a piece of ``numel`` elements; an empty one is never stepped."""
        return self.per_element * numel + self.per_parameter if numel else 0


_TOY_NUMEL = 24
