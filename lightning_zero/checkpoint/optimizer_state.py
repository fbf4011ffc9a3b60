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

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    known: dict[Any, Any] = {}
    mine = {
        index: _description(own[index] or {}, piece, known, is_whole=is_whole)
        for index, piece in enumerate(pieces)
        if (own[index] is not None if is_whole else _has_part(piece))
    }
    gathered = engine.comm.control.gather_objects(
        (group_lines(optimizer, label, with_sizes=True), mine)
    )
    if found := differences([lines for lines, _ in gathered]):
        raise ValueError(
            f"The ranks do not agree on {label}. {'; '.join(found)}. configure_optimizers must"
            " return the same optimizers on every rank, and schedulers must update them alike."
        )
    described = [states for _, states in gathered]
    whole: dict[int, dict[str, Any]] = {}
    with lasting_tensors():
        for index, piece in enumerate(pieces):
            # Ranks with an empty piece, or that do not own it, have no state; any other will do.
            states = [of_rank[index] for of_rank in described if index in of_rank]
            entries = dict.fromkeys(", ".join(sorted(state)) for state in states)
            if len(entries) > 1:
                raise ValueError(
                    f"The ranks do not agree on the state of parameter {index} of {label}: one has"
                    f" {'; another has '.join(entries)}. configure_optimizers must return the same"
                    " optimizers on every rank."
                )
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


# -- descriptions, which ranks send each other -------------------------------------------------

# A model may have very many parameters, most of whose states are alike. Alike ones share one
# description, so that an exchange carries it once.


@dataclass(frozen=True)
class _Cut:
    """A tensor that is cut into pieces, or that its owner holds whole.

    ``shape`` is that of the owner's tensor; ``None`` if the tensor is cut, as the parameter is.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] | None

    def value(self, key: str, part: Tensor | None, piece: Any, comm: Communicator) -> ShardedValue:
        """Return the sharded value; ``part`` is ``None`` on a rank that holds nothing of it."""
        part = torch.empty(0, dtype=self.dtype) if part is None else part
        if self.shape is None:
            return sharded(key, piece, part, comm)
        stride = torch.empty(self.shape, device="meta").stride()
        flat = part.contiguous().reshape(-1)
        return ShardedValue.of(key, flat, 0, self.shape, stride, control=comm.control)


@dataclass(frozen=True)
class _Wrapper:
    """A tensor that wraps others, which its owner holds whole."""

    facts: tuple[type, tuple[int, ...], tuple[int, ...], torch.dtype]
    values: dict[str, Any]

    def value(self, key: str, mine: Any, piece: Any, comm: Communicator) -> Tensor:
        """Return a wrapper of sharded values."""
        values = {
            name: _entry(f"{key}.{name}", getattr(mine, name, None), described, piece, comm)
            for name, described in self.values.items()
        }
        return wrapper_of(*self.facts, values)


@dataclass(frozen=True)
class _Number:
    """A tensor without dimensions, such as the count of steps."""

    dtype: torch.dtype
    number: bool | int | float

    def value(self, key: str, mine: Any, piece: Any, comm: Communicator) -> Tensor:
        """Return the number in a tensor of its own: a step adds to it in place."""
        return torch.tensor(self.number, dtype=self.dtype, device="cpu")


_Described = _Cut | _Wrapper | _Number


def _description(
    entries: Mapping[str, Any], piece: Any, known: dict[Any, Any], *, is_whole: bool
) -> dict[str, Any]:
    """Describe a state; small tensors in it are sent. ``known`` has earlier descriptions."""

    def one(key: str, tensor: Tensor) -> Any:
        shape = tuple(tensor.shape)
        if is_whole and is_wrapper(tensor):
            held = vars(tensor).items()
            values = {k: one(k, v) if isinstance(v, Tensor) else v for k, v in held}
            return _Wrapper((type(tensor), shape, tensor.stride(), tensor.dtype), values)
        made: Any = None
        if is_whole and shape:
            made = _Cut(tensor.dtype, shape)
        elif not is_whole and isinstance(piece, Piece) and shape == (piece.range.numel,):
            made = _Cut(tensor.dtype, None) if key != "step" else None
        elif not shape and type(tensor) is Tensor and not tensor.is_complex():
            number = tensor.item()
            made = None if isnan(number) else _Number(tensor.dtype, number)  # which loses its bits
        # By its text, which tells -0.0 from 0.0, and True from 1. Other tensors on the host: a
        # device's is unpickled to the device of the same index, so each rank would take memory on
        # the devices of all others.
        return tensor.to("cpu") if made is None else known.setdefault(repr(made), made)

    described = {
        key: one(key, value)
        if isinstance(value, Tensor)
        else tree_map_only(Tensor, functools.partial(one, key), value)
        for key, value in entries.items()
    }
    # Known descriptions keep their leaves alive, so no other leaf has the same id.
    identity = tuple((key, id(leaf)) for key, leaf in described.items())
    return known.setdefault(identity, described)  # type: ignore[no-any-return]


def _entry(key: str, mine: Any, described: Any, piece: Any, comm: Communicator) -> Any:
    """Return an entry with values in place of its descriptions; ``mine`` is this rank's own."""
    if isinstance(described, _Described):
        return described.value(key, mine, piece, comm)
    leaves, tree = tree_flatten(described)
    own = [None] * len(leaves) if mine is None else tree_leaves(mine)
    parts = [
        leaf.value(f"{key}.{number}", part, piece, comm) if isinstance(leaf, _Described) else leaf
        for number, (leaf, part) in enumerate(zip(leaves, own, strict=True))
    ]
    return tree_unflatten(parts, tree)


