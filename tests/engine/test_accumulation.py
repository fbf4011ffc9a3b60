"""Gradient accumulation through the Trainer, under both policies, held against DDP."""

from __future__ import annotations

import pytest

from tests.oracle.projects import Regression, fit, make_strategy
from tests.oracle.ranks import Pools


def _traffic(stage: int, policy: str, windows: int) -> tuple[int, int]:
    strategy = make_strategy(stage, accumulate=policy)
    fit(Regression(), strategy, accumulate_grad_batches=windows)
    sent = strategy.engine.comm.transport.ledger.elements
    return tuple(sum(n for (_, v), n in sent.items() if v == verb) for verb in ("reduce", "gather"))


@pytest.mark.parametrize("stage", [2, 3])
def test_local_accumulation_sends_once_per_step(ranks: Pools, stage: int) -> None:
    each, _ = ranks(2).run(_traffic, stage, "reduce", 4)[0]
    once, _ = ranks(2).run(_traffic, stage, "local", 4)[0]
    plain, _ = ranks(2).run(_traffic, stage, "local", 1)[0]
    assert each == plain == 4 * once > 0
