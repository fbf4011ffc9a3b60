"""State dicts of optimizers that step a sharded model, as a single process would have them.

Saving returns the dictionary that DDP would, with a :class:`ShardedValue` in place of every sharded
tensor. Nothing is gathered.

Loading takes whole values, mapped to memory, and each rank copies its own ranges. States are
matched by the names of their parameters where a checkpoint has them, else by their order. Whatever
does not fit is found before anything in memory has changed.

A ``state_dict`` in a format that only its optimizer knows is of one that steps all at once. Every
rank has all of it, and it saves and loads it by itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isnan
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lightning_zero.checkpoint.module_state import local_value, sharded
from lightning_zero.checkpoint.values import ShardedValue
from lightning_zero.comm import Communicator
from lightning_zero.engine import Engine, differences, group_lines
from lightning_zero.optimizer import (
    Way,
    members,
    owned,
    parameter_of,
    stepper_of,
    with_inner,
)
from lightning_zero.parameters import Piece
from lightning_zero.tensors import (
    is_wrapper,
    lasting_tensors,
    runs_outside,
    uncollected,
    wrapper_of,
)

# -- saving ----------------------------------------------------------------------------------------


@uncollected()
@runs_outside
def optimizer_state(optimizer: Optimizer, engine: Engine, label: str) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with sharded states, under the integer ids of DDP.

    All ranks call it together. ``label`` names the optimizer in the checkpoint.
    """
    engine.require_whole()
    local = stepper_of(optimizer).state_dict()
    if not local or stepper_of(optimizer).way is Way.ALL_AT_ONCE:
        return local  # of Lightning's stand-in for no optimizer, or every rank has all of it
    own = [local["state"].get(index) for index in range(len(members(optimizer)))]
    # Some optimizers keep entries that belong to no parameter.
    others = {k: v for k, v in local["state"].items() if not isinstance(v, Mapping)}
    return {**local, "state": {**_whole_states(optimizer, own, engine, label), **others}}


def _whole_states(
    optimizer: Optimizer, own: Sequence[Mapping[str, Any] | None], engine: Engine, label: str
) -> dict[int, dict[str, Any]]:
    """Return the states of whole parameters, by index, given this rank's ``own`` parts."""
    pieces, is_whole = members(optimizer), stepper_of(optimizer).is_whole
    descriptions = _Descriptions()
    mine = {
        index: descriptions.of(own[index] or {}, piece, is_whole=is_whole)
        for index, piece in enumerate(pieces)
        if (own[index] is not None if is_whole else _has_part(piece))
    }
    gathered = engine.comm.control.gather_objects(
        (group_lines(optimizer, label, with_sizes=True), mine)
    )
    _check_optimizers([lines for lines, _ in gathered], label)
    described = [states for _, states in gathered]
    whole: dict[int, dict[str, Any]] = {}
    with lasting_tensors():
        for index, piece in enumerate(pieces):
            # Ranks with an empty piece, or that do not own it, have no state; any other will do.
            states = [of_rank[index] for of_rank in described if index in of_rank]
            _check_alike(states, f"the state of parameter {index} of {label}")
            if not states or not states[0]:
                continue
            is_copy = not is_whole and getattr(piece, "is_copy", False)
            is_first = engine.comm.is_in_first_copy and not is_copy
            here = (own[index] if is_first else None) or {}
            whole[index] = {
                key: _entry(
                    f"{label} {index}.{key}", here.get(key), described_entry, piece, engine.comm
                )
                for key, described_entry in states[0].items()
            }
    return whole


def _has_part(member: Any) -> bool:
    """Return whether this rank has a state of a parameter, which may have no elements at all."""
    return not isinstance(member, Piece) or member.numel() > 0 or not member.range.slot.numel


def _check_optimizers(of_ranks: Sequence[Sequence[str]], label: str) -> None:
    """Raise a ``ValueError`` unless all ranks have the same optimizer."""
    if found := differences(of_ranks):
        raise ValueError(
            f"The ranks do not agree on {label}. {'; '.join(found)}. configure_optimizers must"
            " return the same optimizers on every rank, and schedulers must update them alike."
        )


def _check_alike(states: Sequence[Mapping[str, Any]], what: str) -> None:
    """Raise a ``ValueError`` unless all ``states``, which all ranks know, have the same entries."""
    other = next((state for state in states if state.keys() != states[0].keys()), None)
    if other is not None:
        one, another = (", ".join(sorted(state)) for state in (states[0], other))
        raise ValueError(
            f"The ranks do not agree on {what}: one has {one}; another has {another}."
            " configure_optimizers must return the same optimizers on every rank."
        )


