"""Loops of Fabric, which users write themselves."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch import LightningModule
from torch import Tensor, nn

import lightning_zero
from lightning_zero.fabric import ZeROStrategy
from tests.cases import FILES, STATES
from tests.cases.optimizers import Normalized
from tests.oracle.models import Block, Blocks, Of
from tests.oracle.play import Player, case
from tests.oracle.projects import Trace

WIDTH = 8


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def batch(number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, WIDTH, generator=generator)


def trace(losses: list[Any], *modules: nn.Module) -> Trace:
    """Losses, and weights that are gathered."""
    params = {}
    for number, module in enumerate(modules):
        with lightning_zero.gathered(module):
            for index, p in enumerate(module.parameters()):
                params[f"{number}.{index}"] = p.detach().clone()
    return Trace(params, losses=losses)


adamw = partial(torch.optim.AdamW, lr=0.01)
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
blocks = partial(Blocks, 2, WIDTH)


def begun(fabric: Fabric, optimizer: Any = adamw, make: Callable[[], Any] = blocks) -> Any:
    model = seeded(make)
    return fabric.setup(model, optimizer(model.parameters()))


def output(fabric: Fabric, model: Any, step: int) -> Tensor:
    return model(batch(step, fabric.global_rank)).square().mean()


def step_with(fabric: Fabric, optimizer: Any, loss: Tensor) -> float:
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def accumulate(fabric: Fabric) -> Trace:
    model, optimizer = begun(fabric)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for step in range(8):
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            fabric.backward(loss := output(fabric, model, step) / 2)
        if step % 2:
            losses += [loss.item(), float(fabric.clip_gradients(model, optimizer, max_norm=0.1))]
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return trace(losses, model)


NORMS = ("inf", -math.inf, 0, -1, 0.5, 1, "2", 3.5)


def clipped(fabric: Fabric) -> Trace:
    """By value, and by norms of every order that torch accepts."""
    model, optimizer = begun(fabric, sgd)
    norms = []
    for step, order in enumerate(NORMS):
        fabric.backward(output(fabric, model, step))
        fabric.clip_gradients(model, optimizer, clip_val=0.02)
        how: Any = {"max_norm": 1e-3, "norm_type": order}
        norms.append(float(fabric.clip_gradients(model, optimizer, **how)))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e-4, order)))  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    return trace(norms, model)


def adversaries(fabric: Fabric) -> Trace:
    """Two modules with an optimizer each; one is called twice for one backward."""
    with torch.random.fork_rng(devices=[]):
        generator = seeded(blocks)
        judge = seeded(lambda: nn.Sequential(Block(WIDTH), nn.Linear(WIDTH, 1)))
    first = torch.optim.Adam(generator.parameters(), lr=0.02, betas=(0.5, 0.9))
    second = torch.optim.SGD(judge.parameters(), lr=0.05, momentum=0.9)
    generator, judge = fabric.setup_module(generator), fabric.setup_module(judge)
    first, second = fabric.setup_optimizers(first, second)
    losses = []
    for step in range(3):
        fake = generator(batch(step, fabric.global_rank))
        second.zero_grad()
        real = judge(batch(50 + step, fabric.global_rank))
        loss = F.softplus(-real).mean() + F.softplus(judge(fake.detach())).mean()
        fabric.backward(loss)
        second.step()
        first.zero_grad()
        other = F.softplus(-judge(fake)).mean()
        fabric.backward(other)
        first.step()
        with torch.no_grad():
            score = judge(generator(batch(step, fabric.global_rank))).mean()
        losses += [loss.item(), other.item(), score.item()]
        # Functions that take parameters cover those of both, and plain ones.
        both = [*generator.parameters(), *judge.parameters()]
        listed = [both[0], *nn.Linear(1, 1).requires_grad_(False).parameters(), *both[1:]]
        losses += [float(lightning_zero.grad_norm(listed, p)) for p in (2.0, 1.0, math.inf)]
        with lightning_zero.gathered(listed), torch.no_grad():
            losses.append(float(sum(p.abs().sum() for p in both)))
    return trace(losses, generator, judge)


def own_backward(fabric: Fabric) -> Trace:
    """Calls `loss.backward()` itself, and in every other step a closure that backs up by Fabric.

    A copy of the model is an ordinary one.
    """
    model, optimizer = begun(fabric)
    losses = [output(fabric, copy.deepcopy(model), 0)]
    for step in range(4):

        def closure(step: int = step) -> Tensor:
            fabric.backward(loss := output(fabric, model, step))
            return loss

        if step % 2 == 0:
            output(fabric, model, step).backward()
        losses.append(optimizer.step(closure if step % 2 else None))
        optimizer.zero_grad()
    return trace([None if loss is None else float(loss) for loss in losses], model)


class Lit(LightningModule):
    """A LightningModule, whose step methods Fabric sends through the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = blocks(), nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(1))

    def training_step(self, x: Tensor, target: Tensor) -> Tensor:
        self.seen += x.sum()
        return self.scale * F.mse_loss(self.net(x), target)

    def other(self, x: Tensor, target: Tensor) -> Tensor:
        return self.training_step(x, target) * 2


