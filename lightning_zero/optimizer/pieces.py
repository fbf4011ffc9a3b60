"""The user's optimizer on pieces: how it is pointed at them, and what of its state is whose."""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_leaves, tree_map_only, tree_map_with_path

from lightning_zero.optimizer.twin import bare, twin_of, with_inner
from lightning_zero.parameters import Piece
from lightning_zero.tensors import internals

FindPiece = Callable[[Parameter], Piece | None]

internals.step_together(Piece)


class OfOptimizer:
    """Something that belongs to an optimizer, and is found by it in a dictionary with weak keys.

    It does not hold the optimizer itself, which would live as long as such a dictionary.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer


def members(optimizer: Optimizer) -> list[Parameter]:
    """Return the pieces and parameters in an optimizer's param groups, in their order."""
    return [member for group in optimizer.param_groups for member in group["params"]]


def pieces_of(optimizer: Optimizer, find_piece: FindPiece | None = None) -> list[Piece]:
    """Return the pieces in an optimizer's param groups.

    With ``find_piece`` those of parameters too that were added since its last step.
    """
    found = [
        one if isinstance(one, Piece) or find_piece is None else find_piece(one)
        for one in members(optimizer)
    ]
    return [one for one in found if isinstance(one, Piece)]


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


class StatesOfPieces(defaultdict[Any, Any]):
    """An optimizer's states by piece; to ask for that of a parameter of the module is an error.

    The answer would be that there is none, and ``state[parameter]`` would make an empty one.

    Attributes:
        names: The names of the parameters that have pieces, by id; none in a copy.
    """

    names: Mapping[int, str] = MappingProxyType({})

    def __missing__(self, key: Any) -> Any:
        self._refuse(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self._refuse(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of ``key``."""
        return super().get(key, default) if key in self else default

    def _refuse(self, key: object) -> bool:
        name = self.names.get(id(key))
        if name is None:
            return False
        raise RuntimeError(
            f"optimizer.state has the state of this rank's piece of parameter {name!r}, not of the"
            " parameter. Take the pieces from the groups: `for group in optimizer.param_groups:"
            " for p in group['params']: optimizer.state[p]`"
        )


def guard_states(optimizer: Optimizer, pieces: Iterable[Piece]) -> None:
    """Let nobody look in vain for the states of parameters of which ``optimizer`` has ``pieces``.

    It is to be called again when torch has loaded states, for which it makes another dictionary.
    """
    names = {id(piece.parameter): piece.range.slot.name for piece in pieces}
    holders = [*with_inner(optimizer)]
    for holder in holders:
        state = vars(holder).get("state")
        if type(state) is defaultdict:
            made = StatesOfPieces(state.default_factory, state)
            for other in holders:  # a wrapper may have what it wraps has, by any name
                vars(other).update({k: made for k, v in vars(other).items() if v is state})
            state = made
        if isinstance(state, StatesOfPieces):
            state.names = names


def take_state(
    optimizer: Optimizer,
    replaced: Mapping[Piece, Parameter],
    part_of: Callable[[Mapping[str, Any], Piece], Mapping[str, Any] | None],
) -> None:
    """Let the pieces have what ``part_of`` makes of the state of their parameters.

    Who made it with the dtype of weights that are copies knew of no other, and means the master's.
    """
    for holder in with_inner(optimizer):
        for piece, parameter in replaced.items():
            state = holder.state.pop(parameter, None)
            part = None if state is None else part_of(_as_of_master(state, piece), piece)
            if part is not None:
                holder.state[piece] = part


def _as_of_master(state: Mapping[str, Any], piece: Piece) -> Mapping[str, Any]:
    """Return a state with tensors of the master's dtype where they have the weight's."""
    of_weight = piece.weight_dtype

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(piece.dtype) if tensor.dtype is of_weight else tensor

    is_same = of_weight is piece.dtype or not isinstance(state, Mapping)
    return state if is_same else tree_map_only(Tensor, cast, {**state})


def cut_state(state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
    """Return the part of a whole parameter's optimizer state that belongs to ``piece``.

    Its tensors may share memory with the whole ones.
    """

    def part_of(key: str, tensor: Tensor) -> Tensor:
        if not is_of_elements(key, tensor, piece.parameter):
            return tensor
        return piece.range.part_of(tensor).to(piece.device)

    return {
        key: tree_map_only(Tensor, functools.partial(part_of, key), value)
        for key, value in state.items()
    }


def has_whole_state(optimizer: Optimizer, piece: Piece) -> bool:
    """Return whether ``optimizer`` has a state of all elements of the parameter of ``piece``."""
    if piece.shape == piece.parameter.shape:
        return False
    states = [holder.state.get(piece, ()) for holder in with_inner(optimizer)]
    return any(
        is_of_elements(key, leaf, piece.parameter)
        for state in states
        if isinstance(state, Mapping)
        for key, value in state.items()
        for leaf in tree_leaves(value)
    )


def owned(state: Any) -> Any:
    """Return a state with its tensors in memory of their own: not in a file or a larger one."""
    if not isinstance(state, Mapping):
        return state
    return tree_map_only(Tensor, lambda tensor: tensor.clone(), {**state})


def is_of_elements(key: str, value: Any, member: Tensor) -> bool:
    """Return whether an entry of the state of a parameter, or piece, has a number for each element.

    For a 0-d parameter the shape cannot tell ``exp_avg`` from the step count, so the name must.
    """
    is_alike = isinstance(value, Tensor) and value.shape == member.shape
    return is_alike and key != "step" and value.numel() > 0


def with_entries(state: Mapping[str, Any], entry: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return a state with what ``entry`` makes of each entry, also of those in lists and the like.

    It is given the entry's name, and for one in a container also the place in there.
    """

    def within(key: str, value: Any) -> Any:
        if isinstance(value, Tensor) or not isinstance(value, _CONTAINERS):
            return entry(key, value)
        return tree_map_with_path(lambda path, leaf: entry(f"{key}{keystr(path)}", leaf), value)

    return {key: within(key, value) for key, value in state.items()}


_CONTAINERS = (list, tuple, Mapping, deque)


def state_bytes(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> StateBytes:
    """Return the size of a parameter's state, found by stepping a toy parameter in ``group``."""
    toy = Parameter(torch.zeros(_TOY_NUMEL, dtype=dtype))
    tensors = _state_of(optimizer, group, toy)
    per_element = sum(value.element_size() for value in tensors if value.shape == toy.shape)
    return StateBytes(per_element, sum(v.nbytes for v in tensors if v.shape != toy.shape))


def whole_state_bytes(
    optimizer: Optimizer, group: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype
) -> int:
    """Return the size of the state of a parameter that is stepped whole.

    Raises:
        ValueError: It can be known from its steps only.
    """
    try:
        meta = Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"))
        return sum(value.nbytes for value in _state_of(optimizer, group, meta))
    except Exception:
        # It reads values. A small toy has them, and its sizes are told apart.
        small = [min(size, other) for size, other in zip(shape, _PRIMES, strict=False)]
    sizes = {math.prod(small): math.prod(shape), **dict(zip(small, shape, strict=False))}
    try:
        tensors = _state_of(optimizer, group, Parameter(torch.ones(small, dtype=dtype)))
    except Exception as error:
        kind = type(bare(optimizer)).__name__
        raise ValueError(
            f"The size of {kind}'s state cannot be predicted ({error}); MemoryMonitor measures it."
        ) from error
    return sum(
        math.prod(sizes.get(size, size) for size in value.shape) * value.element_size()
        for value in tensors
    )


def _state_of(optimizer: Optimizer, group: Mapping[str, Any], toy: Parameter) -> list[Tensor]:
    """Return the tensors in the state of ``toy`` after a step in ``group``."""
    number = next(n for n, other in enumerate(bare(optimizer).param_groups) if other is group)
    twin = _twin_of_group(optimizer, number, toy)
    toy.grad = torch.ones_like(toy)
    _let_train(twin)
    for _ in range(2):
        twin.step()
    return [value for value in tree_leaves(twin.state[toy]) if isinstance(value, Tensor)]


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
        toy = Parameter(torch.zeros(_TOY_NUMEL))
        twin = _twin_of_group(optimizer, number, toy)
        toy.grad = torch.ones_like(toy)
        zeros = {key: torch.zeros_like(toy, dtype=dtype) for key, dtype in shaped.items()}
        group = {**options, **on_host, "params": [toy]}
        # As `load_state_dict` ends: older checkpoints are given the options of later versions.
        of_toy = {toy: {**owned(numbers), **zeros}}
        twin.__setstate__({"state": of_toy, "param_groups": [group]})
        _let_train(twin)
        with torch.random.fork_rng(devices=[]):
            twin.step()
    except KeyError as error:
        return str(error.args[0]) if error.args else "something"
    except Exception:
        return None  # what a toy on the host cannot do says nothing of the state
    return None


def _let_train(optimizer: Optimizer) -> None:
    """Tell an optimizer that it is to train, without which some do not step."""
    if callable(train := getattr(optimizer, "train", None)):
        train()


def _twin_of_group(optimizer: Optimizer, number: int, toy: Parameter) -> Optimizer:
    """Return a copy of ``optimizer`` that has one group, with ``toy`` in it."""
    optimizer = bare(optimizer)
    stand_ins = [{own: [toy] for own in group["params"]} for group in optimizer.param_groups]
    return twin_of(optimizer, stand_ins, [number])


class StateBytes(NamedTuple):
    """Bytes of an optimizer's state: for each element of a parameter, and for the parameter."""

    per_element: int
    per_parameter: int

    def of(self, numel: int) -> int:
        """Return the bytes for a piece of ``numel`` elements; an empty one is never stepped."""
        return self.per_element * numel + self.per_parameter if numel else 0

    def num_entries(self, dtype: torch.dtype) -> int:
        """Return in how many tensors of ``dtype`` the numbers of elements are."""
        return -(-self.per_element // dtype.itemsize)


_TOY_NUMEL = 24
# Sizes of a small toy: large enough for those that factor large matrices only.
_PRIMES = (131, 137, 139, 149, 151, 157, 163, 167)
