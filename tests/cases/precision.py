"""Precisions: a language model, fp32 masters in hooks and steps, states, other uses of weights."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import gathered
from tests.cases import user
from tests.oracle import models
from tests.oracle.own_optimizers import Own
from tests.oracle.play import case
from tests.oracle.projects import WIDTH, Noted, Regression, rows

# -- a language model in mixed precision -----------------------------------------------------------


def language_model(m: Any) -> None:
    """A GPT whose head is its embedding's weight, a raw matrix, and notes of what modules return."""
    m.net, m.head = models.GPT(), nn.Identity()
    m.net.head.weight = m.net.embed.weight
    m.matrix, m.bias = nn.Parameter(torch.randn(24, 24) * 0.2), nn.Parameter(torch.zeros(24))
    for name, module in m.net.named_modules():
        note = lambda _, given, out, n=name: m.notes.append(f"{n}: {out.dtype}")  # noqa: E731
        module.register_forward_hook(note)


def next_token(m: Any, batch: Any) -> Tensor:
    (text,) = batch
    logits = m.net(text[:, :-1]).flatten(0, 1)
    return F.cross_entropy(torch.addmm(m.bias, logits, m.matrix), text[:, 1:].flatten())


def text() -> Any:
    tokens = torch.randint(24, (16, 9), generator=torch.Generator().manual_seed(0))
    return (DataLoader(TensorDataset(tokens), batch_size=2),)


GPT = user(Regression, language_model, loss=next_token)
# Two numbers have one order in which they can be summed: these are DDP's bits.
LANGUAGE: dict[str, Any] = {"max_steps": 4, "data": text, "bits": True}
case("precision", GPT, "a_language_model", **LANGUAGE, stages=(1, 2, 3, 3), rests=True,
     precisions=("bf16-mixed", "16-mixed", "bf16-mixed", "32-true"), settings=({"units": {models.TransformerBlock, nn.Embedding}},))  # fmt: skip
case("precision", GPT, "a_language_model_in_fp32_weights", **LANGUAGE, precisions=("bf16-mixed",),
     settings=({"units": {models.TransformerBlock}, "cast_weights": "none"},))  # fmt: skip


# -- fp32 weights in steps -------------------------------------------------------------------------
# DDP's parameters are fp32 at every moment, and only autocast casts. The uses below change weights
# by less than a half-precision weight can show, in a step and between its forward and backward.


class Slow(Noted):
    def __init__(self) -> None:
        super().__init__(lr=0.01)