def frozen_teacher(fabric: Fabric) -> Trace:
    """A LightningModule learns from a module that is not trained."""
    teacher = seeded(blocks).requires_grad_(False).eval()
    if isinstance(fabric.strategy, ZeROStrategy):  # DDP refuses it
        teacher = fabric.setup_module(teacher)
    model, optimizer = begun(fabric, make=Lit)
    model.mark_forward_method("other")
    losses = []
    for step in range(4):
        x = batch(step, fabric.global_rank)
        with torch.no_grad():
            target = teacher(x)
        method = model.training_step if step % 2 else model.other
        losses += [step_with(fabric, optimizer, method(x, target)), model.seen.item()]
    return trace(losses, model)


def within_gathered(fabric: Fabric) -> Trace:
    """Steps find what is shown, and leave the new weights shown."""
    model, optimizer = begun(fabric, sgd)
    losses: list[Any] = []
    for step in range(3):
        with lightning_zero.gathered(model):
            losses.append(step_with(fabric, optimizer, output(fabric, model, step)))
            losses.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    return trace(losses, model)


LOOPS: dict[Callable[[Fabric], Trace], dict[str, Any]] = {
    clipped: {"ulps": 64},
    within_gathered: {"stages": (1, 2, 3, 3), "precisions": ("32-true", "bf16-mixed")},
    adversaries: {},
    frozen_teacher: {},
    own_backward: {"worlds": (1, 2)},
    accumulate: {"ulps": 64, "precisions": ("32-true", "bf16-mixed", "64-true", "bf16-true")},
}
for loop, how in LOOPS.items():
    run = lambda play, loop=loop: loop(play.fabric(min_num_params=1, units="auto"))  # noqa: E731
    case("fabric", name=f"fabric_{loop.__name__}", loop=run, **{"ulps": 8, **how})


def branches() -> nn.Module:
    """Two units, of which each call uses one or both."""
    run = lambda m, x, which: sum(m.blocks[int(one)](x).sum() for one in which)  # noqa: E731
    return Of(run, blocks=[nn.Linear(WIDTH, WIDTH) for _ in range(2)])


# Microbatches by the blocks that they use; those with a minus are not sent.
ORDERS = ("-0 01", "-01 1", "-0 -1 1", "01 01", "01 -0 1", "-01 zero 1", "-0 -0")


@case(
    "fabric", worlds=(4,), stages=(2, 3), settings=({"shard": 2},), transports=("point to point",)
)
def copies_come_together_whatever_each_microbatch_uses(play: Player) -> Trace:
    """DDP leaves what the last microbatch does not use as it is; here the average is plain."""
    fabric, model, grads = play.fabric(units={nn.Linear}), seeded(branches), []
    model = model if play.is_ddp else fabric.setup_module(model)
    for order in ORDERS:
        model.zero_grad()
        for number, word in enumerate(order.split()):
            if word == "zero":
                model.zero_grad()
                continue
            is_unsent = word[0] == "-" and not play.is_ddp
            with fabric.no_backward_sync(model) if is_unsent else nullcontext():
                # Whole numbers, whose sums and averages have no rounding.
                x = torch.full((2, WIDTH), float(number + play.rank))
                fabric.backward(model(x, word.strip("-")))
        average = fabric.all_reduce if play.is_ddp else torch.clone
        found = [p.grad for p in model.parameters()]
        grads += [None if grad is None else average(grad).tolist() for grad in found]
    return Trace({}, notes=grads)


