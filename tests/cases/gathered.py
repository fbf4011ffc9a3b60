"""Weights and gradients that are gathered, moved, lent or kept: edited, trained and read later."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_zero import ZeROStrategy, gathered, join
from tests.cases import user
from tests.cases.gradients import STEPS, Unused, kept, norms
from tests.cases.optimizers import Dropping
from tests.oracle.models import Block
from tests.oracle.play import UNUSED, case
from tests.oracle.projects import WAYS, WIDTH, Noted, rows

EVERY: dict[str, Any] = {"max_steps": 3, "stages": (1, 2, 3)}


def is_ours(module: Any) -> bool:
    return isinstance(module.trainer.strategy, ZeROStrategy)


@torch.no_grad()
def moved(p: Tensor) -> None:
    """Change the storage, as cuDNN's RNNs do when they flatten their weights."""
    p.set_(0.9 * p)  # type: ignore[call-overload]


def assigned(p: Tensor) -> None:
    p.data = 0.9 * p.data


def by_array(p: Tensor) -> None:
    array = p.detach().numpy()
    array *= 0.9


def edited_gathered(m: Any, *_: Any) -> Any:
    """Edit what is gathered, on rank 0 in each way; DDP would not average what is moved."""
    with gathered(m, modify=True):
        for number, parameter in enumerate(m.parameters()):
            if not is_ours(m):
                parameter.data.mul_(0.9)
            elif m.global_rank == 0:
                (assigned, by_array, moved)[number % 3](parameter)
    with gathered(m), gathered(m.head):
        return float(m.head.bias.sum())


case("weights in hooks", Noted, "edited_gathered", **EVERY, moments={"on_train_batch_end": edited_gathered})  # fmt: skip


def move_first(m: Any, batch: Any) -> Tensor:
    """Move the weights before every forward."""
    for parameter in m.parameters():
        moved(parameter) if is_ours(m) else parameter.data.mul_(0.9)
    return Noted.loss(m, batch)


case("weights in hooks", user(loss=move_first), "Moving", **EVERY)


class Keeping(Block):
    """Keeps views of its weight from its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.linear.weight.data, self.linear.weight.detach()[1:]]
        return super().forward(x)


class Kept(Noted):
    """Reads views that were taken in a forward, or of gathered weights, when these may be gone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net.blocks[1] = Keeping(WIDTH)

    def note(self, *_: Any) -> None:
        self.notes.append([view.clone() for view in self.net.blocks[1].kept])

    on_before_backward = on_before_optimizer_step = note

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with gathered(self):
            views = [p.detach() for p in self.parameters()]
        loss = super().training_step(batch, batch_idx)
        self.notes.append([view.clone() for view in views])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.note()


case("weights in hooks", Kept, **EVERY, settings=({"units": {Block, Keeping}},), data=lambda: (rows(), rows(4, seed=1)))  # fmt: skip


def snapshot(m: Any, *_: Any) -> None:
    """Keep what is read between steps, which is a snapshot; DDP's goes on changing."""
    state, views = m.state_dict(), [p.detach()[:1] for p in m.parameters()]
    arrays = [torch.from_numpy(p.detach().numpy()) for p in m.parameters()]
    if is_ours(m):
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in state.values())
    found = state, views, arrays
    m.notes.append(found if is_ours(m) else copy.deepcopy(found))


case("weights in hooks", Noted, "snapshots", **EVERY, worlds=(1, 2), moments={"on_train_batch_end": snapshot})  # fmt: skip


@torch.no_grad()
def read_alone(m: Any, *_: Any) -> Any:
    """Weights that are whole on each rank need no other rank, over any transport."""
    if m.global_rank == 0:
        return None
    return float(sum(p.sum() for p in m.parameters())), m(torch.ones(2, WIDTH))


case("weights in hooks", Noted, "read_alone", stages=(1, 2, 1), transports=tuple(WAYS), moments={"on_train_batch_end": read_alone})  # fmt: skip


class Joins(Noted):
    """Calls itself, or a part of itself, as often as each rank likes; then all go on together."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(WIDTH))  # which ranks broadcast together

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with join(self):
            x = batch[0]
            for _ in range(3 * self.global_rank + batch_idx):
                x = self(x)
            if self.global_rank == 1:
                x = self.net.blocks[2](x)
        self.notes += [x, self(torch.ones(2, WIDTH))]


case("loops", Joins, **EVERY, worlds=(2, 3), transports=tuple(WAYS), ulps=8)


class Doubling(Noted):
    """A user's function is in the place of a unit's forward, which copies keep."""

    def __init__(self) -> None:
        super().__init__()
        plain = self.net.blocks[1].forward
        self.net.blocks[1].forward = lambda x: 2 * plain(x)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.notes.append(copy.deepcopy(self.net.blocks[1])(torch.ones(2, WIDTH)))


case("recompute", Doubling, max_steps=2, settings=({"activation_checkpointing": True},))


class Digits(Noted):
    """Edits an element of each parameter between steps and in one; no other loses a digit."""

    @torch.no_grad()
    def edit(self, value: float) -> None:
        expected = {name: x.clone() for name, x in self.state_dict().items()}
        for name, parameter in self.named_parameters():
            parameter.view(-1)[0] = expected[name].view(-1)[0] = value
        assert all(torch.equal(x, expected[name]) for name, x in self.state_dict().items())

    def on_train_batch_end(self, *_: Any) -> None:
        self.edit(0.5)
        with gathered(self, modify=True):
            self.edit(0.25)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for value in (0.75, 0.125):  # the scale of a block is another one the second time
            self.edit(value)
        return super().training_step(batch, batch_idx)


case("weights in hooks", Digits, max_steps=3, ulps=2**20, settings=({"gather_bits": 8, "reduce_bits": 8},), stages=(3,),
     transports=("point to point",))  # fmt: skip


# -- gradients -------------------------------------------------------------------------------------


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


def sent_in_two_bytes(m: Any, *_: Any) -> None:
    traffic = m.trainer.strategy.traffic if is_ours(m) else {}
    assert all(x.bytes == 2 * x.elements for (_, verb), x in traffic.items() if verb == "reduce")


for dtype in (torch.float16, torch.bfloat16):
    case("precision", Noted, f"reduced_in_{dtype}", **EVERY, settings=({"reduce_dtype": dtype},), dtype=dtype, ulps=2,
         moments={"on_train_end": sent_in_two_bytes})  # fmt: skip
