"""The state dicts of a sharded module and its optimizers, as a single process would have them.

Saving returns the dictionary that DDP would, with a :class:`ShardedValue` in place of every sharded
tensor. Nothing is gathered.

Loading takes whole values, mapped to memory, and each rank copies its own ranges. Whatever does not
fit is found before anything in memory has changed: ``load_state_dict`` of a module, which users may
override, is called once, and its copies are only noted, and made once all names and shapes are
known to fit. States of optimizers are matched by the names of their parameters where a checkpoint
has them, else by their order.

An optimizer whose ``state_dict`` has its own format steps all at once: every rank has the whole
state, which the optimizer itself saves and loads.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lightning_zero.checkpoint.values import ShardedValue, dense_stride, memory_order
from lightning_zero.comm import Communicator
from lightning_zero.engine import Engine, differences, group_lines
from lightning_zero.optimizer import Way, members, owned, parameter_of, stepper_of
from lightning_zero.parameters import Piece, loading_whole
from lightning_zero.plan import Cut, cut_of
from lightning_zero.tensors import (
    internals,
    is_wrapper,
    lasting_tensors,
    properties,
    runs_outside,
    tensors_in,
    uncollected,
    wrapper_of,
)

# -- saving a module -------------------------------------------------------------------------------


@uncollected()
@runs_outside
def module_state(module: nn.Module, engine: Engine | None) -> dict[str, Any]:
    """Return ``module.state_dict()`` with sharded values in the master's precision; a collective.

    Tied names share one value, as they do in the module. Without an engine, nothing is sharded.
    """
    if engine is None:
        return module.state_dict()
    engine.require_whole()
    engine.sharded.keep_edits()
    state = module.state_dict(keep_vars=True)
    values: dict[int, ShardedValue] = {}
    for key, value in state.items():
        if isinstance(value, nn.Parameter):
            piece = engine.sharded.piece(value)
            if piece is not None:
                if id(value) not in values:
                    # Of copies, one is written.
                    holds = engine.comm.is_in_first_copy and not piece.is_copy
                    part = piece if holds else piece[:0]
                    values[id(value)] = sharded(key, piece, part, engine.comm)
                state[key] = values[id(value)]
                continue
        if isinstance(value, Tensor):
            state[key] = value.detach()
    return state


def sharded(key: str, piece: Piece, part: Tensor, comm: Communicator) -> ShardedValue:
    """Return a value of the whole shape of the piece's parameter, with this rank's ``part``.

    A collective for parameters that tensor parallelism has cut.
    """
    slot = piece.range.slot
    if (cut := cut_of(piece.parameter)) is not None:
        return _joined(key, piece, part, cut, comm)
    start = piece.range.start
    return ShardedValue.of(key, part, start, slot.shape, slot.stride, comm.control)


def _joined(key: str, piece: Piece, part: Tensor, cut: Cut, comm: Communicator) -> ShardedValue:
    """Return the whole value of a parameter that tensor parallelism has cut; a collective.

    One range along the first dimension is a range of the whole tensor, and each rank writes its
    piece of it. Any other part is scattered over the whole tensor. All ranks then put the whole
    together, one tensor at a time, and each keeps an equal range of it to write.
    """
    slot = piece.range.slot
    shape = cut.whole_shape(slot.shape)
    stride = torch.empty(shape, device="meta").stride()
    ((first, _), *others) = cut.ranges(cut.rank)
    if cut.dim == 0 and not others and slot.stride == stride:
        start = first * stride[0] + piece.range.start
        return ShardedValue.of(key, part, start, shape, stride, comm.control)
    with lasting_tensors(), torch.no_grad():
        rows = comm.control.gather_objects(part.detach().to("cpu").view(torch.uint8))
        parts = [row.view(part.dtype).to(part.device) for row in rows]
        # Every ``cut.size``-th rank has a range of the same part, in order.
        shapes = [cut.part_shape(slot.shape, rank) for rank in range(cut.size)]
        order = memory_order(slot.shape, slot.stride)
        held = [
            torch.cat(parts[rank :: cut.size]).as_strided(size, dense_stride(size, order))
            for rank, size in enumerate(shapes)
        ]
        whole = cut.whole_of(held).flatten()
        number, count, numel = comm.control.rank, comm.control.world_size, prod(shape)
        start, stop = (numel * n // count for n in (number, number + 1))
        part = whole[start:stop].clone()
        return ShardedValue.of(key, part, start, shape, stride, comm.control)


# -- loading a module ------------------------------------------------------------------------------


@uncollected()
@runs_outside
def load_module_state(
    module: nn.Module,
    engine: Engine | None,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
) -> Any:
    """Call ``module.load_state_dict`` once; each rank copies its own part of each value.

    All ranks that share the module call it together. If names or shapes do not fit, all raise and
    nothing has changed.

    Args:
        module: The module, or a submodule.
        engine: The engine that shards it, if any.
        state: Whole values, by name.
        strict: As for ``load_state_dict``.
    """
    load = _ModuleLoad(module, engine)
    with load, loading_whole(), warnings.catch_warnings():
        # torch's copies to a meta module would be no-ops; ours are only noted.
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
        result = module.load_state_dict(state, strict=strict)
    load.make()
    return result


class _ModuleLoad(TorchFunctionMode):
    """A mode in which copies to a module's tensors are only noted until :meth:`make`.

    Code that reads one of the module's tensors, as a user's ``load_state_dict`` may, sees what was
    copied to it so far.
    """

    def __init__(self, module: nn.Module, engine: Engine | None) -> None:
        super().__init__()
        self._module, self._engine = module, engine
        # By id; the names are for errors.
        tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._noted: list[tuple[Tensor, Any, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.copy_ and id(args[0]) in self._names and not self._has_own(args[1:]):
            self._noted.append((args[0], args[1], _version_of(args[1])))
            return args[0]
        if self._noted and func not in _HARMLESS and self._has_own([args, kwargs]):
            self.make()
        return func(*args, **kwargs)

    def _has_own(self, values: Any) -> bool:
        return any(id(tensor) in self._names for tensor in tensors_in(values, within_objects=False))

    def make(self) -> None:
        """Make the noted copies; all ranks call it together."""
        noted, self._noted = self._noted, []
        for target, value, version in noted:
            if version != _version_of(value):
                raise RuntimeError(
                    f"The tensor that load_state_dict copied to {self._names[id(target)]!r} was"
                    " changed after the copy. Copy a clone of it."
                )
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(torch.no_grad())
            if (engine := self._engine) is not None:
                wanted = {id(parameter) for parameter in engine.module.parameters()}
                is_all = wanted <= {id(target) for target, _, _ in noted}
                contexts.enter_context(engine.sharded.writing())
                contexts.enter_context(engine.loading("Loading weights", heals=is_all))
            for target, value, _ in noted:
                target.copy_(value)


def _version_of(value: Any) -> int:
    has_one = type(value) is Tensor and not value.is_inference()
    return internals.version_of(value) if has_one else 0


_HARMLESS = properties.FACTS | properties.METADATA | properties.CREATING


# -- saving an optimizer's -------------------------------------------------------------------------


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
    # Some optimizers keep entries that belong to no parameter.
    others = {k: v for k, v in local["state"].items() if not isinstance(v, Mapping)}
    return {**local, "state": {**_whole_states(optimizer, local["state"], engine, label), **others}}


def _whole_states(
    optimizer: Optimizer, own: Mapping[int, Any], engine: Engine, label: str
) -> dict[int, dict[str, Any]]:
    """Return the states of whole parameters, by index, given this rank's ``own`` parts."""
    pieces, is_whole, comm = members(optimizer), stepper_of(optimizer).is_whole, engine.comm
    known: dict[Any, Any] = {}
    mine = {
        index: _described(own.get(index) or {}, piece, known, is_whole=is_whole)
        for index, piece in enumerate(pieces)
        # A rank with an empty piece of a parameter, or that does not own it, has no state.
        if (index in own if is_whole else _has_part(piece))
    }
    gathered = comm.control.gather_objects((group_lines(optimizer, label, with_sizes=True), mine))
    if found := differences([lines for lines, _ in gathered]):
        raise ValueError(
            f"The ranks do not agree on {label}. {'; '.join(found)}. configure_optimizers must"
            " return the same optimizers on every rank, and schedulers must update them alike."
        )
    whole: dict[int, dict[str, Any]] = {}
    with lasting_tensors():
        for index, piece in enumerate(pieces):
            states = [of_rank[index] for _, of_rank in gathered if index in of_rank]
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
            here = own.get(index) if comm.is_in_first_copy and not is_copy else None
            whole[index] = {
                key: _entry(f"{label} {index}.{key}", (here or {}).get(key), entry, piece, comm)
                for key, entry in states[0].items()
            }
    return whole