# -- descriptions, which ranks send each other -------------------------------------------------

# A model may have very many parameters, most of whose states are alike. Alike ones share one
# description, so that an exchange carries it once.


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
            name: _entry(f"{key}.{name}", getattr(mine, name, None), described, piece, comm)
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


class _Descriptions:
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


def _entry(key: str, mine: Any, described: Any, piece: Any, comm: Communicator) -> Any:
    """Return an entry with values in place of its stand-ins; ``mine`` is this rank's own."""
    if isinstance(described, _Number):
        return described.tensor()
    if isinstance(described, _StandIn | _Wrapper):
        return described.value(key, mine, piece, comm)
    leaves, tree = tree_flatten(described)
    own = [None] * len(leaves) if mine is None else tree_leaves(mine)
    parts = [
        _entry(f"{key}.{number}", part, leaf, piece, comm)
        if isinstance(leaf, _StandIn | _Wrapper | _Number)
        else leaf
        for number, (leaf, part) in enumerate(zip(leaves, own, strict=True))
    ]
    return tree_unflatten(parts, tree)


# -- loading ---------------------------------------------------------------------------------------


def matched(state: Any, names: Sequence[Sequence[Sequence[str]]]) -> Any:
    """Return an optimizer's state in the order of its current parameters, if it has their names.

    ``names`` has, for each group and parameter, all names that the module has for it. A state whose
    ids are names, as of a directory, is matched by these, or else by the ``param_names`` of torch.

    Raises:
        ValueError: The ids are names, but of other parameters.
    """
    groups = state.get("param_groups") if _is_optimizer_state(state) else None
    if not groups or len(groups) != len(names):
        return state
    ids = [key for group in groups for key in group["params"]]
    has_names = all(isinstance(key, str) for key in ids)
    sorted_groups = []
    for number, (group, current) in enumerate(zip(groups, names, strict=True)):
        saved = group["params"] if has_names else group.get("param_names", ())
        position = {name: place for place, name in enumerate(saved)}
        order = [next((position[n] for n in known if n in position), None) for known in current]
        if None in order or len(order) != len(group["params"]) or len(saved) != len(order):
            if not has_names:
                return state
            here = {name for known in current for name in known}
            lacking = [known[0] for known, at in zip(current, order, strict=True) if at is None]
            surplus = [name for name in saved if name not in here]
            raise ValueError(
                f"its param group {number} lacks {', '.join(lacking) or 'nothing'}, and has"
                f" {', '.join(surplus) or 'nothing'} that the optimizer's has not"
            )
        changed = {
            key: [group[key][place] for place in order if place is not None]
            for key in ("params", "param_names")
            if key in group
        }
        sorted_groups.append({**group, **changed})
    return {**state, "param_groups": sorted_groups}


def with_integer_ids(state: Any) -> Any:
    """Return an optimizer's state with integers in place of names, as torch writes it."""
    if not _is_optimizer_state(state):
        return state
    ids: dict[Any, int] = {}
    groups = [
        {**group, "params": [ids.setdefault(key, len(ids)) for key in group["params"]]}
        for group in state["param_groups"]
    ]
    held = {ids.get(key, key): entries for key, entries in state["state"].items()}
    return {**state, "state": held, "param_groups": groups}


def local_optimizer_state(optimizer: Optimizer, state: Any) -> Any:
    """Return a whole optimizer state with this rank's parts of what tensor parallelism has cut.

    That of an optimizer that steps whole parameters stays whole. A state that does not fit its
    optimizer is returned as it is, to be refused.
    """
    if stepper_of(optimizer).is_whole or not _is_optimizer_state(state):
        return state
    ids = [key for group in state["param_groups"] for key in group["params"]]
    entries = dict(state["state"])
    for key, member in zip(ids, members(optimizer), strict=False):
        parameter = parameter_of(member)
        if isinstance(entries.get(key), Mapping):
            entries[key] = {
                name: local_value(value, parameter, tuple(parameter.shape))
                for name, value in entries[key].items()
            }
    return {**state, "state": entries}


