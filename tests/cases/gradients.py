"""Gradients: what hooks see and do, clipping, precisions, accumulation, manual optimization."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import grad_norm as lightning_grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import SGD

from lightning_zero import ZeROStrategy, full_grad, gathered, grad_norm
from tests.cases import scheduled, user
from tests.cases.optimizers import Dropping
from tests.oracle.models import Block, Blocks, chained
from tests.oracle.play import UNUSED, case, widen
from tests.oracle.projects import WIDTH, Noted, Regression, rows

STEPS: dict[str, Any] = {"max_steps": 5, "max_epochs": -1}


def norms(m: Any, *_: Any) -> Any:
    grads = [p.grad for p in m.parameters()]
    return [grad is None for grad in grads], [float(g.norm()) for g in grads if g is not None]


def measured(m: Any, *_: Any) -> Any:
    grads = [p.grad for p in m.parameters() if p.grad is not None]
    return [
        *(float(get_total_norm(grads, order)) for order in (1, 2, 3.5, float("inf"))),
        *(float(norm) for norm in torch._foreach_norm(grads, 1)),
        *(float(grad_norm(m)), float(grads[0].norm("fro")), float(grads[0].norm(0))),
        *(grad.norm(dim=-1).tolist() for grad in grads),
    ]


def read(m: Any, *_: Any) -> Any:
    """Read gradients in every way that gathers them."""
    first, *_, last = [p.grad for p in m.parameters()]
    return [
        (first + 1).tolist(),
        first.cpu().clone().tolist(),
        first.data.numpy().tolist(),
        copy.deepcopy(first).tolist(),
        pickle.loads(pickle.dumps(first)).tolist(),
        first[1].sum().item(),
        (last.detach() * last).sum().item(),
        torch.histc(first.float(), bins=5).tolist(),
        *(last.mean().item(), last.shape, torch.isfinite(last).all().item()),
        full_grad(next(m.parameters())).tolist(),
        torch.cat([p.grad.flatten() for p in m.parameters()]).tolist(),
    ]


def clipped(m: Any, *_: Any) -> Any:
    first = float(clip_grad_norm_(m.parameters(), 0.1))
    second = float(clip_grad_norm_(m.parameters(), 0.05, norm_type=1))
    clip_grad_value_(m.parameters(), 0.02)
    clip_grad_value_([m.head.weight], 0.01, foreach=True)
    return first, second, norms(m)


def operated(m: Any, *_: Any) -> Any:
    """Do gradient surgery of every kind."""
    weights = [block.linear.weight for block in m.net.blocks]
    mask = torch.arange(36.0).view(6, 6) % 2
    weights[0].grad *= mask
    weights[0].grad.add_(weights[1].grad, alpha=0.5).mul_(torch.tensor(0.5))
    weights[1].grad.data.clamp_(-0.01, 0.02)
    weights[1].grad.data = weights[1].grad.data * mask + weights[0].grad.data
    weights[2].grad.data = weights[1].grad.data.clone()
    weights[2].grad[2:4] = 0.0
    weights[2].grad[weights[2].grad > 0.1] = 0.1
    rows = weights[2].grad[1:3]
    weights[2].grad.mul_(2.0)
    rows.add_(1.0)
    weights[2].grad.data.flatten()[3:][1:] += 1.0
    weights[2].grad.numpy()[0] *= 3.0
    weights[0].grad.t().tril_().sub_(0.1)
    assert (rows == weights[2].grad[1:3]).all()
    weights[0].grad.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(1))
    weights[1].grad = mine = weights[1].grad.clone()
    mine.mul_(0.5)
    with gathered(m.head):
        m.head.weight.grad = m.head.weight.grad.clone() + m.head.weight.detach()
    m.head.bias.grad = None
    m.net.stem.bias.grad.zero_()
    m.net.stem.weight.grad.copy_(mask)
    others = [weight.grad for weight in weights]
    torch._foreach_mul_(others, 0.5)
    torch._foreach_add_(others, [weight.grad.clone() for weight in reversed(weights)])
    return norms(m)


def kept(m: Any, optimizer: Any) -> Any:
    """Keep gradients when their parameters have others, or none, and put some back."""
    former, m.kept = getattr(m, "kept", ()), tuple(p.grad for p in m.parameters())
    pairs = zip(m.kept, former, strict=bool(former))
    notes = [float((now - then).norm()) for now, then in pairs]
    views = [grad.detach() for grad in m.kept]
    bias = m.head.bias
    bias.grad = bias.grad * 3
    notes.append((bias.grad - views[-1]).tolist())
    for parameter in m.net.parameters():
        parameter.grad = parameter.grad.data
    optimizer.zero_grad()
    for parameter, grad in zip(m.parameters(), views, strict=True):
        parameter.grad = grad if parameter.ndim > 1 else grad.mul_(2.0) * 0.5
    return notes


def dropped(m: Any, *_: Any) -> Any:
    """Drop the gradients of every other step, by one of three ways."""
    if m.global_step % 4 == 1:
        m.zero_grad()
    if m.global_step % 4 == 2:
        for parameter in m.head.parameters():
            parameter.grad = None
    if m.global_step % 4 == 3:
        m.net.zero_grad(set_to_none=False)
    return norms(m)


for use in (measured, read, clipped, operated, kept, dropped):
    moments = {"on_before_optimizer_step": use}
    if use is measured:
        moments |= {"on_after_backward": lambda m: dict(lightning_grad_norm(m, 2)),
                    "on_before_zero_grad": lambda *_: "before zero_grad"}  # fmt: skip
    case("gradients in hooks", Noted, use.__name__, moments=moments, **STEPS, ulps=16)


class Hooked(Noted):
    """Changes gradients as autograd finishes them, by hooks that come before and amid training."""

    def __init__(self) -> None:
        super().__init__()
        self.head.bias.register_post_accumulate_grad_hook(self.double)

    def double(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.notes.append(tuple(parameter.grad.shape))
        parameter.grad.mul_(2.0)

    def on_fit_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.double)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            weight = self.net.blocks[1].linear.weight
            self.handle = weight.register_post_accumulate_grad_hook(self.double)
        if batch_idx == 2:
            self.handle.remove()
        return loss


case("gradients in hooks", Hooked, **STEPS, ulps=16)


def leaving_out(number: int, m: Any, x: Tensor) -> Tensor:
    used = [block for index, block in enumerate(m.net.blocks) if index != number]
    return m.head(chained(used, m.net.stem(x)))


def taking_turns(m: Any, x: Tensor) -> Tensor:
    """Each rank leaves out one block of two, the other one in the next microbatch."""
    m.turn = getattr(m, "turn", m.global_rank) + 1
    return leaving_out(m.turn % 2, m, x)


# A block has no gradient in every other step, and then none is seen.
Unused = user(forward=lambda m, x: leaving_out(-1 if m.global_step % 2 else 1, m, x))
case("gradients in hooks", Unused, "Unused", **STEPS, ddp=UNUSED, worlds=(3,), stages=(1, 2, 3),
     moments={"on_after_backward": lambda m: (norms(m), dict(lightning_grad_norm(m, 2)))})  # fmt: skip
case("gradients in hooks", user(forward=taking_turns), "TakesTurns", accumulate_grad_batches=2, max_steps=2, ulps=64,
     ddp=UNUSED, stages=(1, 2))  # fmt: skip


def lent(m: Any, *_: Any) -> Any:
    """Lend a gradient to another parameter and to a graph, which are used after the step."""
    former = getattr(m, "lent", None)
    other, scale = nn.Parameter(torch.zeros(WIDTH)), torch.ones(WIDTH, requires_grad=True)
    other.grad = m.head.bias.grad
    m.lent = other, scale, (scale * m.head.bias.grad).sum()
    if former is None:
        return None
    other, scale, loss = former
    loss.backward()
    return other.grad.tolist(), scale.grad.tolist()


class DropsInStep(SGD):
    """Drops the gradients of what it holds, without a call of ``zero_grad``."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None
        return loss


