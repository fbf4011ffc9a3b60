"""State dicts of a sharded model and its optimizers, as a single process would have them.

Saving: each function gives the dictionary that DDP would give, with a :class:`Spread` in the place
of every tensor whose values are spread over the ranks. Nothing is gathered.

Loading: whole values come in, usually mapped from a file, and each rank copies its own ranges.
What does not fit is found before anything in memory has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_zero.checkpoint.mapped_file import read_ahead
from lightning_zero.checkpoint.spread import Spread
from lightning_zero.checkpoint.stored import Stored
from lightning_zero.engine import Engine
from lightning_zero.optim import cut_state, owned
from lightning_zero.piece import Piece

# -- saving ----------------------------------------------------------------------------------------


def module_state(module: nn.Module, engine: Engine) -> dict[str, Any]:
    """``module.state_dict()`` with spread parameters in the master's precision.

    All ranks call it together.
    """
    engine.keep_edits()
    state = module.state_dict(keep_vars=True)
    spreads: dict[int, Spread] = {}
    for key, value in state.items():
        if isinstance(value, nn.Parameter):
            piece = engine.piece(value)
            if piece is not None:
                # Tied names share one tensor in the file, as they do in the module.
                state[key] = spreads.setdefault(id(value), _spread(key, piece, piece))
                continue
        if isinstance(value, Tensor):
            state[key] = value.detach()
    return state


def optimizer_state(optimizer: Optimizer, engine: Engine, label: str) -> dict[str, Any]:
    """``optimizer.state_dict()`` with spread states, keyed by the integer ids that DDP would use.

    All ranks call it together. ``label`` tells the optimizer from others in the same checkpoint.
    """
    local = optimizer.state_dict()
    pieces = _parameters(optimizer)
    described = engine.comm.gather_objects(
        {
            index: {key: _describe(key, value, pieces[index]) for key, value in state.items()}
            for index, state in local["state"].items()
        }
    )
    whole: dict[int, dict[str, Any]] = {}
    for index, piece in enumerate(pieces):
        # Ranks whose piece is empty have no state; whoever has one tells the keys.
        entries = next((states[index] for states in described if index in states), None)
        if entries is None:
            continue
        mine = local["state"].get(index, {})
        whole[index] = {
            key: _entry(f"{label} {index}.{key}", mine.get(key), entry, piece)
            for key, entry in entries.items()
        }
    return {**local, "state": whole}


class _PerElement:
    """Stands for an entry that every rank holds its own piece of."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def _describe(key: str, value: Any, piece: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    is_cut = isinstance(piece, Piece) and value.shape == piece.shape
    # On the host: whoever unpickles a tensor of a device puts it on the device of that number, so
    # each rank would take memory on the devices of all others.
    return _PerElement(value.dtype) if is_cut and key != "step" else value.to("cpu")


def _entry(key: str, mine: Any, entry: Any, piece: Any) -> Any:
    if not isinstance(entry, _PerElement):
        return entry
    return _spread(key, piece, mine if mine is not None else torch.empty(0, dtype=entry.dtype))


def _spread(key: str, piece: Piece, part: Tensor) -> Spread:
    return Spread.of(key, part, piece.start, piece.slot.shape, piece.slot.stride)


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [piece for group in optimizer.param_groups for piece in group["params"]]


# -- loading ---------------------------------------------------------------------------------------


def load_module_state(
    module: nn.Module,
    engine: Engine | None,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
) -> Any:
    """``module.load_state_dict``, of which each rank keeps its own part.

    Raises:
        RuntimeError: Names or shapes do not fit; all of them are told, and nothing has changed.
    """
    if engine is not None:
        state = _prepared(module, engine, state)
    rehearse(module, state, strict=strict)
    with contextlib.nullcontext() if engine is None else engine.writing():
        return module.load_state_dict(state, strict=strict)


