"""Hybrid sharding: shards over the ranks of a copy, and copies that stay equal."""

from typing import Any

import pytest
import torch

from lightning_zero.comm.communicator import Communicator
from lightning_zero.plan.plan import RECIPES
from tests.oracle.models import MODELS
from tests.oracle.parity import Result, assert_parity
from tests.oracle.ranks import Pools
from tests.oracle.sharded import CPU, sgd, shard, surroundings, train, whole

WAYS: dict[str, dict[str, Any]] = {
    "windows": {},
    "point to point": {"windows": False},
    "backend": {"direct": False},
}
Key = tuple[str, int, int, str, str | None]


def _train(
    num_shards: int | None, way: str, keys: list[Key], clip: float | None
) -> dict[Key, Result]:
    comm = Communicator(CPU, num_shards=num_shards, **WAYS[way])
    return {
        key: train(
            name, sgd, stage=stage, accumulate=accumulate, precision=precision, steps=2,
            policy=policy, clip_norm=clip, comm=comm,
        )
        for key in keys
        for name, stage, accumulate, precision, policy in [key]
    }  # fmt: skip


def _results(
    ranks: Pools, world: int, num_shards: int | None, way: str, keys: list[Key], clip: float | None
) -> dict[Key, Result]:
    by_rank = ranks(world).run(_train, num_shards, way, keys, clip, timeout=150)
    return {key: Result.over_ranks([of_rank[key] for of_rank in by_rank]) for key in keys}


KEYS: list[Key] = [
    ("nested", 3, 1, "32-true", None),
    ("nested", 3, 2, "bf16-mixed", None),
    ("odd_widths", 2, 2, "32-true", "reduce"),
    ("odd_widths", 3, 2, "32-true", "local"),
    ("tied_blocks", 1, 2, "bf16-mixed", None),
    ("tied_blocks", 2, 1, "16-mixed", None),
]


@pytest.mark.parametrize("way", list(WAYS))
def test_two_copies_train_as_one(ranks: Pools, way: str) -> None:
    keys = KEYS if way == "windows" else KEYS[:3]
    plain = _results(ranks, 4, None, way, keys, 0.5)
    copies = _results(ranks, 4, 2, way, keys, 0.5)
    for key in keys:
        # The sum over two copies of two ranks has another order than the sum over four.
        assert_parity(copies[key], plain[key], ulps=256)


def test_one_copy_and_copies_of_one_are_plain_sharding(ranks: Pools) -> None:
    keys, way = KEYS[:4], "point to point"
    plain = _results(ranks, 3, None, way, keys, None)
    for num_shards in (3, 1):
        found = _results(ranks, 3, num_shards, way, keys, None)
        for key in keys:
            # Norms are sums over other pieces.
            expected = Result(plain[key].losses, plain[key].params, plain[key].buffers)
            assert_parity(found[key], expected, ulps=0)


def _sent(num_shards: int) -> dict[str, int]:
    """Elements that a rank sends in a step at stage 2, by verb."""
    engine = shard(MODELS["nested"].build(), stage=2, comm=Communicator(CPU, num_shards=num_shards))
    optimizer = sgd(engine.module)
    engine.adopt(optimizer)
    for seed in range(2):
        with engine.step() as watch:
            loss = MODELS["nested"].loss(engine.module, MODELS["nested"].batch(4, seed))
            watch(loss)
        loss.backward()
        optimizer.step()
    sent: dict[str, int] = {}
    for (_, verb), of_unit in engine.comm.traffic.items():
        sent[verb] = sent.get(verb, 0) + of_unit.elements
    sent["numel"] = sum(flat.layout.numel for flat in engine.sharded.flats)
    engine.close()
    return sent


def test_each_axis_sends_the_formula(ranks: Pools) -> None:
    for sent in ranks(4).run(_sent, 2):
        assert sent["gather"] == sent["reduce"] == sent["numel"] // 2
        assert sent["replicate gather"] == sent["replicate reduce"] == sent["numel"] // 4


def _edited(num_shards: int | None, stage: int, precision: str) -> dict[str, list[float]]:
    """Masters after edits between steps and within `gathered`, and a step on them."""
    comm = Communicator(CPU, num_shards=num_shards)
    engine = shard(
        MODELS["nested"].build(), stage=stage, comm=comm, recipe=RECIPES[precision], units="leaves"
    )
    parameters, rank = dict(engine.module.named_parameters()), comm.control.rank
    optimizer = sgd(engine.module)
    engine.adopt(optimizer)
    for number in range(3):
        with engine.step() as watch, surroundings(precision):
            # Every rank reads the same rows, so that no sum has a rounding.
            loss = MODELS["nested"].loss(engine.module, MODELS["nested"].batch(4, number))
            watch(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 0:
            with torch.no_grad():
                for parameter in parameters.values():
                    parameter.mul_(1.5)
        elif number == 1:
            with engine.sharded.gathered(modify=True), torch.no_grad():
                for parameter in parameters.values():
                    # Rank 0's edit counts.
                    parameter.add_(0.25 + rank)
    found = {name: value.flatten().tolist() for name, value in whole(engine).items()}
    engine.close()
    return found


@pytest.mark.parametrize(
    ("stage", "precision"), [(1, "bf16-mixed"), (2, "32-true"), (3, "32-true"), (3, "bf16-mixed")]
)
def test_edits_reach_all_copies(ranks: Pools, stage: int, precision: str) -> None:
    plain = ranks(4).run(_edited, None, stage, precision)[0]
    for of_rank in ranks(4).run(_edited, 2, stage, precision):
        assert of_rank == plain