def _has_part(member: Any) -> bool:
    """Return whether this rank has a state of a parameter, which may have no elements at all."""
    return not isinstance(member, Piece) or member.numel() > 0 or not member.range.slot.numel


# -- descriptions of states, which ranks send each other ---------------------------------------


@dataclass(frozen=True)
class _Values:
    """Values that a rank keeps: of its owner's tensor of ``shape``, or ``None`` of its piece."""

    dtype: torch.dtype
    shape: tuple[int, ...] | None


_values = functools.lru_cache(_Values)
"""Returns one object for alike values."""


@dataclass(frozen=True)
class _Wrapper:
    """A tensor that wraps others, which its owner holds whole, with descriptions of these."""

    facts: tuple[type, tuple[int, ...], tuple[int, ...], torch.dtype]
    values: dict[str, Any]


def _described(
    state: Mapping[str, Any], piece: Any, known: dict[Any, Any], *, is_whole: bool
) -> dict[str, Any]:
    """Return a state with descriptions of its tensors, but numbers themselves.

    Models have very many parameters, most of whose states are alike. Alike numbers and states are
    one object in ``known``, which an exchange carries once.
    """

    def one(key: str, tensor: Tensor) -> Any:
        shape = tuple(tensor.shape)
        if is_whole and is_wrapper(tensor):
            held = vars(tensor).items()
            values = {k: one(k, v) if isinstance(v, Tensor) else v for k, v in held}
            return _Wrapper((type(tensor), shape, tensor.stride(), tensor.dtype), values)
        is_of_piece = isinstance(piece, Piece) and shape == (piece.range.numel,) and key != "step"
        if shape if is_whole else is_of_piece:
            return _values(tensor.dtype, shape if is_whole else None)
        # To the host: a device's is unpickled to the device of the same index, so each rank would
        # take memory on the devices of all others.
        host = tensor.to("cpu")
        if shape or type(host) is not Tensor:
            return host
        return known.setdefault((host.dtype, *host.view(1).view(torch.uint8).tolist()), host)

    described = {
        key: one(key, value)
        if isinstance(value, Tensor)
        else tree_map_only(Tensor, functools.partial(one, key), value)
        for key, value in state.items()
    }
    # Known descriptions keep their leaves alive, so no other leaf has the same id.
    identity = tuple((key, id(leaf)) for key, leaf in described.items())
    return known.setdefault(identity, described)  # type: ignore[no-any-return]


