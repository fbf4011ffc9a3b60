"""Accumulation and reductions in 16 bits on three ranks: the bits of the engine by itself.

That they are DistributedDataParallel's, whatever the settings and transports, is shown by the rows
of `tests/cases/backward.py`.
"""

from __future__ import annotations

import torch

from tests.oracle.parity import distance_in_ulps, require_same
from tests.oracle.projects import Trace
from tests.oracle.ranks import Pools
from tests.oracle.sharded import sgd, train


def without_norms(trace: Trace) -> Trace:
    """They are sums over pieces, and keep their bits only where pieces are the same."""
    return Trace(trace.params, losses=trace.losses)


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
