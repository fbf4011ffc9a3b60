"""Weights and gradients that travel in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.comm import Communicator
from lightning_zero.engine import Engine
from lightning_zero.plan import RECIPES, Offload, Settings
from tests.oracle.checkpoints import told
from tests.oracle.models import MODELS
from tests.oracle.parity import share
from tests.oracle.ranks import Pools
from tests.oracle.sharded import CPU, cast_inputs, sgd, shard, surroundings, whole

Way = tuple[int, str, int | None, dict[str, Any]]
CODED = {"gather_bits": 8, "reduce_bits": 8}
WAYS: list[Way] = [
    (2, "32-true", 2, {"reduce_bits": 8}),
    (3, "32-true", 2, CODED),
    (3, "bf16-mixed", None, CODED),
]
STEPS = 4
CASE = MODELS["nested"]


def _engine(way: Way) -> Engine:
    stage, precision, num_shards, bits = way
    comm = Communicator(CPU, num_shards=num_shards, reads_peers=False)
    recipe = RECIPES[precision]
    return shard(CASE.build(), stage=stage, comm=comm, recipe=recipe, units="leaves", **bits)


def _seen(engine: Engine) -> dict[str, Tensor]:
    """Whole weights as a step sees them."""
    named = engine.module.named_parameters()
    with engine.step(awaits_backward=False):
        return {name: p.detach().float().clone() for name, p in named}


def _train(way: Way) -> dict[str, Any]:
    """Losses, what a step sees at the end, the masters, and what the last step sent."""
    engine, precision = _engine(way), way[1]
    before = torch.random.get_rng_state()
    optimizer = sgd(engine.module)
    engine.adopt(optimizer)
    rank, world = engine.comm.control.rank, engine.comm.control.world_size
    losses = []
    for _ in range(STEPS):
        part = cast_inputs(share(CASE.batch(4 * world, 0), rank, world), precision)
        with engine.step() as watch, surroundings(precision):
            watch(loss := CASE.loss(engine.module, part))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert torch.equal(torch.random.get_rng_state(), before)
    traffic = dict(engine.comm.traffic)
    flats = [
        (unit.label, f.layout.shard_numel, f.plan.gather_bits)
        for unit in engine.sharded.units
        for f in unit.flat_parameters
    ]
    states = {
        kind: {name: value.tolist() for name, value in look(engine).items()}
        for kind, look in (("seen", _seen), ("masters", whole))
    }
    engine.close()
    return {"losses": losses, "traffic": traffic, "flats": flats, **states}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_all_ranks_see_the_same_learn_and_send_the_formula(ranks: Pools, way: Way) -> None:
    plain, coded = ranks(4).run(_train, (*way[:3], {}))[0], ranks(4).run(_train, way)
    first, *others = coded
    for other in others:
        # Bit for bit, in all copies.
        assert (other["seen"], other["masters"]) == (first["seen"], first["masters"])
    assert first["masters"] != plain["masters"]
    fall = plain["losses"][0] - plain["losses"][-1]
    assert fall > 0
    assert abs(first["losses"][-1] - plain["losses"][-1]) < 0.2 * fall
    if way == WAYS[1]:  # rounding by chance is the same in every run
        assert ranks(4).run(_train, way)[0]["masters"] == first["masters"]
    for found in coded if way[1] == "32-true" else ():
        actual = {key: sent.bytes for key, sent in found["traffic"].items()}
        assert actual == _formula(way, found)


def _formula(way: Way, found: dict[str, Any]) -> dict[tuple[str, str], int]:
    """A byte for each element, and four for each block of 64, in whole blocks."""
    _, _, num_shards, bits = way

    def coded(numel: int, num_bits: int | None) -> int:
        return 4 * numel if num_bits is None else -(-numel // 64) * (64 + 4)

    size = num_shards or 4
    expected: dict[tuple[str, str], int] = {}
    for label, numel, gather_bits in found["flats"]:
        times = found["traffic"][label, "gather"].collectives
        part, reduce_bits = numel // (4 // size), bits["reduce_bits"]
        between = (4 // size - 1) * coded(part, reduce_bits)
        expected |= {
            (label, "gather"): times * (size - 1) * coded(numel, gather_bits),
            (label, "reduce"): (size - 1) * coded(numel, reduce_bits),
            (label, "replicate reduce"): between,
            (label, "replicate gather"): between,
        }
    return expected


def _edited() -> dict[str, Tensor]:
    """Return what steps see after edits of one element of each parameter, in three ways."""
    engine = _engine((3, "32-true", None, CODED))
    engine.adopt(sgd(engine.module))
    parameters = list(engine.module.parameters())

    def edit(value: float) -> None:
        with torch.no_grad():
            for parameter in parameters:
                parameter.view(-1)[0] = value

    def between_steps(value: float) -> None:
        edit(value)
        engine.sharded.keep_edits()

    def in_gathered(value: float) -> None:
        with engine.sharded.gathered(modify=True):
            edit(value)

    def in_a_step(value: float) -> None:
        with engine.step(awaits_backward=False):
            engine.sharded.touch(parameters)
            for _ in range(2):  # the scale of a block would be another one the second time
                edit(value)
                engine.sharded.keep_edits()

    ways: list[Callable[[float], None]] = [between_steps, in_gathered, in_a_step]
    for value, way in zip((3.5, 4.75, 6.25), ways, strict=True):
        before = whole(engine)
        way(value)
        after = whole(engine)
        for name, master in before.items():
            master.view(-1)[0] = value
            # No other element has lost a digit.
            torch.testing.assert_close(after[name], master, rtol=0, atol=0)
    seen = _seen(engine)
    engine.close()
    return seen


def test_what_is_not_edited_keeps_its_digits(ranks: Pools) -> None:
    first, second = ranks(2).run(_edited)
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert value.view(-1)[0] == pytest.approx(6.25, rel=0.01)


def _refused() -> list[str]:
    model = CASE.build()
    return [
        told(Engine, model, Settings(stage=2, gather_bits=8)),
        told(Engine, model, Settings(reduce_bits=8), Communicator(CPU)),
    ]


def test_what_cannot_be_coded_is_refused(ranks: Pools) -> None:
    for replicated, windows in ranks(2).run(_refused):
        assert "gather_bits=8 has no effect: at stage=2 without mixed" in replicated
        assert "Use Communicator(reads_peers=False)" in windows
    for name, value in (("gather_bits", 4), ("reduce_bits", True)):
        with pytest.raises(ValueError, match=f"Expected {name} to be 8"):
            Settings(**{name: value})
    away = Settings(stage=3, gather_bits=8, offload=Offload("cpu", "cpu"))
    with pytest.raises(ValueError, match="keeps them on an accelerator's host"):
        away.plan(torch.float32)
    with pytest.raises(ValueError, match="contradicts"):
        Settings(reduce_bits=8, reduce_dtype=torch.bfloat16)