def penalized(m: Any, *_: Any) -> Any:
    """Go backward through gathered weights between steps."""
    m.zero_grad()
    with gathered(m):
        torch.stack([p.square().sum() for p in m.parameters()]).sum().backward()
    return [p.grad.clone() for p in m.parameters()]


case("gradients in hooks", Noted, "penalized_gathered", **STEPS, stages=(1, 2, 3), moments={"on_train_batch_end": penalized})  # fmt: skip
for use in (lent, kept):
    case("gradients in hooks", lambda: Noted(0.05, Dropping), f"{use.__name__}_and_dropped_in_steps", **STEPS, ulps=16,
         moments={"on_before_optimizer_step": use})  # fmt: skip
case("gradients in hooks", lambda: Unused(0.1, DropsInStep), "dropped_one_by_one_in_steps", **STEPS, ddp=UNUSED, stages=(1, 2, 3),
     moments={"on_after_backward": norms})  # fmt: skip


class Overrides(Noted):
    """Overrides every hook around a step and notes when it is called and what it sees."""

    steps_later = False

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:  # fmt: skip
        """Warm the rate up, as Lightning's documentation shows; run the closure within or before."""
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.global_step + 1) / 3)
        self.notes.append(["step", epoch, batch_idx])
        if self.steps_later:
            loss = closure()
            self.notes.append(["ran", None if loss is None else loss.item()])
            optimizer.step(closure=lambda: loss)
        else:
            optimizer.step(closure=closure)
        self.notes.append("stepped")

    def configure_optimizers(self) -> Any:
        return scheduled(super().configure_optimizers())


