"""State dicts of a sharded model and its optimizers, as a single process would have them.

Saving: each function gives the dictionary that DDP would give, with a :class:`ShardedValue`
in the place of every tensor of which each rank has a part. Nothing is gathered.

Loading: whole values come in, usually mapped from a file, and each rank copies its own ranges.
What does not fit is found before anything in memory has changed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lightning_zero.checkpoint.checksums import CheckedRange, check
from lightning_zero.checkpoint.load import ranges_of, read_ahead
from lightning_zero.checkpoint.values.lazy_tensor import LazyTensor
from lightning_zero.checkpoint.values.sharded_value import ShardedValue
from lightning_zero.comm import Control, Outcome
from lightning_zero.engine import Engine
from lightning_zero.optimizer import (
    Way,
    cut_state,
    members,
    missing_in_state,
    owned,
    parameter_of,
    whole_step_of,
)
from lightning_zero.parameters import Piece

# -- saving ----------------------------------------------------------------------------------------


def module_state(module: nn.Module, engine: Engine) -> dict[str, Any]:
    """Return ``module.state_dict()`` with sharded values in the master's precision.

    All ranks call it together.
    """
    engine.sharded.keep_edits()
    state = module.state_dict(keep_vars=True)
    values: dict[int, ShardedValue] = {}
    for key, value in state.items():
        if isinstance(value, nn.Parameter):
            piece = engine.sharded.piece(value)
            if piece is not None:
                # Tied names share one tensor in the file, as they do in the module.
                state[key] = values.setdefault(id(value), _sharded(key, piece, piece))
                continue
        if isinstance(value, Tensor):
            state[key] = value.detach()
    return state


def optimizer_state(optimizer: Optimizer, engine: Engine, label: str) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with sharded states, by the integer ids that DDP would use.

    All ranks call it together. ``label`` names the optimizer in the checkpoint.
    """
    local = optimizer.state_dict()
    if not local:
        return local  # Lightning's stand-in, where there is no optimizer
    step = whole_step_of(optimizer)
    if step is not None and step.way is Way.ALL_AT_ONCE:
        return local  # every rank has all of it
    if "state" not in local or "param_groups" not in local:
        raise NotImplementedError(
            f"{type(optimizer).__name__}.state_dict() has a form of its own, of which the ranks'"
            " parts cannot be put together. Save with save_weights_only=True, or give the"
            " optimizer that it wraps."
        )
    pieces = members(optimizer)
    mine = {
        index: {
            key: _describe(key, value, piece, is_whole=step is not None)
            for key, value in local["state"].get(index, {}).items()
        }
        for index, piece in enumerate(pieces)
        if (piece.numel() if step is None else index in local["state"])
    }
    gathered = engine.comm.control.gather_objects((_kind(optimizer), mine))
    _check_alike([kind for kind, _ in gathered], label)
    described = [states for _, states in gathered]
    for index in range(len(pieces)):
        kinds = [", ".join(sorted(states[index])) for states in described if index in states]
        _check_alike(kinds, f"the state of parameter {index} of {label}")
    # Some keep an entry that belongs to no parameter.
    others = {k: v for k, v in local["state"].items() if not isinstance(v, Mapping)}
    whole: dict[Any, Any] = {}
    for index, piece in enumerate(pieces):
        # Ranks whose piece is empty, or which do not own it, have no state; any other knows it.
        entries: Mapping[str, Any] = next((s[index] for s in described if index in s), {})
        if not entries:
            continue
        own = local["state"].get(index, {})
        whole[index] = {
            key: _entry(f"{label} {index}.{key}", own.get(key), entry, piece)
            for key, entry in entries.items()
        }
    return {**local, "state": {**whole, **others}}


def _kind(optimizer: Optimizer) -> str:
    """Return what must be the same on all ranks: class, groups, and the switches of each."""
    groups = [
        {
            "params": len(group["params"]),
            **{k: v for k, v in group.items() if isinstance(v, (bool, str)) or v is None},
        }
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} with param groups {groups}"


def _check_alike(kinds: Sequence[str], what: str) -> None:
    """Raise a ``ValueError`` unless all ``kinds``, which all ranks know, are the same."""
    other = next((kind for kind in kinds if kind != kinds[0]), None)
    if other is not None:
        raise ValueError(
            f"The ranks do not agree on {what}: one has {kinds[0]}; another has {other}."
            " configure_optimizers must return the same optimizers on every rank."
        )


class _StandIn:
    """A stand-in for a tensor of which every rank holds its piece, or that has an owner.

    ``shape`` is ``None`` if it is the parameter's own, else that of what the owner has whole.
    """

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...] | None) -> None:
        self.dtype, self.shape = dtype, shape

    def value(self, key: str, part: Tensor | None, piece: Any) -> ShardedValue:
        """Return what it stands for; a rank that holds nothing of it has no ``part``."""
        part = torch.empty(0, dtype=self.dtype) if part is None else part
        if self.shape is None:
            return _sharded(key, piece, part)
        stride = torch.empty(self.shape, device="meta").stride()
        return ShardedValue.of(key, part.contiguous().reshape(-1), 0, self.shape, stride)


