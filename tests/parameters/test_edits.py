"""Weights that users change in place, and what other ranks see of it."""

from __future__ import annotations

import copy
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.optimizer import clip
from lightning_zero.plan import RECIPES, Settings
from tests.oracle.ranks import Pools

STAGES = (1, 2, 3)
WIDTH = 16


class Pair(nn.Module):
    """A unit and a rest that belongs to the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.top = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.inner(x))


def _engine(stage: int, precision: str = "32-true") -> tuple[Engine, torch.optim.Optimizer]:
    module = Pair()
    units = lambda m: m is module.inner  # noqa: E731
    engine = Engine(module, Settings(stage=stage, units=units, recipe=RECIPES[precision]))
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    engine.adopt(optimizer)
    return engine, optimizer


def _values(engine: Engine) -> dict[str, list[Any]]:
    """Whole values as the masters have them, and as a step sees them."""
    module = engine.module
    with engine.step(awaits_backward=False):
        seen = {name: p.detach().float().tolist() for name, p in module.named_parameters()}
    with engine.sharded.gathered():
        assert seen == {name: p.detach().float().tolist() for name, p in module.named_parameters()}
    return seen


def _late(engine: Engine) -> None:
    if engine.comm.control.rank == 1:
        time.sleep(0.2)


def _edit_in_step(stage: int, precision: str, how: str) -> tuple[Any, Any]:
    engine, optimizer = _engine(stage, precision)
    ones = {name: torch.ones_like(p) for name, p in Pair().state_dict().items()}
    with engine.step():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != "32-true"):
            loss = engine.module(torch.ones(2, WIDTH)).sum()
        loss.backward()
        optimizer.step()
        _late(engine)
        if how == "load_state_dict":
            engine.module.load_state_dict(ones)
        else:
            for parameter in engine.module.parameters():
                # As no array has bfloat16, its bits.
                ones_of = torch.ones((), dtype=parameter.dtype)
                bits = torch.int32 if parameter.itemsize == 4 else torch.int16
                parameter.detach().view(bits).numpy()[...] = ones_of.view(bits).item()
        _late(engine)
    return _values(engine), {name: one.tolist() for name, one in ones.items()}


@pytest.mark.parametrize("how", ["load_state_dict", "array"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_edits_within_a_step_last(ranks: Pools, precision: str, how: str) -> None:
    for stage in STAGES:
        for seen, expected in ranks(2).run(_edit_in_step, stage, precision, how):
            assert seen == expected, stage


def _edit_after_step(stage: int) -> tuple[Any, Any]:
    """Each rank edits as soon as its own step is over, rank 1 later than rank 0."""
    engine, optimizer = _engine(stage)
    plain = copy.deepcopy(Pair())
    step = torch.optim.SGD(plain.parameters(), 1.0)
    plain(torch.ones(2, WIDTH)).sum().backward()
    step.step()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2.0)
    engine.module(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    _late(engine)
    with engine.sharded.gathered(modify=True) if stage == 3 else torch.no_grad(), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(2.0)
    return _values(engine), {name: p.tolist() for name, p in plain.named_parameters()}


def test_edits_after_a_step_reach_nobody_elses_gather(ranks: Pools) -> None:
    for stage in STAGES:
        for seen, expected in ranks(2).run(_edit_after_step, stage):
            for name, value in expected.items():
                torch.testing.assert_close(torch.tensor(seen[name]), torch.tensor(value))


def _nested() -> str:
    engine, _ = _engine(3)
    module = engine.module
    with engine.sharded.gathered(), engine.sharded.gathered(module.inner.parameters()):
        inside = module.inner.weight.sum().item()
    with engine.sharded.gathered():
        assert module.inner.weight.sum().item() == inside
        try:
            with engine.sharded.gathered(module.inner.parameters(), modify=True):
                pass
        except RuntimeError as error:
            return str(error)
    return ""


def test_gathered_may_be_nested_for_reading(ranks: Pools) -> None:
    assert all("to the outer one" in message for message in ranks(2).run(_nested))


def _lent_after_gathered(stage: int) -> list[bool]:
    engine, _ = _engine(stage)
    with engine.sharded.gathered():
        lent = [
            weakref.ref(flat.masters.whole)
            for unit in engine.sharded.units
            for flat in unit.flat_parameters
        ]
    found = [ref() is not None for ref in lent]
    engine.close()
    return found


def test_gathered_weights_are_freed(ranks: Pools) -> None:
    """Free what weights were gathered into beside their own buffers, with the context."""
    first, second = ranks(2).run(_lent_after_gathered, 3)
    assert first == second
    assert not any(first)


def _nan_at(owner: int) -> tuple[bool, bool]:
    engine, _ = _engine(2)
    for piece in engine.sharded.pieces:
        if piece.range.numel:
            piece.grad = torch.zeros_like(piece.detach())
            if engine.comm.control.rank == owner:
                piece.grad.fill_(float("nan"))
    largest = clip.total_norm(engine.sharded.pieces, engine.comm, float("inf"))
    return clip.unscale(engine.sharded.pieces, engine.comm, 2.0), bool(largest.isnan())


def test_a_nan_on_any_rank_is_seen_by_all(ranks: Pools) -> None:
    for owner in (0, 2):
        assert ranks(3).run(_nan_at, owner) == [(True, True)] * 3
