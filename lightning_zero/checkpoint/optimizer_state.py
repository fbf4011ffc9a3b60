"""State dicts of optimizers that step a sharded model, as a single process would have them.

Saving returns the dictionary that DDP would, with a :class:`ShardedValue` in place of every sharded
tensor. Nothing is gathered.

Loading takes whole values, usually unread ones of a file, and each rank reads its own ranges.
Whatever does not fit is found before anything in memory has changed; what is damaged, while it is
read, which leaves the module torn.

A ``state_dict`` in a format that only its optimizer knows is of one that steps all at once. Every
rank has all of it, and it saves and loads it by itself.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.checkpoint.descriptions import Descriptions, entry
from lightning_zero.engine import Engine, differences, group_lines
from lightning_zero.optimizer import (
    Way,
    is_like,
    members,
    missing_in_state,
    owned,
    stepper_of,
    toy_state,
    with_inner,
)
from lightning_zero.parameters import Piece
from lightning_zero.tensors import lasting_tensors, runs_outside, uncollected

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
    descriptions = Descriptions()
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
                key: entry(
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


# -- loading ---------------------------------------------------------------------------------------


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
    pairs: list[tuple[int, Any, Any]] = []
    for number, (group, other) in enumerate(zip(groups, saved, strict=True)):
        there, here = len(other["params"]), len(group["params"])
        if there != here:
            yield f"its param group {number} has {there} parameters, but the optimizer's has {here}"
            return
        pairs += zip([number] * here, group["params"], other["params"], strict=True)
    tried: set[Any] = set()
    toys: dict[Any, dict[str, Any]] = {}
    for number, parameter, key in pairs:
        entries, name_there = state["state"].get(key), name_of(parameter)
        if entries is None:
            continue
        if not isinstance(entries, Mapping):
            yield f"its state of {name_there!r} is a {type(entries).__name__}; expected a dict"
            return
        is_piece = isinstance(parameter, Piece)
        shape = parameter.range.slot.shape if is_piece else parameter.shape
        if is_piece and is_whole:
            shape = parameter.whole_shape
        if is_piece:
            kind = number, len(shape) if is_whole else 1
            if kind not in toys:
                toys[kind] = toy_state(
                    optimizer, number, shape if is_whole else (math.prod(shape),)
                )
            for name, value in entries.items():
                if not is_like(value, toys[kind].get(name)):
                    yield f"its {name!r} of {name_there!r} is a {type(value).__name__}: {value!r}"
        if is_whole:
            continue  # steps of whole parameters may keep tensors of any shape
        for name, value in entries.items():
            # A state has one number per element, or a single one.
            is_tensor = isinstance(value, Tensor) and value.dim() and value.shape != shape
            if is_tensor and not (name == "step" and value.numel() == 1):
                yield (
                    f"its {name!r} of {name_there!r} has shape {tuple(value.shape)}, but the"
                    f" parameter has shape {tuple(shape)}"
                )
        keys = number, frozenset(entries)
        if is_piece and keys not in tried:
            tried.add(keys)
            missing = missing_in_state(optimizer, number, saved[number], entries)
            if missing is not None:
                yield (
                    f"its state of {name_there!r} has {', '.join(map(repr, entries))}, but"
                    f" {missing!r} is missing: it is from another optimizer or damaged"
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
    """Load a whole optimizer state; each rank reads its own pieces of it. A collective.

    Raises:
        ValueError: What a rank reads is damaged; all ranks raise, and the module is torn.
    """
    stepper = stepper_of(optimizer)
    is_own_format = not state or stepper.way is Way.ALL_AT_ONCE
    mine: Any = {}
    with engine.loading("Loading optimizer states"):
        mine = owned(state) if is_own_format else _own_states(optimizer, state)
    whole = stepper.whole_members() if is_own_format else contextlib.nullcontext()
    with stepper.holding_parts(), whole:
        optimizer.load_state_dict(mine)


def _own_states(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with what this rank keeps of it, read into new memory."""
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