def _describe(key: str, value: Any, piece: Any, *, is_whole: bool) -> Any:
    """Return an entry of a state with stand-ins for what is too large to be sent."""

    def stand_in(tensor: Tensor) -> Any:
        if is_whole and tensor.dim():
            return _StandIn(tensor.dtype, tuple(tensor.shape))
        is_cut = not is_whole and isinstance(piece, Piece) and tensor.shape == piece.shape
        # On the host: a tensor of a device is unpickled to the device of that number, so
        # each rank would take memory on the devices of all others.
        return _StandIn(tensor.dtype, None) if is_cut and key != "step" else tensor.to("cpu")

    return tree_map_only(Tensor, stand_in, value)


def _entry(key: str, mine: Any, entry: Any, piece: Any) -> Any:
    """Return an entry of a state with sharded values for the stand-ins in ``entry``."""
    leaves, tree = tree_flatten(entry)
    own = [None] * len(leaves) if mine is None else tree_leaves(mine)
    is_nested = not isinstance(entry, _StandIn)
    parts = [
        leaf.value(f"{key}.{number}" if is_nested else key, part, piece)
        if isinstance(leaf, _StandIn)
        else leaf
        for number, (leaf, part) in enumerate(zip(leaves, own, strict=True))
    ]
    return tree_unflatten(parts, tree)


def _sharded(key: str, piece: Piece, part: Tensor) -> ShardedValue:
    slot = piece.range.slot
    return ShardedValue.of(key, part, piece.range.start, slot.shape, slot.stride)


# -- loading ---------------------------------------------------------------------------------------


def load_module_state(
    module: nn.Module,
    engine: Engine | None,
    state: MutableMapping[str, Any],
    *,
    strict: bool = True,
) -> Any:
    """Call ``module.load_state_dict``, of which each rank keeps its own part.

    All ranks that share the module call it together. Where names or shapes do not fit, or what a
    rank would read is damaged, all raise, and nothing has changed.
    """
    pieces = _pieces(module, engine)
    # A copy of the same class: it may have attributes, such as version numbers of modules.
    prepared = copy.copy(state)
    for name, piece in pieces.items():
        if piece is not None and name in prepared:
            prepared[name] = _like(prepared[name], piece)
    rehearse(module, prepared, strict=strict)
    read = (
        one
        for name, value in prepared.items()
        if strict or name in pieces
        for one in _ranges(name, value, pieces.get(name))
    )
    control = Control(alone=True) if engine is None else engine.comm.control
    check_ranges(read, control, "Loading weights")
    with contextlib.nullcontext() if engine is None else engine.sharded.writing():
        return module.load_state_dict(prepared, strict=strict)


def _pieces(module: nn.Module, engine: Engine | None) -> dict[str, Piece | None]:
    """Return this rank's piece of everything in a module's state; ``None`` of what it has whole."""
    return {
        name: engine.sharded.piece(value) if engine and isinstance(value, nn.Parameter) else None
        for name, value in module.state_dict(keep_vars=True).items()
    }


def _ranges(name: str, value: Any, piece: Any) -> Iterator[CheckedRange]:
    """Yield what this rank reads of a stored tensor: its piece, or the whole."""
    if not isinstance(value, Tensor):
        return
    if isinstance(piece, Piece) and value.shape == piece.parameter.shape:
        own = piece.range
        if own.start == own.stop:
            return
        if isinstance(value, LazyTensor):
            value = value.laid_out(own.slot.stride)
        if value.stride() == own.slot.stride:
            yield from ranges_of(name, value, own.start, own.stop)
            return
    yield from ranges_of(name, value)


def check_ranges(ranges: Iterable[CheckedRange], control: Control, doing: str) -> None:
    """Raise a ``ValueError`` on all ranks if what one of them will read is damaged."""
    outcome = Outcome()
    with outcome.attempt():
        check(ranges)
    outcome.agree(control, doing)


def _like(value: Any, piece: Piece) -> Any:
    """Return a stored tensor in the order of its parameter, and start to read a mapped one."""
    if not isinstance(value, Tensor) or value.shape != torch.Size(piece.range.slot.shape):
        return value
    if isinstance(value, LazyTensor):
        return value.laid_out(piece.range.slot.stride)
    if type(value) is Tensor and value.stride() == piece.range.slot.stride:
        read_ahead(piece.range.part_of(value))
    return value


