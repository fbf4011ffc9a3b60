"""Precisions: a language model, fp32 masters in hooks and steps, states, other uses of weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from tests.cases import user
from tests.oracle.models import Of, chained
from tests.oracle.own_optimizers import Own
from tests.oracle.play import case
from tests.oracle.projects import WIDTH, Noted, Regression, rows

# -- a language model in mixed precision -----------------------------------------------------------


class Layer(nn.Module):
    """Attention and a perceptron, each behind a norm; raw parameters, as GPT-2's linears have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.weight = nn.Parameter(torch.randn(width, 2 * width) * 0.2)
        self.bias = nn.Parameter(torch.zeros(2 * width))
        self.out = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = torch.addmm(self.bias, self.norms[1](x).flatten(0, 1), self.weight)
        return x + self.out(F.gelu(y)).view(x.shape)


def body(vocabulary: int = 11, length: int = 6, width: int = 8) -> nn.Module:
    """A small GPT-2; its head is the embedding's weight."""

    def forward(m: Any, text: Tensor) -> Tensor:
        return m.head(m.norm(chained(m.layers, m.embedding(text) + m.position)))

    embedding, position = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(length, width))
    layers, head = [Layer(width) for _ in range(2)], nn.Linear(width, vocabulary, bias=False)
    head.weight = embedding.weight
    parts: dict[str, Any] = {"norm": nn.LayerNorm(width), "head": head}
    return Of(forward, embedding=embedding, position=position, layers=layers, **parts)


class GPT(Regression):
    """Learns the next token, and notes the dtype of all that its modules return."""

    def __init__(self) -> None:
        super().__init__(lr=0.01)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net, self.head = body(), nn.Identity()
        for name, module in self.net.named_modules():
            module.register_forward_hook(lambda m, _, out, n=name: self.note(n, out))

    def note(self, name: str, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        self.notes.append(f"{name}: {output.dtype}")

    def loss(self, batch: Any) -> Tensor:
        (text,) = batch
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def text() -> Any:
    tokens = torch.randint(11, (16, 7), generator=torch.Generator().manual_seed(0))
    return (DataLoader(TensorDataset(tokens), batch_size=2),)


# Two numbers have one order in which they can be summed: these are DDP's bits.
LANGUAGE: dict[str, Any] = {"max_steps": 4, "data": text, "bits": True}
case("precision", GPT, "a_language_model", **LANGUAGE, stages=(1, 2, 3, 3), rests=True,
     precisions=("bf16-mixed", "16-mixed", "bf16-mixed", "32-true"), settings=({"units": {Layer, nn.Embedding}},))  # fmt: skip
case("precision", GPT, "a_language_model_in_fp32_weights", **LANGUAGE, precisions=("bf16-mixed",),
     settings=({"units": {Layer}, "cast_weights": "none"},))  # fmt: skip


# -- fp32 weights in steps -------------------------------------------------------------------------
# DDP's parameters are fp32 at every moment, and only autocast casts. The uses below change weights
# by less than a half-precision weight can show, in a step and between its forward and backward.


class Slow(Noted):
    def __init__(self) -> None:
        super().__init__(lr=0.01)


class Taught(Slow):
    """A student with a teacher that follows it slowly, and with an average that is no module.

    BYOL, DINO, MoCo: the teacher follows before it is called, or between two calls, or in a hook
    that Lightning runs between forward and backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def on_fit_start(self) -> None:
        self.average = [p.detach().clone() for p in self.net.parameters()]

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
            for mean, parameter in zip(self.average, self.net.parameters(), strict=True):
                mean.lerp_(parameter, 0.01)
            torch._foreach_lerp_(self.average, [*self.net.parameters()], 0.01)
        out = self.net(batch[0])
        loss = F.mse_loss(self.head(out), batch[1]) + F.mse_loss(out, target)
        if batch_idx == 2:
            self.follow()
            loss = loss + F.mse_loss(out, self.teacher(batch[0]).detach())
        return loss

    def on_train_end(self) -> None:
        self.notes = [mean.clone() for mean in self.average]


class Changes(Slow):
    """Weights that autocast casts are changed between the forward and the end of the backward."""

    @torch.no_grad()
    def decay(self, *_: Any) -> None:
        for parameter in self.parameters():
            if parameter.ndim > 1:
                parameter.mul_(1 - 1e-4)

    on_before_zero_grad = on_before_backward = on_after_backward = on_before_optimizer_step = decay


class StepsByHand(Slow):
    """Steps as SAM, by a rule of its own, and as an optimizer does in a method that is no `step`."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        (self.sharpen, self.subtract, self.add_data)[batch_idx % 3](batch)

    def backward_of(self, batch: Any) -> None:
        self.zero_grad()
        with torch.enable_grad():
            self.manual_backward(self.loss(batch))

    @torch.no_grad()
    def sharpen(self, batch: Any) -> None:
        """Go up to the worst neighbour, and down by the gradient that is there."""
        self.backward_of(batch)
        grads = [p.grad for p in self.parameters()]
        scale = 0.001 / (torch.stack([g.norm() for g in grads]).norm() + 1e-12)
        steps = [g.clone() * scale for g in grads]
        torch._foreach_add_([*self.parameters()], steps)
        self.backward_of(batch)
        for parameter, step in zip(self.parameters(), steps, strict=True):
            parameter.sub_(step)
        self.optimizers().step()

    @torch.no_grad()
    def subtract(self, batch: Any) -> None:
        self.backward_of(batch)
        for parameter in self.parameters():
            parameter -= 1e-4 * parameter.grad

    def add_data(self, batch: Any) -> None:
        self.backward_of(batch)
        for parameter in self.optimizers().param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=-1e-4)