def together(optimizer_class: Any, play: Player) -> Trace:
    """Modules of like names have one optimizer; DDP and other stages go on from their file."""
    is_away = "offload_optimizer" in play.way.settings
    how = {"offload_path": str(play.folder)} if is_away else {}
    path = play.folder / "together.ckpt"

    def run(fabric: Fabric, first: int = 0) -> Trace:
        fabric.launch()
        encoder, decoder = seeded(blocks), seeded(lambda: Blocks(1, WIDTH))
        groups = [{"params": encoder.parameters()}, {"params": decoder.parameters(), "lr": 0.02}]
        optimizer = optimizer_class(groups, lr=0.01)
        encoder, decoder = fabric.setup_module(encoder), fabric.setup_module(decoder)
        optimizer = fabric.setup_optimizers(optimizer)
        state = {"encoder": encoder, "decoder": decoder, "optimizer": optimizer, "step": first}
        if first:
            rest = fabric.load(path, state)
            assert ([*rest], rest["rng"].tolist(), state["step"]) == (["rng"], [0, 1, 2], 2)
            assert state["encoder"] is encoder
        results = []
        for step in range(first, 4):
            if step == 2 and not first:
                fabric.save(path, {**state, "step": 2, "rng": torch.arange(3)})
            loss = decoder(encoder(batch(step, fabric.global_rank))).square().mean()
            fabric.backward(loss)
            norm = fabric.clip_gradients(encoder, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
            results += [loss.item(), float(norm)]
        return trace(results, encoder, decoder)

    made = run(play.fabric(**how))
    ours: Any = [ZeROStrategy(2), ZeROStrategy(3, units={Block})]
    others = [] if play.is_ddp else ["ddp", *ours]
    fabrics = [Fabric(accelerator="cpu", devices=2, strategy=each) for each in others]
    for fabric in (play.fabric(**how), *fabrics):
        resumed = run(fabric, first=2)
        assert resumed.losses == pytest.approx(made.losses[4:], rel=1e-5)
        torch.testing.assert_close(resumed.params, made.params, rtol=1e-6, atol=1e-7)
    made.saved = torch.load(path, weights_only=True)
    return made


for name, optimizer, how in (
    ("AdamW", torch.optim.AdamW, {}),
    ("Normalized", Normalized, {}),
    ("in_files", torch.optim.AdamW, {"stages": (2, 3), "settings": (STATES, FILES)}),
):  # fmt: skip
    case("fabric", name=f"fabric_together_{name}", loop=partial(together, optimizer), ulps=64, **how)  # fmt: skip


@case("fabric", precisions=("16-mixed",), stages=(1, 2, 3))
def overflowing(play: Player) -> Trace:
    """A scale so large that the first steps are skipped, on all ranks alike."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
    strategy: Any = play.way.strategy
    strategy = strategy if play.is_ddp else ZeROStrategy(strategy, units={Block})
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=plugins)
    fabric.launch()
    model, optimizer = begun(fabric, partial(torch.optim.SGD, lr=0.1))
    scales = []
    for step in range(30):
        fabric.backward(output(fabric, model, step))
        if step % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        scales.append(fabric.strategy.precision.state_dict()["scale"])
    assert len(set(scales)) > 3
    return trace(scales, model)


# -- checkpoints -----------------------------------------------------------------------------------


@case("fabric", ulps=8)
def a_checkpoint_is_loaded_in_part(play: Player) -> Trace:
    """Filters and strictness are Fabric's; bare state dicts are loaded; what does not fit changes nothing."""
    fabric = play.fabric()
    model, optimizer = begun(fabric)
    state, path = {"model": model, "optimizer": optimizer}, play.folder / "some.ckpt"
    state["copy"] = copy.deepcopy(model)  # which is ordinary, and belongs to no rank
    fabric.save(path, state, filter={"model": lambda name, _: "weight" in name})
    wanted = {name for name, _ in blocks().named_parameters() if "weight" in name}
    assert set(torch.load(path, weights_only=True)["model"]) == wanted
    with pytest.raises(RuntimeError, match="Missing key"):
        fabric.load(path, state)
    fabric.load(path, state, strict=False)
    before = trace([], model)
    if not play.is_ddp:
        _, other = begun(fabric, make=lambda: Blocks(1, WIDTH))
        fabric.save(play.folder / "whole.ckpt", state)
        with pytest.raises(ValueError, match="Cannot load 'optimizer'"):
            fabric.load(play.folder / "whole.ckpt", {"model": model, "optimizer": other})
        with pytest.raises(KeyError, match="'other'"):
            fabric.load(path, {"model": model, "other": 1})
        torch.testing.assert_close(trace([], model).params, before.params, rtol=0, atol=0)
        (play.folder / "whole.ckpt").unlink(missing_ok=True) if play.rank == 0 else None
    raw = play.folder / "raw.pt"
    if play.rank == 0:
        torch.save({k: torch.ones_like(v) for k, v in blocks().state_dict().items()}, raw)
    fabric.barrier()
    fabric.load_raw(raw, model)
    assert torch.load(path)["copy"].keys() == state["copy"].state_dict().keys()
    return trace([], model, state["copy"])