def rehearse(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Raise what ``module.load_state_dict(state)`` would raise, without changing parameters."""
    with _Rehearsal():
        module.load_state_dict(state, strict=strict)


class _Rehearsal(TorchFunctionMode):
    """A mode in which modules load state dicts, hooks and overrides included, and copy no value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            return args[0]
        return func(*args, **(kwargs or {}))


def check_optimizer_states(
    optimizers: list[Optimizer], states: list[Mapping[str, Any]], name_of: Callable[[Any], str]
) -> None:
    """Raise a ``ValueError`` unless every optimizer can load its state.

    ``name_of`` gives the name of a parameter or piece for the error.
    """
    if len(optimizers) != len(states):
        raise ValueError(
            f"The checkpoint has states of {len(states)} optimizers, but configure_optimizers"
            f" returned {len(optimizers)}."
        )
    for number, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        if not state and not optimizer.state_dict():
            continue
        if not _is_optimizer_state(state):
            raise ValueError(f"The checkpoint's state of optimizer {number} is of no optimizer.")
        for fault in _faults(optimizer, state, name_of):
            kind = type(optimizer).__name__
            raise ValueError(f"The checkpoint does not fit optimizer {number} ({kind}): {fault}.")


def _is_optimizer_state(state: Any) -> bool:
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )


def _faults(
    optimizer: Optimizer, state: Mapping[str, Any], name_of: Callable[[Any], str]
) -> Iterator[str]:
    if "param_groups" not in state:
        return  # a wrapper's own form, which only itself can check
    groups, saved = optimizer.param_groups, state["param_groups"]
    if len(groups) != len(saved):
        yield f"it has {len(saved)} param groups, the optimizer {len(groups)}"
        return
    pairs: list[tuple[int, Any, Any]] = []
    for number, (group, other) in enumerate(zip(groups, saved, strict=True)):
        there, here = len(other["params"]), len(group["params"])
        if there != here:
            yield f"param group {number} has {there} parameters there and {here} here"
            return
        pairs += zip([number] * here, group["params"], other["params"], strict=True)
    tried: set[Any] = set()
    for number, parameter, key in pairs:
        entries, name_there = state["state"].get(key), name_of(parameter)
        if entries is None:
            continue
        if not isinstance(entries, Mapping):
            yield f"the state of {name_there!r} is a {type(entries).__name__} there"
            return
        if whole_step_of(optimizer) is not None:
            continue  # which may keep tensors of any shape
        shape = parameter_of(parameter).shape
        for name, value in entries.items():
            # What is not one number per element is one number.
            if isinstance(value, Tensor) and value.dim() and value.shape != shape:
                yield (
                    f"{name!r} of {name_there!r} has shape {tuple(value.shape)} there,"
                    f" the parameter has {tuple(shape)}"
                )
        kind = number, frozenset(entries)
        if isinstance(parameter, Piece) and kind not in tried:
            tried.add(kind)
            missing = missing_in_state(optimizer, number, saved[number], entries)
            if missing is not None:
                yield (
                    f"its state of {name_there!r} has {', '.join(map(repr, entries))} and is of"
                    f" another optimizer, or damaged: {missing!r} is missing"
                )


def ranges_of_optimizers(
    optimizers: Iterable[Optimizer], states: Iterable[Mapping[str, Any]]
) -> Iterator[CheckedRange]:
    """Yield what this rank reads of the states of optimizers, which fit them."""
    for optimizer, state in zip(optimizers, states, strict=True):
        step = whole_step_of(optimizer)
        ids = [key for group in state.get("param_groups", ()) for key in group["params"]]
        for key, piece in zip(ids, members(optimizer) if state else (), strict=True):
            if step is not None and isinstance(piece, Piece) and not step.keeps_state_of(piece):
                continue
            for name, value in state["state"].get(key, {}).items():
                for tensor in tree_leaves(value):
                    own = piece if step is None else None  # an owner reads all of it
                    yield from _ranges(f"{name} of parameter {key}", tensor, own)


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a whole optimizer state, taking this rank's pieces of it."""
    step = whole_step_of(optimizer)
    if not state or (step is not None and step.way is Way.ALL_AT_ONCE):
        optimizer.load_state_dict(tree_map_only(Tensor, lambda tensor: tensor.clone(), {**state}))
        return
    held = members(optimizer)
    ids = [key for group in state["param_groups"] for key in group["params"]]
    # Entries that belong to no parameter, which some optimizers keep.
    own = {key: owned(value) for key, value in state["state"].items() if key not in set(ids)}
    for key, piece in zip(ids, held, strict=True):
        entries = state["state"].get(key)
        if entries is None:
            continue
        if step is not None and isinstance(piece, Piece):
            if step.keeps_state_of(piece):
                own[key] = owned(entries)
        elif not (isinstance(piece, Piece) and piece.numel() == 0):
            own[key] = _own_part(entries, piece)
    optimizer.load_state_dict({**state, "state": own})


def _own_part(entries: Any, piece: Any) -> Any:
    """Return what belongs to ``piece``; one at a time, so that no rank holds parts twice."""
    if isinstance(piece, Piece):
        entries = cut_state(tree_map_only(Tensor, lambda t: _like(t, piece), {**entries}), piece)
    return owned(entries)
