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
from tests.oracle.sharded import CPU, sgd, shard, surroundings, whole

Way = tuple[int, str, int | None, dict[str, Any]]
CODED = {"gather_bits": 8, "reduce_bits": 8}
WAYS: list[Way] = [
    (1, "bf16-mixed", None, CODED),
    (2, "16-mixed", None, CODED),
    (2, "32-true", 2, {"reduce_bits": 8}),
    (3, "32-true", None, CODED),
    (3, "32-true", 2, CODED),
    (3, "bf16-true", 1, CODED),
]
STEPS = 4


def _engine(way: Way, name: str = "nested", **more: Any) -> Engine:
    stage, precision, num_shards, bits = way
    comm = Communicator(CPU, num_shards=num_shards, reads_peers=False)
    model = MODELS[name].build()
    if precision.endswith("-true"):
        model = model.to({"bf16-true": torch.bfloat16}.get(precision, torch.float32))
    recipe = RECIPES[precision]
    return shard(model, stage=stage, comm=comm, recipe=recipe, units="leaves", **bits, **more)


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
        part = share(MODELS["nested"].batch(4 * world, 0), rank, world)
        part = {
            k: v.to(next(engine.module.parameters()).dtype)
            if v.is_floating_point() and precision == "bf16-true"
            else v
            for k, v in part.items()
        }
        with engine.step() as watch, surroundings(precision):
            watch(loss := MODELS["nested"].loss(engine.module, part))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert torch.equal(torch.random.get_rng_state(), before)
    traffic = dict(engine.comm.traffic)
    flats = [
        (unit.label, f.layout.shard_numel, f.trainable, f.plan.gather_bits)
        for unit in engine.sharded.units
        for f in unit.flat_parameters
    ]
    found = {
        "losses": losses,
        "seen": {name: value.tolist() for name, value in _seen(engine).items()},
        "masters": {name: value.tolist() for name, value in whole(engine).items()},
        "traffic": traffic,
        "flats": flats,
    }
    engine.close()
    return found


Trained = Callable[[Way], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(ranks: Pools) -> Trained:
    """What each rank found, in one run of each way."""
    found: dict[str, list[dict[str, Any]]] = {}

    def once(way: Way) -> list[dict[str, Any]]:
        return found.get(str(way)) or found.setdefault(str(way), ranks(4).run(_train, way))

    return once


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_all_ranks_see_the_same_and_learn(ranks: Pools, trained: Trained, way: Way) -> None:
    plain = trained((*way[:3], {}))[0]
    first, *others = trained(way)
    for other in others:
        # Bit for bit, in all copies.
        assert (other["seen"], other["masters"]) == (first["seen"], first["masters"])
    assert first["masters"] != plain["masters"]
    fall = plain["losses"][0] - plain["losses"][-1]
    assert fall > 0
    assert abs(first["losses"][-1] - plain["losses"][-1]) < 0.2 * fall
    if way is WAYS[4]:
        # Rounding by chance is the same in every run.
        assert ranks(4).run(_train, way)[0]["masters"] == first["masters"]


@pytest.mark.parametrize("way", [WAYS[3], WAYS[4], WAYS[2]], ids=str)
def test_bytes_sent_are_the_formula(trained: Trained, way: Way) -> None:
    """A byte for each element, and four for each block of 64, in whole blocks."""
    stage, _, num_shards, bits = way

    def coded(numel: int, num_bits: int | None) -> int:
        return 4 * numel if num_bits is None else -(-numel // 64) * (64 + 4)

    for found in trained(way):
        size = num_shards or 4
        expected: dict[tuple[str, str], int] = {}
        for label, numel, _, gather_bits in found["flats"]:
            times = found["traffic"][label, "gather"].collectives
            gathered = times * (size - 1) * coded(numel, gather_bits)
            part, reduce_bits = numel // (4 // size), bits["reduce_bits"]
            sent = {"gather": gathered, "reduce": (size - 1) * coded(numel, reduce_bits)}
            if size < 4:
                between = (4 // size - 1) * coded(part, reduce_bits)
                sent |= {"replicate reduce": between, "replicate gather": between}
            expected |= {(label, verb): nbytes for verb, nbytes in sent.items()}
        actual = {key: sent.bytes for key, sent in found["traffic"].items()}
        assert actual == expected
        assert stage == 3 or all(bits is None for *_, bits in found["flats"])


def _edited(way: Way, where: str) -> dict[str, Tensor]:
    """Return what steps see after an edit of one element of each parameter."""
    engine = _engine(way)
    optimizer = sgd(engine.module)
    engine.adopt(optimizer)
    parameters = list(engine.module.parameters())

    def edit() -> None:
        with torch.no_grad():
            for parameter in parameters:
                parameter.view(-1)[0] = 6.25

    before = whole(engine)
    if where == "between steps":
        edit()
        engine.sharded.keep_edits()
    elif where == "gathered":
        with engine.sharded.gathered(modify=True):
            edit()
    else:
        with engine.step(awaits_backward=False):
            engine.sharded.touch(parameters)
            edit()
            engine.sharded.keep_edits()
            # The scale of a block would be another one now.
            edit()
            engine.sharded.keep_edits()
    after, seen = whole(engine), _seen(engine)
    engine.close()
    for name, master in before.items():
        expected = master.clone()
        expected.view(-1)[0] = 6.25
        # No other element has lost a digit.
        torch.testing.assert_close(after[name], expected, rtol=0, atol=0)
    return seen


@pytest.mark.parametrize("where", ["between steps", "gathered", "in a step"])
@pytest.mark.parametrize("way", [WAYS[0], WAYS[3]], ids=str)
def test_what_is_not_edited_keeps_its_digits(ranks: Pools, way: Way, where: str) -> None:
    first, second = ranks(2).run(_edited, way, where)
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert value.view(-1)[0] == pytest.approx(6.25, rel=0.01)


# ---------------------------------------------------------------------------- what is refused


def _refused() -> list[str]:
    model = MODELS["nested"].build()
    return [
        told(Engine, model, Settings(stage=2, gather_bits=8)),
        told(Engine, model, Settings(reduce_bits=8), Communicator(CPU)),
    ]


def test_what_cannot_be_coded_is_refused(ranks: Pools) -> None:
    for replicated, windows in ranks(2).run(_refused):
        assert "gather_bits=8 has no effect: at stage=2 without mixed" in replicated
        assert "Use Communicator(reads_peers=False)" in windows
    for name, value in (("gather_bits", 4), ("reduce_bits", 4), ("reduce_bits", True)):
        with pytest.raises(ValueError, match=f"Expected {name}=8"):
            Settings(**{name: value})
    away = Settings(stage=3, gather_bits=8, offload=Offload("cpu", "cpu"))
    with pytest.raises(ValueError, match="keeps them on an accelerator's host"):
        away.plan(torch.float32)
    with pytest.raises(ValueError, match="contradicts"):
        Settings(reduce_bits=8, reduce_dtype=torch.bfloat16)
