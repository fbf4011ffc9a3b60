"""Weights and gradients that travel in 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.comm import Communicator
from lightning_zero.engine import Engine
from lightning_zero.plan import RECIPES
from tests.oracle.models import MODELS
from tests.oracle.parity import share
from tests.oracle.ranks import Pools
from tests.oracle.sharded import (
    CPU,
    adopted,
    cast_inputs,
    sgd,
    surroundings,
    whole,
)

Way = tuple[int, str, int | None, dict[str, Any]]
CODED = {"gather_bits": 8, "reduce_bits": 8}
WAYS: list[Way] = [
    (2, "32-true", 2, {"reduce_bits": 8}),
    (3, "32-true", 2, CODED),
    (3, "bf16-mixed", None, CODED),
]
STEPS = 4
CASE = MODELS["nested"]


def _adopted(way: Way) -> tuple[Engine, Any]:
    stage, precision, num_shards, bits = way
    comm = Communicator(CPU, num_shards=num_shards, reads_peers=False)
    how = {"stage": stage, "comm": comm, "recipe": RECIPES[precision], "units": "leaves", **bits}
    return adopted(CASE.build(), sgd, **how)


def _seen(engine: Engine) -> dict[str, Tensor]:
    """Whole weights as a step sees them."""
    named = engine.module.named_parameters()
    with engine.step(awaits_backward=False):
        return {name: p.detach().float().clone() for name, p in named}


def _train(way: Way) -> dict[str, Any]:
    """Losses, what a step sees at the end, the masters, and what the last step sent."""
    engine, optimizer = _adopted(way)
    before = torch.random.get_rng_state()
    rank, world = engine.comm.control.rank, engine.comm.control.world_size
    losses = []
    for _ in range(STEPS):
        part = cast_inputs(share(CASE.batch(4 * world, 0), rank, world), way[1])
        with engine.step() as watch, surroundings(way[1]):
            watch(loss := CASE.loss(engine.module, part))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert torch.equal(torch.random.get_rng_state(), before)
    found = {key: sent.bytes for key, sent in engine.comm.traffic.items()}
    if way[1] == "32-true" and way[3]:
        assert found == _formula(engine, way)
    states = [
        {name: value.tolist() for name, value in look(engine).items()} for look in (_seen, whole)
    ]
    engine.close()
    return {"losses": losses, "states": states}


def _formula(engine: Engine, way: Way) -> dict[tuple[str, str], int]:
    """A byte for each element, and four for each block of 64, in whole blocks."""

    def coded(numel: int, num_bits: int | None) -> int:
        return 4 * numel if num_bits is None else -(-numel // 64) * (64 + 4)

    size, reduce_bits = way[2] or 4, way[3].get("reduce_bits")
    expected: dict[tuple[str, str], int] = {}
    for unit in engine.sharded.units:
        for flat in unit.flat_parameters:
            label, numel = unit.label, flat.layout.shard_numel
            times = engine.comm.traffic[label, "gather"].collectives
            between = (4 // size - 1) * coded(numel // (4 // size), reduce_bits)
            expected |= {
                (label, "gather"): times * (size - 1) * coded(numel, flat.plan.gather_bits),
                (label, "reduce"): (size - 1) * coded(numel, reduce_bits),
                (label, "replicate reduce"): between,
                (label, "replicate gather"): between,
            }
    return expected


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_all_ranks_see_the_same_learn_and_send_the_formula(ranks: Pools, way: Way) -> None:
    plain, coded = ranks(4).run(_train, (*way[:3], {}))[0], ranks(4).run(_train, way)
    for other in coded:  # bit for bit, in all copies
        assert other["states"] == coded[0]["states"] != plain["states"]
    fall = plain["losses"][0] - plain["losses"][-1]
    assert fall > 0
    assert abs(coded[0]["losses"][-1] - plain["losses"][-1]) < 0.2 * fall
    if way == WAYS[1]:  # rounding by chance is the same in every run
        assert ranks(4).run(_train, way)[0]["states"] == coded[0]["states"]