def _noting(name: str) -> Callable[..., Any]:
    own = getattr(LightningModule, name)

    def hook(self: Any, *given: Any, **named: Any) -> None:
        self.notes.append([name, self.global_step])
        own(self, *given, **named)
        if name in ("configure_gradient_clipping", "optimizer_zero_grad"):
            self.notes.append(norms(self))

    return hook


for hook in ("backward", "on_before_backward", "on_after_backward", "configure_gradient_clipping", "on_before_optimizer_step",
             "optimizer_zero_grad", "on_before_zero_grad", "lr_scheduler_step"):  # fmt: skip
    setattr(Overrides, hook, _noting(hook))


def whole(m: Any, optimizer: Any) -> Any:
    with gathered(m):
        return len(optimizer.param_groups), [
            (float(p.norm()), torch.histc(p.detach(), bins=2, min=-2, max=3.5), p.detach().clone())
            for p in m.parameters()
        ]


ONCE: dict[str, Any] = {"max_epochs": 2, "gradient_clip_val": 0.2, "data": lambda: (rows(12),),
                        "moments": {"on_before_optimizer_step": whole}, "ulps": 16}  # fmt: skip
case("gradients in hooks", Overrides, **ONCE)
case("gradients in hooks", user(Overrides, steps_later=True), "StepsLater", **ONCE, accumulate_grad_batches=2)  # fmt: skip


def states_of_nothing(m: Any) -> Any:
    (optimizer,) = m.trainer.optimizers
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer.state[m.none], optimizer.state_dict()["state"]


# A parameter without elements has states in the optimizer and on disk.
EMPTY = user(
    Regression,
    build=lambda m: m.register_parameter("none", nn.Parameter(torch.zeros(0, 4))),
    forward=lambda m, x: Regression.forward(m, x) + m.none.sum(),
)
case("gradients in hooks", EMPTY, "without_elements", max_epochs=2, save_at=1, readers=("own",), stages=(2, 3),
     moments={"on_train_end": states_of_nothing})  # fmt: skip


# -- precisions and clipping -----------------------------------------------------------------------


def halve(m: Any, *_: Any) -> Any:
    """Note norms and dtypes of the gradients, and replace them."""
    norms = [float(p.grad.norm()) for p in m.parameters() if p.grad is not None]
    dtypes = []
    for parameter in m.parameters() if hasattr(Tensor, "grad_dtype") else ():
        dtypes.append(str(parameter.grad.dtype))
        parameter.grad = parameter.grad * 0.5
    return [norm if norm < 1e30 else "inf" for norm in norms], dtypes