# -- loading ---------------------------------------------------------------------------------------


def loadable(optimizer: Optimizer, state: Any, names: Sequence[Sequence[Sequence[str]]]) -> Any:
    """Return a whole state that :func:`load_optimizer_state` can load.

    ``names`` has, for each group and parameter, all names that the module has for it. A state whose
    ids are names, as of a directory, is matched by these, or else by the ``param_names`` of torch.
    A format of the optimizer's own is left to its ``load_state_dict``.

    Raises:
        ValueError: The state does not fit.
    """
    stepper = stepper_of(optimizer)
    if stepper.has_own_format or (not state and not stepper.state_dict()):
        return state
    if not _is_optimizer_state(state):
        raise ValueError("it is not an optimizer state")
    groups, saved = optimizer.param_groups, _in_order(state["param_groups"], names)
    if len(groups) != len(saved):
        raise ValueError(f"it has {len(saved)} param groups, but the optimizer has {len(groups)}")
    entries = dict(state["state"])
    with stepper.holding_parts():
        for number, (group, other, known) in enumerate(zip(groups, saved, names, strict=True)):
            there, here = len(other["params"]), len(group["params"])
            if there != here:
                raise ValueError(
                    f"its param group {number} has {there} parameters, but the optimizer's has"
                    f" {here}"
                )
            for member, key, (name, *_) in zip(
                group["params"], other["params"], known, strict=True
            ):
                if (held := entries.get(key)) is None:
                    continue
                if not isinstance(held, Mapping):
                    kind = type(held).__name__
                    raise ValueError(f"its state of {name!r} is a {kind}; expected a dict")
                # Steps of whole parameters may keep tensors of any shape.
                if not stepper.is_whole:
                    entries[key] = {k: _part(k, v, member, name) for k, v in held.items()}
    return {**state, "state": entries, "param_groups": saved}


def _part(key: str, value: Any, member: Any, name: str) -> Any:
    """Return this rank's part of what tensor parallelism has cut; raise if it does not fit."""
    parameter = parameter_of(member)
    value = local_value(value, parameter, tuple(parameter.shape))
    shape = member.range.slot.shape if isinstance(member, Piece) else member.shape
    # A state has one number per element, or a single one.
    is_tensor = isinstance(value, Tensor) and value.dim() and value.shape != shape
    if is_tensor and not (key == "step" and value.numel() == 1):
        raise ValueError(
            f"its {key!r} of {name!r} has shape {tuple(value.shape)}, but the parameter has shape"
            f" {tuple(shape)}"
        )
    return value


def _in_order(groups: Sequence[Any], names: Sequence[Sequence[Sequence[str]]]) -> Sequence[Any]:
    """Return saved groups in the order of the optimizer's parameters, if they have their names."""
    ids = [key for group in groups for key in group["params"]]
    has_names = bool(ids) and all(isinstance(key, str) for key in ids)
    if len(groups) != len(names):
        return groups
    found = []
    for number, (group, current) in enumerate(zip(groups, names, strict=True)):
        saved = group["params"] if has_names else group.get("param_names", ())
        position = {name: place for place, name in enumerate(saved)}
        order = [next((position[n] for n in known if n in position), None) for known in current]
        if None in order or len(order) != len(group["params"]) or len(saved) != len(order):
            if not has_names:
                return groups
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
        found.append({**group, **changed})
    return found


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


def _is_optimizer_state(state: Any) -> bool:
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    return isinstance(groups, (list, tuple)) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple))
        for group in groups
    )


@uncollected()
@runs_outside
def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], engine: Engine) -> None:
    """Load a whole optimizer state; each rank copies its own pieces of it. A collective."""
    stepper = stepper_of(optimizer)
    is_own_format = not state or stepper.way is Way.ALL_AT_ONCE
    mine: Any = {}
    with engine.loading("Loading optimizer states"):
        mine = owned(state) if is_own_format else _own_states(optimizer, state)
    with stepper.holding_parts():
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
