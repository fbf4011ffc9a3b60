"""Buffers as DDP treats them: broadcast before forward, synchronized batch norm, saved and back."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from tests.oracle.projects import (
    WIDTH,
    Regression,
    Run,
    assert_like_ddp,
    fit,
    make_strategy,
    rows,
)
from tests.oracle.ranks import Pools


class WithBuffers(Regression):
    """Batch norms in units and at the root, and a buffer that counts its own way on each rank."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__(lr=0.05, optimizer=torch.optim.SGD)
        for block in self.net.blocks:
            block.norm = nn.BatchNorm1d(WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros(2), persistent=False)
        self.register_buffer("number", torch.tensor(0))
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append([float(self.count[0]), int(self.number)])
        if self.training:
            self.count += self.global_rank + 1
            self.number += self.global_rank + 1
        return self.norm(super().forward(x))


def _train(broadcast_buffers: bool = True, **options: Any) -> dict[Any, Run]:
    def train(stage: Any) -> Run:
        strategy = make_strategy(stage, broadcast_buffers=broadcast_buffers)
        if stage == "ddp":
            strategy = DDPStrategy(**({} if broadcast_buffers else {"broadcast_buffers": False}))
        module = WithBuffers()
        data = rows(64, batch_size=8), rows(16, batch_size=8, seed=1)
        with warnings.catch_warnings():
            # torch 2.13 deprecates the argument's name.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            run = fit(module, strategy, max_epochs=2, data=data, **options)
        run.notes = module.seen
        return run

    return {stage: train(stage) for stage in ("ddp", 1, 2, 3)}


@pytest.mark.parametrize("is_on", [True, False])
def test_buffers_are_those_of_ddp(ranks: Pools, is_on: bool) -> None:
    runs = ranks(2).run(_train, is_on)
    assert (runs[0]["ddp"].notes == runs[1]["ddp"].notes) == is_on
    assert_like_ddp(runs, ulps=256)


def test_buffers_while_accumulating(ranks: Pools) -> None:
    assert_like_ddp(ranks(2).run(_train, accumulate_grad_batches=2), ulps=256)


class Drifting(WithBuffers):
    """A buffer that each rank changes its own way in every forward, also in those of a hook."""

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.global_rank + 1
        return super().forward(x + 0.01 * self.count[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (1, 2):
            with torch.no_grad():
                self(batch[0])


class Manual(Drifting):
    """Sends gradients or not, within a step and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=batch_idx != 0):
            self.manual_backward(self.loss(batch))
        if batch_idx:
            optimizer.step()
            optimizer.zero_grad()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 2:
            self.manual_backward(self.loss(batch))
            self.zero_grad()


def _drift(case: type[WithBuffers], **options: Any) -> dict[Any, Run]:
    def train(strategy: Any) -> Run:
        module = case()
        data = rows(64, batch_size=8), rows(16, batch_size=4, seed=1)
        run = fit(module, strategy, max_epochs=2, data=data, val_check_interval=2, **options)
        run.notes = module.seen
        return run

    return {name: train(name) for name in ("ddp", 1, 2, 3)}


@pytest.mark.parametrize(
    ("case", "options"),
    [(Drifting, {}), (Drifting, {"accumulate_grad_batches": 2}), (Manual, {})],
)
def test_buffers_are_sent_before_the_forwards_of_ddp(
    ranks: Pools, case: type[WithBuffers], options: Any
) -> None:
    """Validations come between batches, and change buffers too."""
    runs = ranks(2).run(_drift, case, **options)
    assert_like_ddp(runs, ulps=256)
    assert runs[0]["ddp"].notes != runs[1]["ddp"].notes


class _Spare(Regression):
    """Has a batch norm that is not called: torch synchronizes none on CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.BatchNorm1d(WIDTH)
        self.kinds: list[type] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kinds.append(type(self.spare))


def _synchronize(stage: int) -> None:
    module = _Spare()
    weight, before = module.spare.weight, module.spare.weight.detach().clone()
    fit(module, stage, sync_batchnorm=True)
    assert set(module.kinds) == {nn.SyncBatchNorm}
    assert type(module.spare).__name__ == "_BatchNormXd"  # Lightning's own way back
    assert torch.equal(module.spare.weight, before)
    assert module.spare.weight is weight
    assert module.spare.num_batches_tracked == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_batch_norms_are_converted_and_back(ranks: Pools, stage: int) -> None:
    ranks(2).run(_synchronize, stage)
