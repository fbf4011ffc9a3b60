"""Explanations of differences between predicted and measured bytes, by kind and with names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine import Engine
from lightning_zero.memory.model import ModelPlan
from lightning_zero.memory.size import format_bytes
from lightning_zero.memory.terms import AWAY_ROWS, RESTING


class Cause(NamedTuple):
    """The predicted and the actual bytes of a group of parameters, a piece or a buffer."""

    kind: str
    name: str
    predicted: int
    held: int


def explain(
    model: ModelPlan, engine: Engine, predicted: Mapping[str, int], measured: Mapping[str, int]
) -> list[str]:
    """Return one sentence for each kind of resting bytes that differs.

    The prediction must be that of ``model``, taken from ``engine`` before its first step.
    """
    found = [cause for cause in _causes(model, engine) if cause.predicted != cause.held]
    lines = []
    for kind in (*RESTING, *AWAY_ROWS):
        if difference := measured.get(kind, 0) - predicted.get(kind, 0):
            reason = _reason([cause for cause in found if cause.kind == kind], difference)
            lines.append(f"{kind}: {_signed(difference)} than predicted: {reason}")
    return lines


def _reason(causes: list[Cause], difference: int) -> str:
    left = difference - sum(cause.held - cause.predicted for cause in causes)
    parts = []
    if causes:
        cause = max(causes, key=lambda one: abs(one.held - one.predicted))
        others = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
        parts.append(
            f"{cause.name} holds {format_bytes(cause.held)} instead of"
            f" {format_bytes(cause.predicted)}{others}"
        )
    if left:
        parts.append(
            f"nothing that the rank holds explains {_signed(left)}, so the prediction was made for"
            " another run"
        )
    return "; ".join(parts) + "."


def _signed(difference: int) -> str:
    return f"{format_bytes(abs(difference))} {'more' if difference > 0 else 'less'}"


def _causes(model: ModelPlan, engine: Engine) -> Iterator[Cause]:
    axis = engine.comm.mesh.shard
    for unit in engine.sharded.units:
        for flat in unit.flat_parameters:
            names = [slot.name for slot in flat.layout.slots]
            where = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
            held = flat.memory()
            kinds = flat.plan.resting_bytes(
                flat.layout.numel, flat.layout.world_size, trainable=flat.trainable
            )
            if not any(piece.numel() for piece in flat.pieces):
                kinds["gradients"] = 0
            if flat.store.is_stream:
                kinds["weights"] = kinds["master"] = 0  # they rest in a checkpoint
            for row, count in flat.plan.rows(kinds).items():
                yield Cause(row, where, count, held.get(row, 0))
            for name, piece in zip(names, flat.pieces, strict=True):
                foreseen = model.state_bytes(piece.parameter, piece.numel(), axis.rank, axis.size)
                of_piece = _states_of(piece, engine.sharded.optimizers)
                yield Cause(flat.plan.row("states"), name, foreseen, of_piece)
    expected = model.buffer_bytes
    actual = {name: buffer.nbytes for name, buffer in engine.module.named_buffers()}
    for name in {**expected, **actual}:
        yield Cause("buffers", name, expected.get(name, 0), actual.get(name, 0))


def _states_of(piece: Tensor, optimizers: list[Optimizer]) -> int:
    return sum(
        value.nbytes
        for optimizer in optimizers
        for value in optimizer.state.get(piece, {}).values()
        if isinstance(value, Tensor)
    )