def scale_of(m: Any, *_: Any) -> Any:
    plugin = m.trainer.precision_plugin
    scaler = getattr(plugin, "scaler", None)
    return None if scaler is None else [plugin.precision, plugin.device, scaler.get_scale()]


SCALED = {"on_before_optimizer_step": halve, "on_train_batch_end": scale_of}
for precisions in (("64-true", "bf16-mixed", "16-mixed"), ("32-true", "bf16-true", "16-true")):
    case("precision", partial(Noted, 0.05), f"scaled_{precisions[0]}", **STEPS, precisions=precisions, stages=(1, 2, 3), ulps=16,
         moments=SCALED)  # fmt: skip


def overflow(m: Any, batch: Any, batch_idx: int) -> Tensor:
    """In the second and third step one element of one rank's gradient is infinite."""
    loss = Noted.training_step(m, batch, batch_idx)
    is_here = batch_idx in (1, 2) and m.global_rank == 1
    return loss + m.head.bias[5] * float("inf") if is_here else loss


for clip in ({}, {"gradient_clip_val": 0.5}):
    case("precision", user(training_step=overflow), f"overflows_{len(clip)}", **STEPS, **clip, precisions=("16-mixed",),
         stages=(1, 2, 3), moments={"on_train_batch_end": scale_of})  # fmt: skip


