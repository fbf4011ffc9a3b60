"""Settings, transports and three ranks: the bits of the engine by itself.

That they are DistributedDataParallel's is shown by the rows of `tests/cases/backward.py`.
"""

from __future__ import annotations

import pytest
import torch

from lightning_zero.comm import Communicator
from tests.oracle.parity import distance_in_ulps
from tests.oracle.projects import WAYS, Trace
from tests.oracle.ranks import Pools
from tests.oracle.sharded import CPU, require_same, sgd, train

SETTINGS = [
    {"stage": 1},
    {"prefetch": 0},
    {"units": "leaves"},
    {"stage": 2},
    {"reshard_after_forward": False},
    {"units": "nested", "prefetch": 2},
    {"units": "root"},
]
NAMES = ["tied", "branch_by_step", "transformer", "nested", "inplace_views", "rnn", "frozen"]


def without_norms(trace: Trace) -> Trace:
    """They are sums over pieces, and keep their bits only where pieces are the same."""
    return Trace(trace.params, losses=trace.losses)


def compare_all(ways: list[str]) -> None:
    world, comms = len(ways), [Communicator(CPU, **WAYS[way]) for way in ways]
    for row, name in enumerate(NAMES):
        expected = without_norms(train(name, comm=comms[0], steps=2))
        for column, how in enumerate(SETTINGS):
            if (row + column) % 3 == 0:
                comm = comms[(row + column) // 3 % world]
                require_same(without_norms(train(name, comm=comm, steps=2, **how)), expected)


@pytest.mark.parametrize(
    ("world", "ways"),
    [
        (2, ["windows", "backend"]),
        (3, ["windows", "point to point"]),  # the backend may add up three ranks in another order
    ],
)
def test_no_setting_changes_a_bit(ranks: Pools, world: int, ways: list[str]) -> None:
    ranks(world).run(compare_all, ways)


def accumulate_all() -> None:
    """Sums over microbatches have one order for each policy, at every stage."""
    for name in ("tied", "unused_branch", "batchnorm_conv"):
        for policy, stages in (("local", (1, 2, 3)), ("reduce", (2, 3))):
            how = {"policy": policy, "accumulate": 3, "clip_norm": 0.1, "steps": 2}
            first, *others = (without_norms(train(name, sgd, stage=s, **how)) for s in stages)
            for other in others:
                require_same(other, first)


def test_accumulation_is_bit_for_bit_the_same_at_every_stage(ranks: Pools) -> None:
    ranks(3).run(accumulate_all)


def reduce_in_16_bits() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        plain = train("tied", sgd)
        first, second = (train("tied", sgd, stage=stage, reduce_dtype=dtype) for stage in (1, 3))
        require_same(without_norms(second), without_norms(first))
        for name, value in first.params.items():
            assert distance_in_ulps(value, plain.params[name], dtype) <= 2
        assert not all(map(torch.equal, first.params.values(), plain.params.values()))


def test_gradients_that_are_reduced_in_16_bits(ranks: Pools) -> None:
    ranks(3).run(reduce_in_16_bits)
