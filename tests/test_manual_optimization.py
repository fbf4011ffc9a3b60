"""Manual optimization: several optimizers, own accumulation, clipping and schedulers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_zero import ZeROStrategy
from tests.models import Block, Blocks
from tests.projects import WIDTH, Run, assert_like_ddp, fit, make_strategy, rows, under_all
from tests.ranks import Pools


class Adversaries(LightningModule):
    """A generator and a discriminator with optimizers of their own, and a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.generator = Blocks(2, WIDTH)
            self.discriminator = nn.Sequential(Block(WIDTH), Block(WIDTH), nn.Linear(WIDTH, 1))
            self.teacher = Blocks(1, WIDTH).requires_grad_(False)
        self.losses: list[float] = []
        self.notes: list[Any] = []

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def judge(self, x: Tensor, *, is_real: bool) -> Tensor:
        verdict = self.discriminator(x)
        return F.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, is_real))

    def note(self, *losses: Tensor) -> None:
        self.losses += [loss.item() for loss in losses]
        names = [name for name, p in self.named_parameters() if p.grad is not None]
        self.notes.append([names, [p.requires_grad for p in self.parameters()]])

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.02, betas=(0.5, 0.9)),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.05, momentum=0.9),
        ]


class Toggling(Adversaries):
    """The textbook GAN of Lightning's documentation."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        z, real = batch
        generate, discriminate = self.optimizers()

        self.toggle_optimizer(generate)
        fake = self(z)
        loss_g = self.judge(fake, is_real=True) + F.mse_loss(fake, self.teacher(z))
        self.log("loss_g", loss_g, sync_dist=True)
        self.manual_backward(loss_g)
        self.note(loss_g)
        generate.step()
        generate.zero_grad()
        self.untoggle_optimizer(generate)

        self.toggle_optimizer(discriminate)
        loss_d = self.judge(real, is_real=True) + self.judge(self(z).detach(), is_real=False)
        self.manual_backward(loss_d)
        self.note(loss_d)
        discriminate.step()
        discriminate.zero_grad()
        self.untoggle_optimizer(discriminate)


class Frequencies(Adversaries):
    """Two discriminator steps for each of the generator's, without toggling, and a schedule."""

    def configure_optimizers(self) -> Any:
        optimizers = super().configure_optimizers()
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in optimizers]
        return optimizers, schedulers

    def training_step(self, batch: Any, batch_idx: int) -> None:
        z, real = batch
        generate, discriminate = self.optimizers()
        loss_d = self.judge(real, is_real=True) + self.judge(self(z).detach(), is_real=False)
        discriminate.zero_grad()
        self.manual_backward(loss_d)
        self.clip_gradients(discriminate, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        discriminate.step()
        self.note(loss_d)
        if batch_idx % 2:
            loss_g = self.judge(self(z), is_real=True)
            generate.zero_grad()
            self.manual_backward(loss_g)
            self.clip_gradients(generate, gradient_clip_val=0.01, gradient_clip_algorithm="value")
            generate.step()
            self.note(loss_g)
            for scheduler in self.lr_schedulers():
                scheduler.step()
        self.notes.append(
            [group["lr"] for o in self.trainer.optimizers for group in o.param_groups]
        )


class Accumulating(Adversaries):
    """Sums the gradients of two batches by hand, and takes two losses to one step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        z, _ = batch
        generate, discriminate = self.optimizers()
        fake = self(z)
        self.manual_backward(F.mse_loss(fake, self.teacher(z)) / 2, retain_graph=True)
        loss = self.judge(fake, is_real=True) / 2
        self.manual_backward(loss)
        self.note(loss)
        if batch_idx % 2:
            for optimizer in (generate, discriminate):
                optimizer.step()
                optimizer.zero_grad()


class Toggled(Adversaries):
    """Accumulates with `toggled_optimizer(sync_grad=...)`, as Lightning's guide does."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        z, _ = batch
        generate, _ = self.optimizers()
        is_last = batch_idx % 2 == 1
        with generate.toggle_model(sync_grad=is_last):
            loss = F.mse_loss(self(z), self.teacher(z)) / 2
            self.manual_backward(loss)
            self.losses.append(loss.item())
            if is_last:
                generate.step()
                generate.zero_grad()


class Plain(Adversaries):
    """Calls `loss.backward()` and closures itself, which DDP does not average."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        z, _ = batch
        generate, _ = self.optimizers()

        def closure() -> Tensor:
            loss = F.mse_loss(self(z), self.teacher(z))
            generate.zero_grad()
            if isinstance(self.trainer.strategy, ZeROStrategy):
                loss.backward()
            else:
                self.manual_backward(loss)
            self.note(loss)
            return loss

        generate.step(closure=closure)


def _train(strategy: Any, case: type[Adversaries], **options: Any) -> Run:
    module = case()
    if strategy == "ddp":
        strategy = "ddp_find_unused_parameters_true"
    units = {"units": {Block}, **options} if isinstance(strategy, int) else {}
    run = fit(module, make_strategy(strategy, **units), data=(rows(32),))
    run.notes = module.notes
    return run


CASES = [Toggling, Frequencies, Accumulating, Toggled, Plain]


@pytest.mark.parametrize("case", CASES)
def test_manual_optimization_is_that_of_ddp(ranks: Pools, case: type[Adversaries]) -> None:
    runs = ranks(2).run(under_all, _train, case)
    assert len(runs[0]["ddp"].losses) >= 8
    assert_like_ddp(runs, ulps=64)


@pytest.mark.parametrize("case", [Toggling, Plain])
def test_all_weights_in_the_root(ranks: Pools, case: type[Adversaries]) -> None:
    """No unit's hooks tell when a backward pass begins."""
    runs = ranks(2).run(under_all, _train, case, units="auto")
    assert_like_ddp(runs, ulps=64)
