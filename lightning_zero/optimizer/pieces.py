"""The user's optimizer on pieces: its param groups pointed at them, and its states cut."""

from __future__ import annotations

import functools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_leaves, tree_map_only, tree_map_with_path

from lightning_zero.optimizer.twin import bare, twin_of, uncompiled, with_inner
from lightning_zero.parameters import Piece
from lightning_zero.tensors import bytes_held, internals, rewrapped

FindPiece = Callable[[Parameter], Piece | None]

internals.step_together(Piece)


def members(optimizer: Optimizer) -> list[Parameter]:
    """Return the pieces and parameters in an optimizer's param groups, in order."""
    return [member for group in optimizer.param_groups for member in group["params"]]


def pieces_of(optimizer: Optimizer, find_piece: FindPiece | None = None) -> list[Piece]:
    """Return the pieces in an optimizer's param groups.

    With ``find_piece``, include those of parameters that were added since its last step.
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
    """Replace the engine's parameters in the param groups of ``optimizer`` by their pieces.

    Parameters of no engine stay. Another call takes in groups that were added since.

    Returns:
        The replaced parameters by piece. The optimizer's states are still keyed by the parameters.

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
    """An optimizer's states by piece; looking one up by a parameter of the module raises.

    Otherwise the lookup would find nothing, and ``state[parameter]`` would make an empty state.

    Attributes:
        names: The names of the parameters that have pieces, by id; empty in a copy.
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
            f"optimizer.state is keyed by this rank's piece of parameter {name!r}, not by the"
            " parameter. Get the pieces from the param groups: `for group in"
            " optimizer.param_groups: for p in group['params']: optimizer.state[p]`"
        )


def guard_states(optimizer: Optimizer, pieces: Iterable[Piece]) -> None:
    """Make lookups of optimizer state by module parameter raise instead of finding nothing.

    Call it again after torch has loaded states, for which it makes a new dictionary.
    """
    names = {id(piece.parameter): piece.range.slot.name for piece in pieces}
    holders = [*with_inner(optimizer)]
    for holder in holders:
        state = vars(holder).get("state")
        if type(state) is defaultdict:
            made = StatesOfPieces(state.default_factory, state)
            for other in holders:  # a wrapper may share the dictionary, under any name
                vars(other).update({k: made for k, v in vars(other).items() if v is state})
            state = made
        if isinstance(state, StatesOfPieces):
            state.names = names


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

    def part_of(key: str, tensor: Tensor) -> Tensor:
        if not is_of_elements(key, tensor, piece.parameter):
            return tensor
        return piece.range.part_of(tensor).to(piece.device)

    return {
        key: tree_map_only(Tensor, functools.partial(part_of, key), value)
        for key, value in state.items()
    }


def has_whole_state(optimizer: Optimizer, piece: Piece) -> bool:
    """Return whether the state of ``piece`` is that of its whole parameter and has to be cut."""
    if piece.shape == piece.range.slot.shape:
        return False
    states = [holder.state.get(piece, ()) for holder in with_inner(optimizer)]
    return any(
        is_of_elements(key, leaf, piece.parameter)
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
    return tree_map_only(Tensor, lambda tensor: rewrapped(tensor, Tensor.clone), {**state})


def is_of_elements(key: str, value: Any, member: Tensor) -> bool:
    """Return whether an entry of the state of a parameter or piece has a number per element.

    For a 0-d parameter the shape cannot tell ``exp_avg`` from the step count, so the name must.
    """
    is_alike = isinstance(value, Tensor) and value.shape == member.shape
    return is_alike and key != "step" and value.numel() > 0


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


def _tensors_of(optimizer: Optimizer, group: Mapping[str, Any], toy: Parameter) -> list[Tensor]:
    number = next(n for n, other in enumerate(bare(optimizer).param_groups) if other is group)
    state = _state_of(optimizer, number, toy)
    return [value for value in tree_leaves(state) if isinstance(value, Tensor)]


def _state_of(optimizer: Optimizer, number: int, toy: Parameter) -> dict[str, Any]:
    """Return the state of ``toy`` after two steps in the param group of index ``number``."""
    twin = _twin_of_group(optimizer, number, toy)
    toy.grad = torch.ones_like(toy)
    _let_train(twin)
    with uncompiled():
        for _ in range(2):
            twin.step()
    return dict(twin.state[toy])


def toy_state(optimizer: Optimizer, number: int, shape: Sequence[int]) -> dict[str, Any]:
    """Return the state of a small toy in the param group of index ``number``.

    The toy has as many dimensions as ``shape``. If it cannot be stepped, the state is empty.
    """
    small = [min(size, _TOY_NUMEL) for size in shape]
    try:
        with torch.random.fork_rng(devices=[]):
            return _state_of(optimizer, number, Parameter(torch.ones(small)))
    except Exception:
        return {}  # the failure of a toy on the host says nothing about the optimizer


def is_like(value: Any, model: Any) -> bool:
    """Return whether an entry of a state may stand where a toy's state has ``model``."""
    if value is None or not isinstance(model, (Tensor, int, float)):
        return True
    # A 0 may hold the place of numbers that come later.
    has_dim = isinstance(model, Tensor) and model.dim() > 0
    return isinstance(value, Tensor) or (
        isinstance(value, (int, float)) and not (has_dim and value)
    )


def missing_in_state(
    optimizer: Optimizer, number: int, options: Mapping[str, Any], state: Mapping[str, Any]
) -> str | None:
    """Return the first key that an optimizer misses when it steps a toy with a checkpoint's state.

    Args:
        optimizer: The optimizer that is to resume.
        number: The index of one of its param groups.
        options: The checkpoint's options for the group.
        state: The checkpoint's state for a parameter of the group.
    """
    # Entries without a number per element are single numbers.
    numbers = {k: v for k, v in state.items() if not isinstance(v, Tensor) or not v.dim()}
    shaped = {k: v.dtype for k, v in state.items() if k not in numbers}
    on_host = {key: False for key in ("capturable", "fused", "foreach") if key in options}
    try:
        toy = Parameter(torch.zeros(_TOY_NUMEL))
        twin = _twin_of_group(optimizer, number, toy)
        toy.grad = torch.ones_like(toy)
        zeros = {key: torch.zeros_like(toy, dtype=dtype) for key, dtype in shaped.items()}
        group = {**options, **on_host, "params": [toy]}
        # The end of `load_state_dict`, which adds options that older checkpoints lack.
        of_toy = {toy: {**owned(numbers), **zeros}}
        twin.__setstate__({"state": of_toy, "param_groups": [group]})
        _let_train(twin)
        with torch.random.fork_rng(devices=[]), uncompiled():
            twin.step()
    except KeyError as error:
        return str(error.args[0]) if error.args else "something"
    except Exception:
        return None  # the failure of a toy on the host says nothing about the state
    return None


def _let_train(optimizer: Optimizer) -> None:
    """Call ``train()``, without which some optimizers do not step."""
    if callable(train := getattr(optimizer, "train", None)):
        train()


def _twin_of_group(optimizer: Optimizer, number: int, toy: Parameter) -> Optimizer:
    """Return a copy of ``optimizer`` with one param group, which holds only ``toy``."""
    optimizer = bare(optimizer)
    stand_ins = [{own: [toy] for own in group["params"]} for group in optimizer.param_groups]
    return twin_of(optimizer, stand_ins, [number])


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