def _entry(key: str, mine: Any, described: Any, piece: Any, comm: Communicator) -> Any:
    """Return an entry with sharded values for its descriptions; ``mine`` is this rank's own."""

    def one(leaf: Any, mine: Any) -> Any:
        if isinstance(leaf, _Wrapper):
            values = {
                name: _entry(f"{key}.{name}", getattr(mine, name, None), inner, piece, comm)
                for name, inner in leaf.values.items()
            }
            return wrapper_of(*leaf.facts, values)
        if isinstance(leaf, Tensor):  # in memory of its own: a step adds to it in place
            return leaf.clone()
        if not isinstance(leaf, _Values):
            return leaf
        part = torch.empty(0, dtype=leaf.dtype) if mine is None else mine
        if leaf.shape is None:
            return sharded(key, piece, part, comm)
        stride = torch.empty(leaf.shape, device="meta").stride()
        flat = part.contiguous().reshape(-1)
        return ShardedValue.of(key, flat, 0, leaf.shape, stride, comm.control)

    if isinstance(described, (_Values, _Wrapper, Tensor)):
        return one(described, mine)
    leaves, tree = tree_flatten(described)
    own = [None] * len(leaves) if mine is None else tree_leaves(mine)
    return tree_unflatten(map(one, leaves, own), tree)


# -- loading an optimizer's ------------------------------------------------------------------------


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
    entries, left = dict(state["state"]), iter(members(optimizer))
    for number, (group, other, known) in enumerate(zip(groups, saved, names, strict=True)):
        there, here = len(other["params"]), len(group["params"])
        if there != here:
            raise ValueError(
                f"its param group {number} has {there} parameters, but the optimizer's has {here}"
            )
        for key, (name, *_), member in zip(other["params"], known, left, strict=False):
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
    cut = cut_of(parameter)
    if cut is not None and isinstance(value, Tensor):
        is_whole = tuple(value.shape) == cut.whole_shape(tuple(parameter.shape))
        value = cut.part_of(value) if is_whole else value
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
        order = [next((position[n] for n in known if n in position), -1) for known in current]
        if -1 not in order and len(order) == len(saved) == len(group["params"]):
            keys = [key for key in ("params", "param_names") if key in group]
            found.append({**group, **{key: [group[key][n] for n in order] for key in keys}})
        elif not has_names:
            return groups
        else:
            here = {name for known in current for name in known}
            lacking = [known[0] for known, at in zip(current, order, strict=True) if at < 0]
            surplus = [name for name in saved if name not in here]
            raise ValueError(
                f"its param group {number} lacks {', '.join(lacking) or 'nothing'}, and has"
                f" {', '.join(surplus) or 'nothing'} that the optimizer's has not"
            )
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
def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], *engines: Engine) -> None:
    """Load a whole state of an optimizer of ``engines``; each rank copies its own pieces of it.

    A collective.
    """
    stepper = stepper_of(optimizer)
    is_own_format = not state or stepper.way is Way.ALL_AT_ONCE
    with contextlib.ExitStack() as loading:
        for engine in engines:
            loading.enter_context(engine.loading("Loading optimizer states"))
        mine: Any = owned(state) if is_own_format else _own_states(optimizer, state)
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
