"""Precisions: a language model, fp32 masters in hooks and steps, states, other uses of weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from tests.oracle.own_optimizers import Own
from tests.oracle.play import case
from tests.oracle.projects import WIDTH, Noted, Regression, rows

# -- a language model in mixed precision -----------------------------------------------------------


class Projection(nn.Module):
    """GPT-2's linear: raw parameters, which `addmm` uses."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, out) * 0.2)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.unflatten(0, x.shape[:2])


class Layer(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.into, self.out = Projection(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.out(F.gelu(self.into(self.norms[1](x))))


class Body(nn.Module):
    """A small GPT-2; its head is the embedding's weight."""

    def __init__(self, vocabulary: int = 11, length: int = 6, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width))
        self.layers = nn.ModuleList([Layer(width) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class GPT(LightningModule):
    """Learns the next token, and notes the dtype of all that its modules return."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = Body()
        self.losses: list[float] = []
        self.notes: list[str] = []
        for name, module in self.body.named_modules():
            module.register_forward_hook(lambda m, _, out, n=name: self.note(n, out))

    def note(self, name: str, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        self.notes.append(f"{name}: {output.dtype}")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (text,) = batch
        logits = self.body(text[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, text[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def text() -> Any:
    tokens = torch.randint(11, (16, 7), generator=torch.Generator().manual_seed(0))
    return (DataLoader(TensorDataset(tokens), batch_size=2),)


# Two numbers have one order in which they can be summed: these are DDP's bits.
LANGUAGE: dict[str, Any] = {"max_steps": 4, "data": text, "bits": True}
case("precision", GPT, "a_language_model", **LANGUAGE, stages=(1, 2, 3), precisions=("bf16-mixed", "16-mixed", "bf16-mixed"),
     settings=({"units": {Layer, nn.Embedding}},))  # fmt: skip
case("precision", GPT, "a_language_model_in_fp32_weights", **LANGUAGE, precisions=("bf16-mixed",),
     settings=({"units": {Layer}, "cast_weights": "none"},))  # fmt: skip


# -- fp32 weights in steps -------------------------------------------------------------------------
# DDP's parameters are fp32 at every moment, and only autocast casts. The uses below change weights
# by less than a half-precision weight can show, in a step and between its forward and backward.


class Slow(Noted):
    def __init__(self) -> None:
        super().__init__(lr=0.01)


class Taught(Slow):
    """A student with a teacher that follows it slowly."""

    def __init__(self) -> None:
        super().__init__()
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


class Changes(Slow):
    """Weights that autocast casts are changed between the forward and the end of the backward."""

    @torch.no_grad()
    def decay(self, *_: Any) -> None:
        for parameter in self.parameters():
            if parameter.ndim > 1:
                parameter.mul_(1 - 1e-4)

    on_before_zero_grad = on_before_backward = on_after_backward = on_before_optimizer_step = decay


class ByHand(Slow):
    automatic_optimization = False

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


class Adapted(Slow):
    """Adapters are merged for each validation step, and unmerged."""

    def __init__(self) -> None:
        super().__init__()
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


for use in USES:
    precisions = ("bf16-mixed", "16-mixed") if use is FollowsBeforeZeroGrad else ("bf16-mixed",)
    case("precision", use, f"masters_{use.__name__}", stages=(1, 2, 3), precisions=precisions, max_epochs=2,
         data=lambda: (rows(), rows(4, seed=1)), ulps=64, dtype=torch.float32)  # fmt: skip


# -- weights that a step uses in other ways than their module's forward ----------------------------


class Using(Regression):
    """Uses the weights of its head in another way besides."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return self.head(y) if self.way == "two_calls" else y

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.way == "a_penalty":
            loss = loss + sum(p.square().sum() for p in self.head.parameters())
        return loss


for way in ("a_penalty", "two_calls"):
    for cast in ("none", "autocast"):
        ulps = 0 if cast == "none" else 16
        case("precision", lambda w=way: Using(w), f"{way}_cast_{cast}", precisions=("bf16-mixed",), max_steps=3,
             settings=({"cast_weights": cast},), bits=cast == "none", ulps=ulps)  # fmt: skip


# -- dtypes of weights, masters and states ---------------------------------------------------------


class Made(Own):
    """Makes its states with itself, in every way in which it can know the weights' dtype."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
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


class Starts(Regression):
    """Notes its states before the first step."""

    def on_train_start(self) -> None:
        (optimizer,) = self.trainer.optimizers
        leaves = [(k, v) for s in optimizer.state.values() for k, v in s.items() if k != "step"]
        tensors = [(k, t) for k, v in leaves for t in tree_leaves(v) if t.numel()]
        self.notes = sorted({(k, str(t.dtype), float(t.max())) for k, t in tensors})


for kind in (adagrad, Made):
    case("precision", lambda k=kind: Starts(optimizer=k), f"states_made_by_{kind.__name__}", stages=(3, 2),
         precisions=("bf16-mixed", "bf16-true"), dtype=torch.bfloat16, ulps=16, save_at=1)  # fmt: skip


class ScaledByOther(Regression):
    """Multiplies its loss by a parameter that it does not own, whose gradient is unscaled too."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = [nn.Parameter(torch.ones(()))]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.factor[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.factor], lr=0.05)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.factor[0].grad is not None
        self.notes.append(float(self.factor[0].grad))


case("precision", ScaledByOther, precisions=("16-mixed",), max_steps=2, ulps=16)
