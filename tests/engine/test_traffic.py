"""Elements and bytes that a step sends are those of the stage table, unit by unit, exactly."""

from __future__ import annotations

import contextlib
from itertools import product
from typing import NamedTuple

import pytest
import torch

from lightning_zero.comm import Communicator
from tests.oracle.models import Blocks
from tests.oracle.ranks import Pools
from tests.oracle.sharded import CPU, adamw, adopted, padded

NUM_BLOCKS = 4


class Way(NamedTuple):
    """How a step sends; the first block may be frozen."""

    stage: int
    policy: str
    accumulate: int
    reshards: bool
    reads_peers: bool
    is_frozen: bool


Table = dict[tuple[str, str], int]


def elements_sent(ways: list[Way]) -> list[Table]:
    """Return what a step sends, by unit and verb, after two that taught the order of units."""
    return [_elements_sent(way) for way in ways]


def _elements_sent(way: Way) -> Table:
    model = Blocks(NUM_BLOCKS)
    model.blocks[0].requires_grad_(not way.is_frozen)
    how = {} if way.reshards else {"reshard_after_forward": False}
    comm = Communicator(CPU, reads_peers=way.reads_peers)
    how |= {"stage": way.stage, "accumulate": way.policy, "comm": comm}
    engine, optimizer = adopted(model, adamw, **how)
    for _ in range(3):
        for micro in range(way.accumulate):
            with engine.no_sync() if micro < way.accumulate - 1 else contextlib.nullcontext():
                model(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = {key: last.elements for key, last in comm.traffic.items()}
    for (_, verb), last in comm.traffic.items():
        assert last.bytes == 4 * last.elements
        if verb == "reduce":
            assert last.collectives == (way.accumulate if way.policy == "reduce" else 1)
    engine.close()
    return sent


def table(way: Way, world: int) -> Table:
    """The stage table of the design.

    At stage 3 the root is gathered once per microbatch, and so is the last block: it is kept whole
    from its forward to its backward.
    """
    expected = {}
    sizes = {f"blocks.{number}": [6, 6, 36, 6] for number in range(NUM_BLOCKS)}
    for label, numels in {**sizes, "root": [36, 6]}.items():
        send = padded(numels, world) // world * (world - 1)
        is_frozen = way.is_frozen and label == "blocks.0"
        if not is_frozen:
            times = way.accumulate if way.policy == "reduce" else 1
            expected[label, "reduce"] = send * times
        if way.stage < 3 and not is_frozen:
            expected[label, "gather"] = send
        if way.stage == 3:
            is_once = label in ("root", f"blocks.{NUM_BLOCKS - 1}") or not way.reshards
            expected[label, "gather"] = send * way.accumulate * (1 if is_once else 2)
    return expected


@pytest.mark.parametrize("world", [1, 2, 3])
def test_elements_sent_are_the_stage_table(ranks: Pools, world: int) -> None:
    policies = [
        (stage, policy, accumulate, reshards)
        for stage, policy in ((1, "local"), *product((2, 3), ("reduce", "local")))
        for accumulate in (1, 3)
        for reshards in ((True, False) if stage == 3 else (True,))
    ]
    wires = [(False, False), (True, True), (True, False), (False, True)]
    ways = [Way(*policy, *wires[n // 2 % 4]) for n, policy in enumerate(policies)]
    # Two ranks send one half of the policies, three the other; one sends nothing.
    ways = [way for n, way in enumerate(ways) if (n + n // 2) % 2 == world % 2]
    ways = ways[:1] if world == 1 else ways
    for by_way in ranks(world).run(elements_sent, ways):
        for way, sent in zip(ways, by_way, strict=True):
            assert sent == table(way, world), way
