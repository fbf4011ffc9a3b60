"""Element-wise optimizers as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Own(Optimizer):
    """Calls :meth:`update` for each parameter with a gradient, behind the closure."""

    def __init__(self, params: Any, lr: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group)
        self.finish()
        return loss

    def begin(self) -> None:
        """Do what is done once in a step."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"])

    def finish(self) -> None:
        """Do what is done last."""


class GroupCounting(Own):
    """Lion, with a rate that falls by a counter of the group."""

    def begin(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
        p.mul_(1 - 0.1 * group["lr"])
        p.add_(mean.lerp(grad, 0.1).sign_(), alpha=-group["lr"] / group["step"])
        mean.lerp_(grad, 0.01)


class SelfCounting(Own):
    """Has a counter, a list of what it did and a warmed rate in a tensor, all as attributes."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.k = 0
        self.rates: list[float] = []
        self.warmth = torch.zeros(())

    def begin(self) -> None:
        self.k += 1
        self.rates.append(1 / (1 + self.k))
        self.warmth.add_(0.25).clamp_(max=1)
        self.state["of all"] = self.k  # type: ignore[index]

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        speed = self.state[p].setdefault("speed", torch.zeros_like(p))
        speed.mul_(0.9).add_(grad, alpha=self.rates[-1])
        p.addcmul_(speed, self.warmth, value=-group["lr"])


class Nested(Own):
    """Keeps a list of means, numbers in a dictionary and a count of its own for a parameter."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["means"] = [torch.zeros_like(p), torch.zeros_like(p)]
            state["numbers"] = {"scale": 1.0, "history": []}
            state["count"] = torch.zeros(())
        state["count"] += 1
        numbers = state["numbers"]
        numbers["scale"] *= 0.9
        numbers["history"] = [*numbers["history"], numbers["scale"]][-3:]
        for decay, mean in zip((0.9, 0.5), state["means"], strict=True):
            mean.mul_(decay).add_(grad, alpha=sum(numbers["history"]))
            p.addcdiv_(mean, state["count"], value=-group["lr"])


class Swapping(Own):
    """Has a mean of its weights in their place between steps, as schedule-free ones."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, is_training=False, num_swaps=0, **options)

    @torch.no_grad()
    def train(self) -> None:
        self._swap(is_training=True)

    @torch.no_grad()
    def eval(self) -> None:
        self._swap(is_training=False)

    def _swap(self, *, is_training: bool) -> None:
        for group in self.param_groups:
            if group["is_training"] == is_training:
                continue
            group["is_training"] = is_training
            group["num_swaps"] += 1
            for p in group["params"]:
                if "mean" in self.state[p]:
                    other = p.clone()
                    p.copy_(self.state[p]["mean"])
                    self.state[p]["mean"].copy_(other)

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if not group["is_training"]:
            raise RuntimeError("call train() first")
        mean = self.state[p].setdefault("mean", p.clone())
        p.add_(grad, alpha=-group["lr"] / (1 + group["num_swaps"]))
        mean.lerp_(p, 0.3)


class Evaluating(Swapping):
    """Has the mean in the place of its weights from each step to the next."""

    def begin(self) -> None:
        self.train()

    def finish(self) -> None:
        self.eval()


OWN: list[type[Own]] = [GroupCounting, SelfCounting, Nested, Evaluating, Swapping]


class ByNumber(Own):
    """Divides by the number of its parameters."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"] / len(group["params"]))
