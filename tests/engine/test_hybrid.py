"""Hybrid sharding: shards over the ranks of a copy, and copies that stay equal."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.comm import Communicator
from lightning_zero.plan import RECIPES
from tests.oracle.checkpoints import told
from tests.oracle.models import MODELS
from tests.oracle.parity import Result, assert_parity
from tests.oracle.ranks import Pools
from tests.oracle.sharded import CPU, sgd, shard, surroundings, train, whole

WAYS: dict[str, dict[str, Any]] = {
    "windows": {},
    "point to point": {"reads_peers": False},
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
    by_rank = ranks(world).run(_train, num_shards, way, keys, clip)
    return {key: Result.over_ranks([of_rank[key] for of_rank in by_rank]) for key in keys}


KEYS: list[Key] = [
    ("nested", 3, 1, "32-true", None),
    ("nested", 3, 2, "bf16-mixed", None),
    ("odd_widths", 2, 2, "32-true", "reduce"),
    ("odd_widths", 3, 2, "32-true", "local"),
    ("tied_blocks", 1, 2, "bf16-mixed", None),
    ("tied_blocks", 2, 1, "16-mixed", None),
]


@pytest.fixture(scope="module")
def plain(ranks: Pools) -> dict[Key, Result]:
    """The same bits on every way (test_parity.py)."""
    return _results(ranks, 4, None, "windows", KEYS, 0.5)


@pytest.mark.parametrize("way", list(WAYS))
def test_two_copies_train_as_one(ranks: Pools, plain: dict[Key, Result], way: str) -> None:
    keys = KEYS if way == "windows" else KEYS[:3]
    copies = _results(ranks, 4, 2, way, keys, 0.5)
    for key in keys:
        # The sum over two copies of two ranks has another order than the sum over four.
        assert_parity(copies[key], plain[key], ulps=256)


def test_one_copy_and_copies_of_one_are_plain_sharding(ranks: Pools) -> None:
    keys, way = KEYS[:4], "point to point"
    local = [(*key[:-1], "local") for key in keys]
    plain = _results(ranks, 3, None, way, [*keys, *local], None)
    for num_shards in (3, 1):
        found = _results(ranks, 3, num_shards, way, keys, None)
        # Copies of one rank add up microbatches before they add up ranks, as DDP does.
        for key, same in zip(keys, local if num_shards == 1 else keys, strict=True):
            # Norms are sums over other pieces.
            expected = Result(plain[same].losses, plain[same].params, plain[same].buffers)
            assert_parity(found[key], expected, ulps=0)


def _sent(num_shards: int, policy: str, accumulate: int) -> dict[str, int]:
    """Elements that a rank sends in a step at stage 2, by verb."""
    comm = Communicator(CPU, num_shards=num_shards)
    engine = shard(MODELS["nested"].build(), stage=2, accumulate=policy, comm=comm)
    optimizer = sgd(engine.module)
    engine.adopt(optimizer)
    for seed in range(2):
        for micro in range(accumulate):
            with engine.no_sync() if micro < accumulate - 1 else contextlib.nullcontext():
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


@pytest.mark.parametrize(("policy", "accumulate"), [("reduce", 1), ("reduce", 3), ("local", 3)])
def test_each_axis_sends_the_formula(ranks: Pools, policy: str, accumulate: int) -> None:
    times = accumulate if policy == "reduce" else 1
    for sent in ranks(4).run(_sent, 2, policy, accumulate):
        assert sent["gather"] == sent["numel"] // 2
        assert sent["reduce"] == times * sent["numel"] // 2
        # Copies come together once in a step.
        assert sent["replicate gather"] == sent["replicate reduce"] == sent["numel"] // 4


class _Branches(nn.Module):
    """Two units, of which each microbatch uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor, which: str) -> Tensor:
        return sum((self.blocks[int(one)](x).sum() for one in which), torch.zeros(()))


ORDERS = ["-0 01", "-01 1", "-0 -1 1", "01 01", "01 -0 1", "-01 zero 1", "-0 -0"]
"""Microbatches by the blocks that they use; a minus sends nothing to the other copies."""


def _grads_after(num_shards: int | None, stage: int) -> dict[str, Any]:
    """Whole gradients after each order, or the error of a step on them."""
    found: dict[str, Any] = {}
    # Nobody waits for readers of what is given up before a step.
    comm = Communicator(CPU, num_shards=num_shards, reads_peers=False)
    for order in ORDERS:
        engine = shard(_Branches(), stage=stage, accumulate="reduce", comm=comm)
        optimizer = sgd(engine.module)
        engine.adopt(optimizer)
        for number, word in enumerate(order.split()):
            if word == "zero":
                optimizer.zero_grad()
                continue
            with engine.no_sync() if word[0] == "-" else contextlib.nullcontext():
                with engine.step() as watch:
                    # Whole numbers, whose sums and averages have no rounding.
                    rows = torch.full((2, 8), float(number + comm.control.rank))
                    watch(loss := engine.module(rows, word.strip("-")))
                loss.backward()
        if word[0] == "-":
            found[order] = told(optimizer.step)
            engine.reset()
        else:
            grads = [engine.sharded.full_grad(p) for p in engine.module.parameters()]
            found[order] = [None if grad is None else grad.tolist() for grad in grads]
        engine.close(restore=False)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_copies_come_together_whatever_each_microbatch_uses(ranks: Pools, stage: int) -> None:
    plain = ranks(4).run(_grads_after, None, stage)[0]
    for of_rank in ranks(4).run(_grads_after, 2, stage):
        for order in ORDERS[:-1]:
            assert of_rank[order] == plain[order], order
        assert "is reduced within one copy of the model's states" in of_rank[ORDERS[-1]]


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
