"""Gradient accumulation through the Trainer, under both policies, held against DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from tests.oracle.projects import Regression, Run, assert_like_ddp, fit, make_strategy, rows
from tests.oracle.ranks import Pools

POLICIES = [
    (1, {}),
    *((stage, policy) for stage in (2, 3) for policy in ({}, {"accumulate": "local"})),
    *((stage, {"shard": 1}) for stage in (2, 3)),
]


class _CountsHooks(Regression):
    """Notes how often the hooks around a step are called, and with which gradients."""

    def __init__(self) -> None:
        super().__init__(lr=0.1, optimizer=torch.optim.SGD)
        self.notes: list[Any] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.notes.append(["step", self.global_step])
        self.notes.append([float(p.grad.norm()) for p in self.parameters()])

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.notes.append("zero_grad")

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _accumulate() -> dict[Any, Run]:
    def train(stage: Any, **policy: Any) -> Run:
        notes = []
        for options in (
            {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
            {"accumulate_grad_batches": 5, "max_epochs": 2},
        ):
            run = _train(make_strategy(stage, **policy), **options)
            notes.append([run.params, run.losses, run.notes, run.metrics])
        scheduler = GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})
        run = _train(make_strategy(stage, **policy), callbacks=[scheduler], max_epochs=3)
        notes.append([run.params, run.losses, run.notes, run.metrics])
        return Run({}, notes=notes)

    runs = {"ddp": train("ddp")}
    for stage, options in POLICIES:
        runs[f"{stage} {options}"] = train(stage, **options)
    return runs


def _train(strategy: Any, **options: Any) -> Run:
    module = _CountsHooks()
    # Four batches per rank: windows of three and five leave some over at the end of the epoch.
    run = fit(module, strategy, data=(rows(16), rows(4, seed=1)), **options)
    run.notes = module.notes
    return run


@pytest.mark.parametrize("world", [2])
def test_accumulation_is_that_of_ddp(ranks: Pools, world: int) -> None:
    runs = ranks(world).run(_accumulate)
    assert len(runs[0]["ddp"].notes) == 3
    assert_like_ddp(runs)


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