def clip_thrice(m: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:  # fmt: skip
    """Clip the head by value, then everything as told, then what precision calls main parameters."""
    assert gradient_clip_val == 0.05
    clip_grad_value_(m.head.parameters(), 0.01)
    m.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
    m.notes.append(norms(m))
    parameters = list(m.trainer.precision_plugin.main_params(optimizer))
    m.notes += [float(clip_grad_norm_(parameters, 0.04)), norms(m)]


CLIPS: list[tuple[Any, dict[str, Any]]] = [
    (Noted, {"gradient_clip_val": 0.1}),
    (Noted, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    (Noted, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    (user(configure_gradient_clipping=clip_thrice), {"gradient_clip_val": 0.05}),
]
for number, (module, options) in enumerate(CLIPS):
    case("clipping", module, f"clip_{number}", **options, max_steps=2, precisions=("32-true", "16-mixed"), ulps=16,
         stages=(3, 1 + number % 2), moments=SCALED)  # fmt: skip


def sent_in_two_bytes(m: Any, *_: Any) -> None:
    is_ours = isinstance(m.trainer.strategy, ZeROStrategy)
    traffic = m.trainer.strategy.traffic if is_ours else {}
    assert all(x.bytes == 2 * x.elements for (_, verb), x in traffic.items() if verb == "reduce")


for dtype in (torch.float16, torch.bfloat16):
    case("precision", Noted, f"reduced_in_{dtype}", max_steps=3, stages=(1, 2, 3), settings=({"reduce_dtype": dtype},),
         dtype=dtype, ulps=2, moments={"on_train_end": sent_in_two_bytes})  # fmt: skip


# -- accumulation ----------------------------------------------------------------------------------

COUNTED = {
    "on_before_optimizer_step": lambda m, *_: [m.global_step, *norms(m)],
    "on_before_zero_grad": lambda *_: "zero_grad",
}
# Four batches per rank: windows of three and five leave some over at the end of the epoch.
WINDOWS: list[dict[str, Any]] = [
    {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
    {"accumulate_grad_batches": 5, "max_epochs": 2},
    {"callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})], "max_epochs": 3},
]
LOCAL = {"accumulate": "local"}
POLICIES: list[dict[str, Any]] = [{}, {}, LOCAL, {}, LOCAL, {"shard": 1}]
STEPPED = user(configure_optimizers=lambda m: scheduled(Noted.configure_optimizers(m)))
for number, options in enumerate(WINDOWS):
    case("accumulation", STEPPED, f"windows_{number}", **options, data=lambda: (rows(16), rows(4, seed=1)), ulps=16,
         moments=COUNTED, stages=(1, 2, 2, 3, 3, 3), settings=POLICIES)  # fmt: skip


# -- manual optimization ---------------------------------------------------------------------------


class Adversaries(LightningModule):
    """A generator and a discriminator with optimizers of their own, and a frozen teacher."""

    automatic_optimization = False

    def __init__(self, step: Callable[..., None]) -> None:
        super().__init__()
        self.step = step
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.generator = Blocks(2, WIDTH)
            self.discriminator = nn.Sequential(Block(WIDTH), Block(WIDTH), nn.Linear(WIDTH, 1))
            self.teacher = Blocks(1, WIDTH).requires_grad_(False)
        self.losses: list[float] = []
        self.notes: list[Any] = []

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.step(self, *batch, batch_idx, *self.optimizers())

    def judge(self, x: Tensor, *, is_real: bool) -> Tensor:
        verdict = self.discriminator(x)
        return F.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, is_real))

    def backward_of(self, loss: Tensor, **how: Any) -> None:
        self.manual_backward(loss, **how)
        self.losses.append(loss.item())
        names = [name for name, p in self.named_parameters() if p.grad is not None]
        self.notes.append([names, [p.requires_grad for p in self.parameters()]])

    def configure_optimizers(self) -> Any:
        of = self.generator.parameters()
        plain, usual = torch.optim.SGD, partial(torch.optim.Adam, betas=(0.5, 0.9))
        second = torch.optim.SGD(self.discriminator.parameters(), lr=0.05, momentum=0.9)
        optimizers = [(plain if self.step is unsent else usual)(of, lr=0.02), second]
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in optimizers]
        return optimizers, schedulers


def toggling(m: Any, z: Tensor, real: Tensor, number: int, generate: Any, discriminate: Any) -> None:  # fmt: skip
    """The textbook GAN of Lightning's documentation."""
    m.toggle_optimizer(generate)
    fake = m(z)
    loss = m.judge(fake, is_real=True) + F.mse_loss(fake, m.teacher(z))
    m.log("loss_g", loss, sync_dist=True)
    m.backward_of(loss)
    generate.step()
    generate.zero_grad()
    m.untoggle_optimizer(generate)

    m.toggle_optimizer(discriminate)
    m.backward_of(m.judge(real, is_real=True) + m.judge(m(z).detach(), is_real=False))
    discriminate.step()
    discriminate.zero_grad()
    m.untoggle_optimizer(discriminate)


def in_turn(m: Any, z: Tensor, real: Tensor, number: int, generate: Any, discriminate: Any) -> None:
    """Two discriminator steps for each of the generator's, without toggling, and a schedule."""
    discriminate.zero_grad()
    m.backward_of(m.judge(real, is_real=True) + m.judge(m(z).detach(), is_real=False))
    m.clip_gradients(discriminate, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
    discriminate.step()
    if number % 2:
        generate.zero_grad()
        m.backward_of(m.judge(m(z), is_real=True))
        m.clip_gradients(generate, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        generate.step()
        for scheduler in m.lr_schedulers():
            scheduler.step()
    m.notes.append([group["lr"] for o in m.trainer.optimizers for group in o.param_groups])


def accumulating(m: Any, z: Tensor, real: Tensor, number: int, *optimizers: Any) -> None:
    """Sums the gradients of two batches by hand, and takes two losses to one step."""
    fake = m(z)
    m.backward_of(F.mse_loss(fake, m.teacher(z)) / 2, retain_graph=True)
    m.backward_of(m.judge(fake, is_real=True) / 2)
    if number % 2:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def unsynced(m: Any, z: Tensor, real: Tensor, number: int, *optimizers: Any) -> None:
    """Does without messages in every other batch, by what DDP's wrapper has."""
    assert m.trainer.model.module is m
    with m.trainer.model.no_sync() if number % 2 == 0 else nullcontext():
        accumulating(m, z, real, number, *optimizers)


def toggled_late(m: Any, z: Tensor, real: Tensor, number: int, generate: Any, _: Any) -> None:
    """Freezes the other network between forward and backward."""
    loss = m.judge(m(z), is_real=True)
    m.toggle_optimizer(generate)
    m.backward_of(loss)
    generate.step()
    generate.zero_grad()
    m.untoggle_optimizer(generate)


def plain(m: Any, z: Tensor, real: Tensor, number: int, generate: Any, _: Any) -> None:
    """Calls `loss.backward()` and closures itself, which DDP does not average."""

    def closure() -> Tensor:
        loss = F.mse_loss(m(z), m.teacher(z))
        generate.zero_grad()
        is_ours = isinstance(m.trainer.strategy, ZeROStrategy)
        loss.backward() if is_ours else m.manual_backward(loss)
        m.losses.append(loss.item())
        return loss

    generate.step(closure=closure)


def drop_some(m: Any) -> None:
    m.generator.blocks[0].linear.weight.grad = None
    m.generator.stem.bias.grad = None


def replace(m: Any) -> None:
    weight = m.generator.blocks[1].linear.weight
    weight.grad = weight.grad * 0.5
    m.generator.stem.weight.grad = torch.ones_like(m.generator.stem.weight)


def change(m: Any) -> None:
    for parameter in m.generator.parameters():
        parameter.grad.mul_(0.5)
    m.generator.stem.weight.grad[0] = 0.25
    bias = m.generator.stem.bias
    bias.grad.data = bias.grad.data * 2 + 1.0
    bias.grad = bias.grad.detach()
    bias.grad[1:].mul_(0.5)
    clip_grad_norm_(m.generator.parameters(), 0.05)


DROPS = (
    *(lambda m: None, lambda m: m.optimizers()[0].zero_grad(), lambda m: m.zero_grad()),
    *(lambda m: m.optimizers()[0].zero_grad(set_to_none=False), drop_some, replace, change),
)


def unsent(m: Any, z: Tensor, real: Tensor, number: int, generate: Any, discriminate: Any) -> None:
    """Drops, replaces and changes gradients between microbatches that are not sent."""

    def backward_of(z: Tensor, is_sent: bool = False) -> None:
        with generate.toggle_model(sync_grad=is_sent):
            m.manual_backward(loss := F.mse_loss(m(z), m.teacher(z)))
        m.losses.append(loss.item())

    def note() -> None:
        """Under DDP this rank's own gradients, which it has not sent."""
        grads = [p.grad for p in m.generator.parameters() if p.grad is not None]
        m.notes.append([float(grad.norm()) for grad in grads if grad.any()])
        m.notes.append([grad.clone() for grad in grads[:1] if grad.any()])

    if number >= len(DROPS):
        # Averaged gradients of before, to which the unsent ones add.
        m.manual_backward(F.mse_loss(m(z.flip(0)), m.teacher(z.flip(0))))
    backward_of(2 * z)
    backward_of(2 * z)
    note()
    DROPS[number % len(DROPS)](m)
    note()
    if number % 3:
        backward_of(3 * z)
        note()
    backward_of(z, is_sent=True)
    m.notes.append([float(p.grad.norm()) for p in m.generator.parameters()])
    generate.step()
    # Whatever way the gradients went out, the parameters show none.
    m.zero_grad()
    discriminate.zero_grad()


PLENTY: dict[str, Any] = {"data": lambda: (rows(32),), "ddp": UNUSED, "ulps": 64}
for step in (toggling, in_turn, accumulating, unsynced, toggled_late, plain):
    # In the root, no unit's hooks tell when a backward pass begins.
    cut: dict[str, Any] = {"stages": (3, 3, 2, 1), "settings": ({}, {"units": "auto"})}
    more = cut if step in (toggling, plain) else {}
    case("manual optimization", partial(Adversaries, step), f"by_hand_{step.__name__}", **PLENTY, **more)  # fmt: skip
case("manual optimization", partial(Adversaries, unsent), "by_hand_unsent", **{**PLENTY, "data": lambda: (rows(64),)},
     stages=(1, 2, 3), settings=(LOCAL,))  # fmt: skip


widen("measured", "clip_0", "windows_0", "by_hand_toggling")