def _prepared(module: nn.Module, engine: Engine, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """``state``, ready for each rank to read its parts."""
    prepared = dict(state)
    for name, value in module.state_dict(keep_vars=True).items():
        piece = engine.piece(value) if isinstance(value, nn.Parameter) else None
        if piece is not None and name in prepared:
            prepared[name] = _like(prepared[name], piece)
    return prepared


def _like(value: Any, piece: Piece) -> Any:
    """A stored tensor in the memory order of its parameter; of a mapped one the part is called."""
    if not isinstance(value, Tensor) or value.shape != torch.Size(piece.slot.shape):
        return value
    if isinstance(value, Stored):
        return value.laid_out(piece.slot.stride)
    if type(value) is Tensor and value.stride() == piece.slot.stride:
        read_ahead(piece.part_of(value))
    return value


def rehearse(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Raise what ``module.load_state_dict(state)`` would raise, without changing parameters."""
    with _Rehearsal():
        module.load_state_dict(state, strict=strict)


class _Rehearsal(TorchFunctionMode):
    """Lets a module load a state dict, hooks and overrides included, without a value copied."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.copy_:
            return args[0]
        return func(*args, **(kwargs or {}))


def check_optimizer_states(
    optimizers: list[Optimizer], states: list[Mapping[str, Any]], name_of: Callable[[Any], str]
) -> None:
    """Raise unless every optimizer can load its state.

    Args:
        optimizers: The optimizers as they are.
        states: What a checkpoint has for each.
        name_of: The name of a parameter or piece, to name it in errors.

    Raises:
        ValueError: A number of optimizers, groups or parameters, or a shape, is another one.
    """
    if len(optimizers) != len(states):
        raise ValueError(
            f"The checkpoint has states of {len(states)} optimizers, but configure_optimizers"
            f" returned {len(optimizers)}."
        )
    for number, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        for fault in _faults(optimizer, state, name_of):
            kind = type(optimizer).__name__
            raise ValueError(f"The checkpoint does not fit optimizer {number} ({kind}): {fault}.")


def _faults(
    optimizer: Optimizer, state: Mapping[str, Any], name_of: Callable[[Any], str]
) -> Iterator[str]:
    groups, saved = optimizer.param_groups, state["param_groups"]
    if len(groups) != len(saved):
        yield f"it has {len(saved)} param groups, the optimizer {len(groups)}"
        return
    for index, (group, other) in enumerate(zip(groups, saved, strict=True)):
        there, here = len(other["params"]), len(group["params"])
        if there != here:
            yield f"param group {index} has {there} parameters there and {here} here"
            return
    ids = [parameter for group in saved for parameter in group["params"]]
    for parameter, key in zip(_parameters(optimizer), ids, strict=True):
        shape = _shape(parameter)
        for name, value in state["state"].get(key, {}).items():
            # What is not one number per element is one number.
            if isinstance(value, Tensor) and value.dim() and value.shape != shape:
                yield (
                    f"{name!r} of {name_of(parameter)!r} has shape {tuple(value.shape)} there,"
                    f" the parameter has {tuple(shape)}"
                )


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a whole optimizer state, taking this rank's pieces of it."""
    pieces = _parameters(optimizer)
    ids = [key for group in state["param_groups"] for key in group["params"]]
    # Entries that belong to no parameter, which some optimizers keep.
    own = {key: owned(value) for key, value in state["state"].items() if key not in set(ids)}
    for key, piece in zip(ids, pieces, strict=True):
        entries = state["state"].get(key)
        if entries is not None and not (isinstance(piece, Piece) and piece.numel() == 0):
            own[key] = _own_part(entries, piece)
    optimizer.load_state_dict({**state, "state": own})


def _own_part(entries: Any, piece: Any) -> Any:
    """What belongs to ``piece``; one parameter at a time, so that no rank holds parts twice."""
    if isinstance(piece, Piece):
        entries = cut_state({key: _like(value, piece) for key, value in entries.items()}, piece)
    return owned(entries)


def _shape(parameter: Any) -> torch.Size:
    whole = parameter.parameter if isinstance(parameter, Piece) else parameter
    return torch.Size(whole.shape)