class Adapted(Slow):
    """Adapters are merged for each validation step, and unmerged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.down = nn.Parameter(0.01 * torch.randn(1, WIDTH))
        self.up = nn.Parameter(0.01 * torch.randn(WIDTH, 1))

    def merge(self, sign: int) -> None:
        for weight in [self.head.weight, *(block.linear.weight for block in self.net.blocks)]:
            product = self.up[: weight.shape[0]].float() * self.down[:, : weight.shape[1]]
            weight.data += sign * product

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.merge(1)
        super().validation_step(batch, batch_idx)
        self.merge(-1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.up @ self.down


for use in (Taught, Changes, StepsByHand, Adapted):
    precisions = ("bf16-mixed", "16-mixed") if use is Taught else ("bf16-mixed",)
    case("precision", use, f"masters_{use.__name__}", stages=(1, 2, 3), precisions=precisions, max_epochs=2,
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


def adagrad(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr, initial_accumulator_value=0.1)


def states_at_start(m: Any) -> Any:
    (optimizer,) = m.trainer.optimizers
    leaves = [(k, v) for s in optimizer.state.values() for k, v in s.items() if k != "step"]
    tensors = [(k, t) for k, v in leaves for t in tree_leaves(v) if t.numel()]
    return sorted({(k, str(t.dtype), float(t.max())) for k, t in tensors})


for kind in (adagrad, Made):
    case("precision", lambda k=kind: Regression(optimizer=k), f"states_made_by_{kind.__name__}", stages=(3, 2), ulps=16, save_at=1,
         precisions=("bf16-mixed", "bf16-true"), dtype=torch.bfloat16, moments={"on_train_start": states_at_start})  # fmt: skip


class ScaledByOther(Regression):
    """Multiplies its loss by a parameter that it does not own, whose gradient is unscaled too."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = [nn.Parameter(torch.ones(()))]

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.factor[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.factor], lr=0.05)


case("precision", ScaledByOther, precisions=("16-mixed",), max_steps=2, ulps=16,
     moments={"on_before_optimizer_step": lambda m, *_: float(m.factor[0].grad)})  # fmt: skip
