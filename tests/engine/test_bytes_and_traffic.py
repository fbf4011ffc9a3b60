"""Bytes held and elements sent are those of the plan and of the stage table, exactly."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.comm import Communicator, Sent
from lightning_zero.plan import RECIPES
from tests.oracle.models import Block
from tests.oracle.projects import Regression, fit, rows
from tests.oracle.ranks import Pools
from tests.oracle.sharded import CPU, adamw, padded, shard

Kinds = dict[str, int]


def rank_bytes(stage: int) -> Kinds:
    """A model without padding: 2 units of 128 * 128 elements and a root of 128 * 64."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(2)))
    model = nn.Sequential(model, nn.Linear(128, 64, bias=False))
    engine = shard(model, stage=stage, recipe=RECIPES["bf16-mixed"], units="leaves")
    optimizer = adamw(model)
    engine.adopt(optimizer)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.ones(2, 128)).square().mean()
    loss.backward()
    optimizer.step()
    memory = engine.sharded.memory()
    engine.close()
    return memory


def test_bytes_are_the_papers(ranks: Pools) -> None:
    """2P + 16P/N at stages 1 and 2, 16P/N at stage 3, and no second copy of a sharded weight."""
    numel = 2 * 128 * 128 + 128 * 64
    for stage in (1, 2, 3):
        for memory in ranks(4).run(rank_bytes, stage):
            assert memory["weights"] == (0 if stage == 3 else 2 * numel)
            assert memory["gradients"] == memory["master"] == numel
            assert abs(memory["states"] - 2 * numel) <= 3 * 4


# ------------------------------------------------------------------------------------ traffic

NUM_BLOCKS = 4


class Body(nn.Module):
    """A stem in the root and four blocks; the first is frozen, or none."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Block(6) for _ in range(NUM_BLOCKS)])
        self.blocks[0].requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


Ways = list[tuple[int, str, int, bool, str, bool]]


def elements_sent(ways: Ways) -> list[dict[tuple[str, str], int]]:
    """Return what a step sends, by unit and verb, after two that taught the order of units."""
    return [_elements_sent(*way) for way in ways]


def _elements_sent(
    stage: int, policy: str, accumulate: int, reshard: bool, wires: str, frozen: bool
) -> dict[tuple[str, str], int]:
    torch.manual_seed(0)
    model = Body(frozen=frozen)
    how = {} if reshard else {"reshard_after_forward": False}
    comm = Communicator(CPU, reads_peers=wires == "windows")
    engine = shard(model, stage=stage, accumulate=policy, comm=comm, **how)
    optimizer = adamw(model)
    engine.adopt(optimizer)
    for _ in range(3):
        before = Counter(engine.comm.transport.ledger.elements)
        for micro in range(accumulate):
            loss = None
            with engine.no_sync() if micro < accumulate - 1 else engine.step() as _:
                loss = model(torch.ones(4, 6)).square().mean()
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = engine.comm.transport.ledger.elements
    sent = {key: after[key] - before[key] for key in after if key[0] != "full"}
    engine.close()
    return sent


def table(way: tuple[int, str, int, bool, str, bool], world: int) -> dict[tuple[str, str], int]:
    """The stage table of the design, unit by unit.

    At stage 3 the root is gathered once per microbatch, and so is the last block: it is kept whole
    from its forward to its backward.
    """
    stage, policy, accumulate, reshard, _, frozen = way
    expected = {}
    sizes = {f"blocks.{number}": [6, 6, 36, 6] for number in range(NUM_BLOCKS)}
    for label, numels in {**sizes, "root": [36, 6]}.items():
        send = padded(numels, world) // world * (world - 1)
        is_frozen = frozen and label == "blocks.0"
        if not is_frozen:
            expected[label, "reduce"] = send * (accumulate if policy == "reduce" else 1)
        if stage < 3 and not is_frozen:
            expected[label, "gather"] = send
        if stage == 3:
            is_once = label in ("root", f"blocks.{NUM_BLOCKS - 1}") or not reshard
            expected[label, "gather"] = send * accumulate * (1 if is_once else 2)
    return expected


@pytest.mark.parametrize("world", [1, 2, 3])
def test_elements_sent_are_the_stage_table(ranks: Pools, world: int) -> None:
    policies = [
        (stage, policy, accumulate, reshard)
        for stage, policy in ((1, "local"), *product((2, 3), ("reduce", "local")))
        for accumulate in (1, 3)
        for reshard in ((True, False) if stage == 3 else (True,))
    ]
    wires = [("messages", False), ("windows", True), ("windows", False), ("messages", True)]
    ways: Ways = [(*policy, *wires[n // 2 % 4]) for n, policy in enumerate(policies)]
    # Two ranks send one half of the policies, three the other; one sends nothing.
    ways = [way for n, way in enumerate(ways) if (n + n // 2) % 2 == world % 2]
    ways = ways[:1] if world == 1 else ways
    for by_way in ranks(world).run(elements_sent, ways):
        for way, sent in zip(ways, by_way, strict=True):
            assert sent == table(way, world), way


class Watched(Regression):
    """Notes the strategy's traffic after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic: dict[tuple[str, str], Sent] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        self.traffic = dict(self.trainer.strategy.traffic)


def watched_fit(stage: int, precision: str, accumulate: int) -> Any:
    module = Watched()
    options = {"precision": precision, "accumulate_grad_batches": accumulate}
    fit(module, stage, data=(rows(32),), **options)
    return module.traffic


BLOCKS = [f"net.blocks.{number}" for number in range(3)]
BUNDLES = {
    "32-true": {"root": [([36, 6, 36, 6], 4)], **{name: [([6, 6, 36, 6], 4)] for name in BLOCKS}},
    # The norms are whole in fp32, and stay with the root.
    "bf16-mixed": {
        "root": [([36, 6, 36, 6], 2), ([6, 6] * 3, 4)],
        **{name: [([36, 6], 2)] for name in BLOCKS},
    },
}
"""By precision and unit: elements of each parameter that is gathered in so many bytes each."""


def traffic_of(stage: int, precision: str) -> dict[tuple[str, str], Sent]:
    """Return what two ranks send in a step, by hand."""
    expected = {}
    for unit, flats in BUNDLES[precision].items():
        # At stage 3 the root and the last block are gathered once, the others twice.
        times = 2 if stage == 3 and unit in BLOCKS[:2] else 1
        sends = [(padded(numels, 2) // 2, itemsize) for numels, itemsize in flats]
        elements, count = sum(send for send, _ in sends), len(sends)
        nbytes = sum(send * itemsize for send, itemsize in sends)
        expected[unit, "gather"] = Sent(times * elements, times * nbytes, times * count)
        expected[unit, "reduce"] = Sent(elements, 4 * elements, count)
    return expected


def test_a_trainer_tells_what_a_step_sends(ranks: Pools) -> None:
    """The root has the linears before and behind three blocks."""
    for stage, precision, accumulate in ((3, "bf16-mixed", 1), (1, "32-true", 2)):
        for traffic in ranks(2).run(watched_fit, stage, precision, accumulate):
            assert traffic == traffic_of(stage, precision)
