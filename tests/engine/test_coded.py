"""Weights and gradients that travel in few bits."""

from __future__ import annotations

import contextlib
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_zero.comm.coded import Cargo, Coded
from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.engine import Engine
from lightning_zero.plan.plan import RECIPES, Offload, Placement
from lightning_zero.plan.settings import Settings
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
    (2, "32-true", 2, {"reduce_bits": 4}),
    (3, "32-true", None, CODED),
    (3, "32-true", 2, CODED),
    (3, "bf16-true", 1, CODED),
]
STEPS = 6


def _engine(way: Way, name: str = "nested", **more: Any) -> Engine:
    stage, precision, num_shards, bits = way
    comm = Communicator(CPU, num_shards=num_shards, windows=False)
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


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_all_ranks_see_the_same_and_learn(ranks: Pools, way: Way) -> None:
    plain = ranks(4).run(_train, (*way[:3], {}))[0]
    first, *others = ranks(4).run(_train, way)
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
def test_bytes_sent_are_the_formula(ranks: Pools, way: Way) -> None:
    """A byte, or half of one, for each element, and four for each block of 64."""
    stage, _, num_shards, bits = way

    def coded(numel: int, num_bits: int | None) -> int:
        if num_bits is None:
            return 4 * numel
        # A part between copies may be no multiple of 64.
        return numel * num_bits // 8 + numel // math.gcd(numel, 64) * 4

    for found in ranks(4).run(_train, way):
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


def _overflows() -> tuple[bool, list[float]]:
    engine = _engine((2, "32-true", None, {"reduce_bits": 8}))
    with engine.step() as watch:
        loss = MODELS["nested"].loss(engine.module, MODELS["nested"].batch(4, 0))
        watch(loss * torch.inf if engine.comm.control.rank else loss)
    (loss * torch.inf if engine.comm.control.rank else loss).backward()
    grads = [engine.sharded.full_grad(parameter) for parameter in engine.module.parameters()]
    engine.close(restore=False)
    return all(not grad.isfinite().any() for grad in grads if grad is not None), []


def test_what_is_not_finite_arrives(ranks: Pools) -> None:
    assert all(is_seen for is_seen, _ in ranks(2).run(_overflows))


# ---------------------------------------------------------------------------- what is lost


def _sums(*, keeps_errors: bool) -> tuple[Tensor, Tensor, float]:
    """Sums of nine gradients, as they arrive and as they are, and a step of 4 bits."""
    comm = Communicator(CPU, windows=False)
    rank, numel = comm.control.rank, 256
    reduce = comm.redistribution(
        Placement.PARTIAL, Placement.SHARDED, bits=4, cargo=Cargo.GRADIENTS,
        keeps_errors=keeps_errors,
    )  # fmt: skip
    every = [torch.randn(numel, generator=torch.Generator().manual_seed(one)) for one in range(2)]
    half = slice(rank * numel // 2, (rank + 1) * numel // 2)
    arrived = torch.zeros(numel // 2)
    for step in range(10):
        # One that is not finite is lost, and nothing of those behind it.
        sent = torch.full((numel,), torch.inf) if step == 4 else every[rank].clone()
        buffer = comm.transport.reduce_buffer(numel, torch.float32)
        buffer.tensor.copy_(sent)
        out = torch.empty(numel // 2)
        reduce(out, buffer, unit="unit", tag=0).wait()
        assert out.isfinite().all() == (step != 4)
        arrived += out.nan_to_num(0.0, 0.0, 0.0)
    largest = max(float(one.abs().max()) for one in every)
    return arrived, 9 * (every[0] + every[1])[half], largest / 7


def test_with_feedback_nothing_is_lost_for_good(ranks: Pools) -> None:
    # Half a step of either rank now, and as much that the one not finite has taken with it. With
    # errors in it a block may be a little larger.
    bound = 1.2 * 2
    for arrived, expected, step in ranks(2).run(_sums, keeps_errors=True):
        assert (arrived - expected).abs().max() < bound * step
    for arrived, expected, step in ranks(2).run(_sums, keeps_errors=False):
        assert (arrived - expected).abs().max() > bound * step


def test_feedback_is_the_same_in_every_run(ranks: Pools) -> None:
    way: Way = (3, "32-true", 2, {"reduce_bits": 4, "error_feedback": True})
    first, *others = ranks(4).run(_train, way)
    assert all(other["masters"] == first["masters"] for other in others)
    assert ranks(4).run(_train, way)[0]["masters"] == first["masters"]
    without: Way = (3, "32-true", 2, {"reduce_bits": 4})
    assert ranks(4).run(_train, without)[0]["masters"] != first["masters"]


def _encoded(stage: int, num_shards: int | None) -> list[float]:
    """Norms of what is coded for the same gradients of a step of two microbatches and of one."""
    way: Way = (stage, "32-true", num_shards, {"reduce_bits": 8, "error_feedback": True})
    engine = _engine(way, accumulate="local" if stage == 2 else None)
    norms: list[float] = []
    encode = Coded._encode_with_lost

    def watched(self: Coded, codec: Any, values: Tensor, codes: Tensor) -> None:
        if self._transport is engine.comm.transport:
            norms[-1] += float(values.square().sum())
        encode(self, codec, values, codes)

    batch = MODELS["nested"].batch(4, 0)
    with mock.patch.object(Coded, "_encode_with_lost", watched):
        for window in (2, 1, 2):
            norms.append(0.0)
            for number in range(window):
                last = number == window - 1
                with contextlib.nullcontext() if last else engine.no_sync():
                    MODELS["nested"].loss(engine.module, batch).backward()
    engine.close()
    return [norm**0.5 for norm in norms]


@pytest.mark.parametrize(("stage", "num_shards"), [(1, None), (2, None), (3, None), (3, 2)])
def test_what_was_lost_has_the_scale_of_the_next(
    ranks: Pools, stage: int, num_shards: int | None
) -> None:
    for two, one, again in ranks(4).run(_encoded, stage, num_shards):
        # Where every microbatch is reduced a step codes two gradients, and not one twice as large.
        times = 2**0.5 if stage == 3 else 2
        assert two == pytest.approx(times * one, rel=0.1)
        assert again == pytest.approx(times * one, rel=0.1)


def _refused() -> list[str]:
    model = MODELS["nested"].build()
    return [
        told(Engine, model, Settings(stage=2, gather_bits=8)),
        told(Engine, model, Settings(reduce_bits=8), Communicator(CPU)),
    ]


def test_what_cannot_be_coded_is_refused(ranks: Pools) -> None:
    for replicated, windows in ranks(2).run(_refused):
        assert "gather_bits=8 has no effect: at stage=2 without mixed" in replicated
        assert "Use Communicator(windows=False)" in windows
    for name, value in (("gather_bits", 4), ("reduce_bits", 2), ("reduce_bits", True)):
        with pytest.raises(ValueError, match=f"Expected {name}="):
            Settings(**{name: value})
    away = Settings(stage=3, gather_bits=8, offload=Offload("cpu", "cpu"))
    with pytest.raises(ValueError, match="keeps them on an accelerator's host"):
        away.plan(torch.float32)
    with pytest.raises(ValueError, match="contradicts"):
        Settings(reduce_bits=8, reduce_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="Pass reduce_bits=8 or 4"):
        Settings(error_feedback=True)
    with pytest.raises(ValueError, match="whose loss scale may differ"):
        Settings(reduce_bits=8, error_feedback=True, recipe=RECIPES["16-mixed"])
