"""A plain loop over a compiled model: what a Trainer's rows do not show."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.engine import Engine
from lightning_zero.engine.unit import Residency
from lightning_zero.plan import Settings
from tests.oracle.ranks import Pools


class Normed(nn.Sequential):
    """Buffers that every rank changes in its own way."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())


def loop(stage: int, what: str = "model", *, thaws: bool = False) -> dict[str, Any]:
    """Some steps with the model compiled, its blocks, or nothing; stage 0 is without an engine.

    A block is unfrozen after two steps, if it `thaws`.
    """
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(Normed(), Normed(), nn.Linear(4, 1))
    model[1].requires_grad_(not thaws)
    engine = Engine(model, Settings(stage=stage, units={Normed})) if stage else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if engine:
        engine.adopt(optimizer)
    for block in model[:2] if what == "blocks" else ():
        block.compile(backend="eager")
    backend = "aot_eager" if thaws else "eager"
    call = torch.compile(model, backend=backend) if what == "model" else model
    numbers = []
    torch.manual_seed(dist.get_rank())
    for number in range(4):
        if number == 2 and thaws:
            model[1].requires_grad_(True)
        # The first calls come before any step of the optimizer: the weights have been there always.
        loss = call(torch.randn(8, 4)).square().mean()
        loss.backward()
        if number % 2 or thaws:
            optimizer.step()
            optimizer.zero_grad()
        numbers.append([loss.detach(), *(buffer.clone() for buffer in model.buffers())])
    units = engine.sharded.units if engine else []
    found = {
        "numbers": numbers,
        "graphs": [counters["stats"].get(k, 0) for k in ("unique_graphs", "calls_captured")],
        "inlined": [unit.label for unit in units if unit.is_inlined],
        "whole": [unit.label for unit in units if unit.weights.residency is Residency.WHOLE],
    }
    if engine:
        engine.close()
    return found


def loops() -> None:
    plain, expected, called, blocks = loop(0), loop(2, "nothing"), loop(2), loop(2, "blocks")
    for found in (called, blocks):
        torch.testing.assert_close(found["numbers"], expected["numbers"], rtol=0, atol=0)
    assert called["graphs"] == plain["graphs"]
    assert plain["graphs"][0] == 1
    # A graph of several units awaits all of them; units compiled one by one are awaited one by one.
    assert (called["inlined"], blocks["inlined"]) == (["0", "1", "root"], [])
    assert called["whole"] == blocks["whole"] == []
    thawed, compiled = loop(2, "nothing", thaws=True), loop(2, thaws=True)
    torch.testing.assert_close(compiled["numbers"], thawed["numbers"])


def test_a_compiled_model_is_the_same_model(ranks: Pools) -> None:
    """Its graph is one, and what is unfrozen is averaged."""
    ranks(2).run(loops)
