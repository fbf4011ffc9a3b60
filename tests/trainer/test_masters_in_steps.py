"""In mixed precision, code without gradients sees and changes fp32 weights wherever it runs.

DDP's parameters are fp32 at every moment, and only autocast casts. The uses below change weights by
less than a half-precision weight can show, in a step and between its forward and backward.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero import ZeROPrecision, ZeROStrategy
from tests.oracle.models import Block, Blocks
from tests.oracle.projects import WIDTH, Regression, Run, assert_like_ddp, fit, rows, under_all
from tests.oracle.ranks import Pools, RankError


class Taught(Regression):
    """A student with a teacher that follows it slowly."""

    def __init__(self) -> None:
        super().__init__(lr=0.01, optimizer=torch.optim.SGD)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for ours, theirs in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            assert ours.dtype == theirs.dtype == torch.float32
            ours.mul_(0.999).add_(theirs, alpha=0.001)

    def taught_loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0])
        self.out = self.net(batch[0])
        return F.mse_loss(self.head(self.out), batch[1]) + F.mse_loss(self.out, target)


class FollowsInStep(Taught):
    """BYOL, DINO, MoCo: the teacher follows before it is called, or between two calls."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2:
            self.follow()
        loss = self.taught_loss(batch)
        self.follow()
        return loss + F.mse_loss(self.out, self.teacher(batch[0]).detach())


class FollowsByData(Taught):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for ours, theirs in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            ours.data = ours.data * 0.999 + theirs.data * 0.001
        return self.taught_loss(batch)


class FollowsBeforeZeroGrad(Taught):
    """Lightning runs this hook between forward and backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.taught_loss(batch)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.follow()


class Averages(Taught):
    """An average of one's own, in fp32, is no module."""

    def on_fit_start(self) -> None:
        self.average = [p.detach().clone() for p in self.net.parameters()]

    @torch.no_grad()
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for mean, parameter in zip(self.average, self.net.parameters(), strict=True):
            mean.lerp_(parameter, 0.01)
        torch._foreach_lerp_(self.average, [*self.net.parameters()], 0.01)
        with torch.enable_grad():
            return self.loss(batch)

    def on_train_end(self) -> None:
        self.notes = [mean.clone() for mean in self.average]


class Changes(Regression):
    """Weights that autocast casts are changed between the forward and the end of the backward."""

    def __init__(self) -> None:
        super().__init__(lr=0.01, optimizer=torch.optim.SGD)

    @torch.no_grad()
    def decay(self) -> None:
        for parameter in self.parameters():
            if parameter.ndim > 1:
                parameter.mul_(1 - 1e-4)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.decay()

    def on_before_backward(self, loss: Tensor) -> None:
        self.decay()

    def on_after_backward(self) -> None:
        self.decay()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.decay()


class ByHand(Regression):
    def __init__(self) -> None:
        super().__init__(lr=0.01, optimizer=torch.optim.SGD)
        self.automatic_optimization = False

    def backward_of(self, batch: Any) -> None:
        self.zero_grad()
        self.manual_backward(self.loss(batch))


class Sharpness(ByHand):
    """SAM: up to the worst neighbour, and down by the gradient that is there."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.backward_of(batch)
        with torch.no_grad():
            grads = [p.grad for p in self.parameters()]
            scale = 0.001 / (torch.stack([g.norm() for g in grads]).norm() + 1e-12)
            steps = [g.clone() * scale for g in grads]
            torch._foreach_add_([*self.parameters()], steps)
        self.backward_of(batch)
        with torch.no_grad():
            for parameter, step in zip(self.parameters(), steps, strict=True):
                parameter.sub_(step)
        optimizer.step()


class OwnStep(ByHand):
    @torch.no_grad()
    def training_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            self.backward_of(batch)
        for parameter in self.parameters():
            parameter -= 1e-4 * parameter.grad


class OwnOptimizer(ByHand):
    """An optimizer's own method, which is no `step`, and `p.data` in grad mode."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.backward_of(batch)
        for parameter in self.optimizers().param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=-1e-4)


class Adapted(Regression):
    """Adapters are merged for each validation step, and unmerged."""

    def __init__(self) -> None:
        super().__init__(lr=0.01, optimizer=torch.optim.SGD)
        torch.manual_seed(1)
        self.down = nn.Parameter(0.01 * torch.randn(1, WIDTH))
        self.up = nn.Parameter(0.01 * torch.randn(WIDTH, 1))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        weights = [self.head.weight, *(block.linear.weight for block in self.net.blocks)]
        for weight in weights:
            weight.data += self.up[: weight.shape[0]].float() * self.down[:, : weight.shape[1]]
        super().validation_step(batch, batch_idx)
        for weight in weights:
            weight.data -= self.up[: weight.shape[0]].float() * self.down[:, : weight.shape[1]]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.up @ self.down


USES: list[type[Regression]] = [
    FollowsInStep, FollowsByData, FollowsBeforeZeroGrad, Averages, Changes, Sharpness, OwnStep,
    OwnOptimizer, Adapted,
]  # fmt: skip


def _use(strategy: Any, use: type[Regression], precision: str) -> Run:
    module = use()
    options: dict[str, Any] = {"max_epochs": 2, "data": (rows(), rows(4, seed=1))}
    if strategy != "ddp" and precision == "16-mixed":
        plugin = ZeROPrecision(precision)
        strategy = ZeROStrategy(strategy, units={Block}, precision_plugin=plugin)
    else:
        options["precision"] = precision
    run = fit(module, strategy, **options)
    run.notes = getattr(module, "notes", None)
    return run


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_small_changes_last_as_under_ddp(ranks: Pools, use: type[Regression]) -> None:
    runs = ranks(2).run(under_all, _use, use, "bf16-mixed", stages=(1, 2, 3))
    assert_like_ddp(runs, ulps=64)


def _follow_in_half(stage: int) -> list[float]:
    """The teacher's greatest distance from what it follows to, in fp16 and with fp32 weights."""
    torch.manual_seed(0)
    found = []
    for precision in ("16-mixed", "32-true"):
        run = _use(stage, FollowsBeforeZeroGrad, precision)
        start = FollowsBeforeZeroGrad().teacher.state_dict()
        moved = [(run.params[f"teacher.{n}"] - v).norm() for n, v in start.items()]
        found.append(float(torch.stack(moved).norm()))
    return found


def test_small_changes_last_in_half_precision_with_a_loss_scale(ranks: Pools) -> None:
    for stage in (1, 2, 3):
        for half, full in ranks(2).run(_follow_in_half, stage):
            assert half > 0.5 * full > 0  # the first steps may be skipped


class ChangedByItself(Block):
    """A module changes its own weight while it runs, in the precision in which it runs."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(1 - 1e-4)
        return super().forward(x)


class Forbidden(Regression):
    def __init__(self) -> None:
        super().__init__(lr=0.01, optimizer=torch.optim.SGD)
        self.net = Blocks(2, WIDTH)
        self.net.blocks[1] = ChangedByItself(WIDTH)


def _change_within(stage: int) -> None:
    fit(Forbidden(), ZeROStrategy(stage, units={Block, ChangedByItself}), precision="bf16-mixed")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_change_that_would_be_lost_is_refused(ranks: Pools, stage: int) -> None:
    with pytest.raises(RankError, match=r"'net.blocks.1.linear.weight' .*cast_weights='none'"):
        ranks(2).run(_change_within, stage)