def check_optimizer_states(
    optimizers: list[Optimizer], states: Sequence[Mapping[str, Any]], name_of: Callable[[Any], str]
) -> None:
    """Raise a ``ValueError`` unless every optimizer that has a state can load it.

    ``name_of`` names a parameter or piece for the error.
    """
    if not isinstance(states, Sequence):
        raise ValueError(f"The checkpoint's optimizer states are a {type(states).__name__}.")
    for number, (optimizer, state) in enumerate(zip(optimizers, states, strict=False)):
        stepper = stepper_of(optimizer)
        if not state and not stepper.state_dict():
            continue
        is_own, is_whole = stepper.has_own_format, stepper.is_whole
        is_state = isinstance(state, Mapping) if is_own else _is_optimizer_state(state)
        if not is_state:
            raise ValueError(
                f"The checkpoint's entry for optimizer {number} is not an optimizer state."
            )
        faults = _faults_in_own_format if is_own else _faults
        with stepper.holding_parts():
            fault = next(faults(optimizer, state, name_of, is_whole=is_whole), None)
        if fault is not None:
            kind = type(optimizer).__name__
            raise ValueError(f"The checkpoint does not fit optimizer {number} ({kind}): {fault}.")


def _is_optimizer_state(state: Any) -> bool:
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    return isinstance(groups, (list, tuple)) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple))
        for group in groups
    )


def _faults(
    optimizer: Optimizer, state: Mapping[str, Any], name_of: Callable[[Any], str], *, is_whole: bool
) -> Iterator[str]:
    groups, saved = optimizer.param_groups, state["param_groups"]
    if len(groups) != len(saved):
        yield f"it has {len(saved)} param groups, but the optimizer has {len(groups)}"
        return
    pairs: list[tuple[Any, Any]] = []
    for number, (group, other) in enumerate(zip(groups, saved, strict=True)):
        there, here = len(other["params"]), len(group["params"])
        if there != here:
            yield f"its param group {number} has {there} parameters, but the optimizer's has {here}"
            return
        pairs += zip(group["params"], other["params"], strict=True)
    for parameter, key in pairs:
        entries, name_there = state["state"].get(key), name_of(parameter)
        if entries is None:
            continue
        if not isinstance(entries, Mapping):
            yield f"its state of {name_there!r} is a {type(entries).__name__}; expected a dict"
            return
        if is_whole:
            continue  # steps of whole parameters may keep tensors of any shape
        shape = parameter.range.slot.shape if isinstance(parameter, Piece) else parameter.shape
        for name, value in entries.items():
            # A state has one number per element, or a single one.
            is_tensor = isinstance(value, Tensor) and value.dim() and value.shape != shape
            if is_tensor and not (name == "step" and value.numel() == 1):
                yield (
                    f"its {name!r} of {name_there!r} has shape {tuple(value.shape)}, but the"
                    f" parameter has shape {tuple(shape)}"
                )


def _faults_in_own_format(
    optimizer: Optimizer, state: Mapping[str, Any], name_of: Callable[[Any], str], *, is_whole: bool
) -> Iterator[str]:
    """Yield the faults that show from outside: in the names, and in wrapped optimizers."""
    own = stepper_of(optimizer).state_dict()
    if not own.keys() <= state.keys():
        there, here = (", ".join(map(repr, names)) for names in (state, own))
        yield f"its state has {there}, but the optimizer's has {here}"
        return
    inner = list(with_inner(optimizer))[1:]
    nested = [value for value in state.values() if _is_optimizer_state(value)]
    for holder, value in zip(inner, nested, strict=False):
        yield from _faults(holder, value, name_of, is_whole=is_whole)


@uncollected()
@runs_outside
def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], engine: Engine) -> None:
    """Load a whole optimizer state; each rank copies its own pieces of it. A collective."""
    stepper = stepper_of(optimizer)
    is_own_format = not state or stepper.way is Way.ALL_AT_ONCE
    mine: Any = {}
    with engine.loading("Loading optimizer states"):
        mine = owned(state) if is_own_format else _own_states(optimizer, state)
    whole = stepper.whole_members() if is_own_format else contextlib.nullcontext()
    with stepper.holding_parts(), whole:
        optimizer.load_state_dict(mine)


def _own_states(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with copies of what this rank keeps of it."""
    stepper = stepper_of(optimizer)
    ids = [key for group in state["param_groups"] for key in group["params"]]
    # Entries that belong to no parameter, which some optimizers keep.
    known = set(ids)
    own = {key: owned(value) for key, value in state["state"].items() if key not in known}
    for key, piece in zip(ids, members(optimizer), strict=True):
        entries = state["state"].get(key)
        if entries is None:
            continue
        if not isinstance(piece, Piece):
            own[key] = owned(entries)
        elif stepper.keeps_state_of(piece):
            own[key] = stepper.part_of(entries, piece)
    return {**state, "state": own}
