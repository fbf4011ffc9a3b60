"""Manual optimization: several optimizers, own accumulation, clipping and schedulers."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_zero import ZeROStrategy
from tests.oracle.models import Block, Blocks
from tests.oracle.projects import WIDTH, Run, assert_like_ddp, fit, make_strategy, rows, under_all
from tests.oracle.ranks import Pools


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


class ToggledLate(Adversaries):
    """Freezes the other network between forward and backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        z, _ = batch
        generate, _ = self.optimizers()
        loss = self.judge(self(z), is_real=True)
        self.toggle_optimizer(generate)
        self.manual_backward(loss)
        self.note(loss)
        generate.step()
        generate.zero_grad()
        self.untoggle_optimizer(generate)


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


def _drop_in_place(module: Adversaries, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def _drop_of_module(module: Adversaries, optimizer: Any) -> None:
    module.zero_grad()


def _drop_of_optimizer(module: Adversaries, optimizer: Any) -> None:
    optimizer.zero_grad()


def _drop_some(module: Adversaries, optimizer: Any) -> None:
    module.generator.blocks[0].linear.weight.grad = None
    module.generator.stem.bias.grad = None


def _replace(module: Adversaries, optimizer: Any) -> None:
    weight = module.generator.blocks[1].linear.weight
    weight.grad = weight.grad * 0.5
    module.generator.stem.weight.grad = torch.ones_like(module.generator.stem.weight)


def _change(module: Adversaries, optimizer: Any) -> None:
    for parameter in module.generator.parameters():
        parameter.grad.mul_(0.5)
    module.generator.stem.weight.grad[0] = 0.25
    torch.nn.utils.clip_grad_norm_(module.generator.parameters(), 0.05)


def _keep(module: Adversaries, optimizer: Any) -> None:
    pass


class Unsent(Adversaries):
    """Drops, replaces and changes gradients between microbatches that are not sent."""

    WAYS = (
        _keep,
        _drop_of_optimizer,
        _drop_in_place,
        _drop_of_module,
        _drop_some,
        _replace,
        _change,
        _drop_of_optimizer,
    )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        z, _ = batch
        generate, discriminate = self.optimizers()
        way = self.WAYS[batch_idx % len(self.WAYS)]
        if batch_idx >= len(self.WAYS):
            # Averaged gradients of before, to which the unsent ones add.
            self.backward_of(z.flip(0))
        for _ in range(2):
            with generate.toggle_model(sync_grad=False):
                self.backward_of(2 * z)
        self.note_local()
        way(self, generate)
        self.note_local()
        if batch_idx % 3:
            with generate.toggle_model(sync_grad=False):
                self.backward_of(3 * z)
            self.note_local()
        with generate.toggle_model(sync_grad=True):
            self.backward_of(z)
        self.notes.append([float(p.grad.norm()) for p in self.generator.parameters()])
        generate.step()
        # Whatever way the gradients went out, the parameters show none.
        self.zero_grad()
        discriminate.zero_grad()

    def backward_of(self, z: Tensor) -> None:
        loss = F.mse_loss(self(z), self.teacher(z))
        self.manual_backward(loss)
        self.losses.append(loss.item())

    def note_local(self) -> None:
        """Under DDP this rank's own gradients, which it has not sent."""
        grads = [p.grad for p in self.generator.parameters() if p.grad is not None]
        self.notes.append([float(grad.norm()) for grad in grads if grad.any()])
        self.notes.append([grad.clone() for grad in grads[:1] if grad.any()])

    def configure_optimizers(self) -> Any:
        optimizers = super().configure_optimizers()
        optimizers[0] = torch.optim.SGD(self.generator.parameters(), lr=0.02)
        return optimizers


def _train(strategy: Any, case: type[Adversaries], **options: Any) -> Run:
    module = case()
    if strategy == "ddp":
        strategy = "ddp_find_unused_parameters_true"
    units = {"units": {Block}, **options} if isinstance(strategy, int) else {}
    run = fit(module, make_strategy(strategy, **units), data=(rows(32),))
    run.notes = module.notes
    return run


CASES = [Toggling, Frequencies, Accumulating, Toggled, ToggledLate, Plain]


@pytest.mark.parametrize(("case", "stage"), list(zip(CASES, cycle((1, 2)), strict=False)))
def test_manual_optimization_is_that_of_ddp(
    ranks: Pools, case: type[Adversaries], stage: int
) -> None:
    runs = ranks(2).run(under_all, _train, case, stages=(stage, 3))
    assert len(runs[0]["ddp"].losses) >= 8
    assert_like_ddp(runs, ulps=64)


@pytest.mark.parametrize(("case", "stage"), [(Toggling, 2), (Plain, 1)])
def test_all_weights_in_the_root(ranks: Pools, case: type[Adversaries], stage: int) -> None:
    """No unit's hooks tell when a backward pass begins."""
    runs = ranks(2).run(under_all, _train, case, units="auto", stages=(stage, 3))
    assert_like_ddp(runs, ulps=64)


def _unsent(strategy: Any, accumulate: str, precision: str = "32-true") -> Run:
    module = Unsent()
    ours = {"units": {Block}, "accumulate": accumulate} if isinstance(strategy, int) else {}
    run = fit(module, make_strategy(strategy, **ours), precision=precision, data=(rows(64),))
    run.notes = module.notes
    return run


def _unsent_under_all() -> dict[Any, Run]:
    return {
        "ddp": _unsent("ddp_find_unused_parameters_true", ""),
        **{stage: _unsent(stage, "local") for stage in (1, 2, 3)},
    }


def test_unsent_gradients_are_those_of_ddp(ranks: Pools) -> None:
    runs = ranks(2).run(_unsent_under_all)
    assert len(runs[0]["ddp"].losses) > 16 * 3
    assert_like_ddp(runs, ulps=64)


class StepsUnsent(Adversaries):
    """Forgets to send what it steps with."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generate, _ = self.optimizers()
        with generate.toggle_model(sync_grad=False):
            self.manual_backward(self(batch[0]).sum())
        generate.step()


def _step_unsent(stage: int) -> str:
    with pytest.raises(RuntimeError) as caught:
        fit(StepsUnsent(), make_strategy(stage, accumulate="local"))
    return str(caught.value)


def test_unsent_gradients_are_not_stepped_with(ranks: Pools) -> None:
    for message in ranks(2).run(_step_unsent, 2):
        assert "'generator.stem.weight' is this rank's own" in message
        assert "sync_grad=True" in message
