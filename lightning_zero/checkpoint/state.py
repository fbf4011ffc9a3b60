"""State dicts of a sharded model and its optimizers, as a single process would have them.

Every rank calls these functions together. Values are collected on rank 0 in host memory; the other
ranks get meta tensors under the same keys, so that hooks that edit a checkpoint see the same
dictionary everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine import Engine
from lightning_zero.optim import cut_state
from lightning_zero.piece import Piece


def module_state(module: nn.Module, engine: Engine) -> dict[str, Any]:
    """``module.state_dict()`` with whole parameters in the master's precision."""
    state = dict(module.state_dict(keep_vars=True))
    keys: dict[int, list[str]] = {}
    for key, value in state.items():
        keys.setdefault(id(value), []).append(key)
    for parameter, whole in engine.full_parameters():
        names = keys.get(id(parameter), [])
        if names:
            # Tied names share one tensor in the file, as they do in the module.
            collected = _collect(whole, engine)
            state.update(dict.fromkeys(names, collected))
    return {
        key: value.detach() if isinstance(value, Tensor) else value for key, value in state.items()
    }


def optimizer_state(optimizer: Optimizer, engine: Engine) -> dict[str, Any]:
    """``optimizer.state_dict()`` with whole states, keyed by the integer ids that DDP would use."""
    local = optimizer.state_dict()
    pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
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
            key: _whole_entry(mine.get(key), entry, piece, engine) for key, entry in entries.items()
        }
    return {**local, "state": whole}


def load_optimizer_state(optimizer: Optimizer, engine: Engine, state: Mapping[str, Any]) -> None:
    """Load a whole optimizer state, taking this rank's pieces of it."""
    pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
    cut = {
        index: cut_state(entries, pieces[index]) if isinstance(pieces[index], Piece) else entries
        for index, entries in state["state"].items()
        if not isinstance(pieces[index], Piece) or pieces[index].numel()
    }
    optimizer.load_state_dict({**state, "state": cut})


class _PerElement:
    """Stands for an entry that every rank holds its own piece of."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def _describe(key: str, value: Any, piece: Any) -> Any:
    is_cut = isinstance(piece, Piece) and isinstance(value, Tensor) and value.shape == piece.shape
    return _PerElement(value.dtype) if is_cut and key != "step" else value


def _whole_entry(mine: Any, entry: Any, piece: Any, engine: Engine) -> Any:
    if not isinstance(entry, _PerElement):
        return entry
    part = mine if mine is not None else torch.zeros(0, dtype=entry.dtype, device=piece.device)
    return _collect(engine.full_of(piece, part), engine)


def _collect(whole: Tensor, engine: Engine) -> Tensor:
    if engine.comm.rank == 0:
        return whole.detach().to("cpu", copy=True)
    return torch.empty_like(whole, device="meta")