class Taught(Slow):
    """A student with a teacher that follows it slowly.

    BYOL, DINO, MoCo: the teacher follows before it is called, or between two calls, or in a hook
    that Lightning runs between forward and backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def follow(self, *_: Any) -> None:
        for ours, theirs in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            assert ours.dtype == theirs.dtype == torch.float32
            ours.mul_(0.999).add_(theirs, alpha=0.001)

    on_before_zero_grad = follow

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2:
            self.follow()
        else:
            for ours, theirs in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                ours.data = ours.data * 0.999 + theirs.data * 0.001
        with torch.no_grad():
            target = self.teacher(batch[0])
        out = self.net(batch[0])
        loss = F.mse_loss(self.head(out), batch[1]) + F.mse_loss(out, target)
        if batch_idx == 2:
            self.follow()
            loss = loss + F.mse_loss(out, self.teacher(batch[0]).detach())
        return loss


@torch.no_grad()
def decay(m: Any, *_: Any) -> None:
    """Change weights that autocast casts between the forward and the end of the backward."""
    for parameter in m.parameters():
        if parameter.ndim > 1:
            parameter.mul_(1 - 1e-4)


@torch.no_grad()
def decay_gathered(m: Any, *_: Any) -> None:
    """Change weights twice before the backward, the second time as `gathered` keeps changes."""
    decay(m)
    with gathered(m, modify=True):
        m.head.weight.mul_(0.98)


@torch.no_grad()
def sharpen(m: Any, batch: Any, batch_idx: int) -> None:
    """Step as SAM: up to the worst neighbour, and down by the gradient that is there."""

    def backward() -> list[Tensor]:
        m.zero_grad()
        with torch.enable_grad():
            m.manual_backward(m.loss(batch))
        return [p.grad for p in m.parameters()]

    grads = backward()
    scale = 0.001 / (torch.stack([g.norm() for g in grads]).norm() + 1e-12)
    steps = [g.clone() * scale for g in grads]
    torch._foreach_add_([*m.parameters()], steps)
    for parameter, grad, step in zip(m.parameters(), backward(), steps, strict=True):
        parameter.sub_(step)
        parameter -= 1e-4 * grad
    m.optimizers().step()


def adapt(m: Any) -> None:
    m.down = nn.Parameter(0.01 * torch.randn(1, WIDTH))
    m.up = nn.Parameter(0.01 * torch.randn(WIDTH, 1))


def merge(sign: int, m: Any, *_: Any) -> None:
    """Merge adapters for each validation step, and unmerge them."""
    for weight in [m.head.weight, *(block.linear.weight for block in m.net.blocks)]:
        product = m.up[: weight.shape[0]].float() * m.down[:, : weight.shape[1]]
        weight.data += sign * product


Adapted = user(Slow, adapt, forward=lambda m, x: Slow.forward(m, x) + x @ m.up @ m.down)
MERGED = {"on_validation_batch_start": partial(merge, 1), "on_validation_batch_end": partial(merge, -1)}  # fmt: skip
DECAYED = {**dict.fromkeys(("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step"), decay), "on_before_backward": decay_gathered}  # fmt: skip
MASTERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "taught": (Taught, {}), "decayed": (Slow, DECAYED), "merged": (Adapted, MERGED),
    "sharpened": (user(Slow, training_step=sharpen, automatic_optimization=False), {}),
}  # fmt: skip
for name, (module, moments) in MASTERS.items():
    precisions = ("bf16-mixed", "16-mixed") if module is Taught else ("bf16-mixed",)
    case("precision", module, f"masters_{name}", moments=moments, stages=(1, 2, 3), precisions=precisions, max_epochs=2,
         data=lambda: (rows(), rows(4, seed=1)), ulps=64, dtype=torch.float32)  # fmt: skip


# -- weights that a step uses in other ways than their module's forward ----------------------------


def use_head_twice(m: Any, batch: Any) -> Tensor:
    """The head is called twice, and its weights have a penalty."""
    y = m.head(m(batch[0]))
    return F.mse_loss(y, batch[1]) + sum(p.square().sum() for p in m.head.parameters())


for cast in ("none", "autocast"):
    case("precision", user(Regression, loss=use_head_twice), f"used_twice_cast_{cast}", precisions=("bf16-mixed",), max_steps=3,
         settings=({"cast_weights": cast},), bits=cast == "none", ulps=0 if cast == "none" else 16)  # fmt: skip


# -- dtypes of weights, masters and states ---------------------------------------------------------


class Made(Own):
    """Makes its states with itself, in every way in which it can know the weights' dtype."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].update(
                sum=torch.full_like(p, 0.1),
                new=p.new_full(p.shape, 0.1),
                listed=[torch.zeros(p.shape, dtype=p.dtype)],
                own=torch.zeros_like(p, dtype=torch.float64),
            )

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        for total in (state["sum"], state["new"], *state["listed"], state["own"]):
            total.add_(grad**2)
        p.sub_(group["lr"] * grad / state["sum"].sqrt())


def states_at_start(m: Any) -> Any:
    (optimizer,) = m.trainer.optimizers
    leaves = [(k, v) for s in optimizer.state.values() for k, v in s.items() if k != "step"]
    tensors = [(k, t) for k, v in leaves for t in tree_leaves(v) if t.numel()]
    return sorted({(k, str(t.dtype), float(t.max())) for k, t in tensors})


KINDS = {"adagrad": partial(torch.optim.Adagrad, initial_accumulator_value=0.1), "Made": Made}
for name, kind in KINDS.items():
    case("precision", partial(Regression, optimizer=kind), f"states_made_by_{name}", stages=(3, 2), ulps=16, save_at=1,
         precisions=("bf16-mixed", "bf16-true"), dtype=torch.bfloat16, moments={"on_train_start": states_at_start})  # fmt: skip


# The loss is multiplied by a parameter of no module, whose gradient is unscaled too.
FACTORED = user(
    Regression,
    lambda m: setattr(m, "factor", [nn.Parameter(torch.ones(()))]),
    loss=lambda m, batch: Regression.loss(m, batch) * m.factor[0],
    configure_optimizers=lambda m: torch.optim.SGD([*m.parameters(), *m.factor], lr=0.05),
)
case("precision", FACTORED, "a_factor_of_no_module", precisions=("16-mixed",), max_steps=2, ulps=16, worlds=(1, 2),
     moments={"on_before_optimizer_step": lambda m, *_: float(m.factor[0].grad)})  # fmt: skip
