"""Optimizers as users write them: some may be stepped unit by unit, others step otherwise so."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
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
        self.prepare()
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

    def prepare(self) -> None:
        """Do what is done before the closure."""

    def begin(self) -> None:
        """Do what is done once in a step."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"])

    def finish(self) -> None:
        """Do what is done last."""


# -- by unit ---------------------------------------------------------------------------------------


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


BY_UNIT: list[type[Own]] = [GroupCounting, SelfCounting, Nested, Evaluating, Swapping]


# -- otherwise by unit -----------------------------------------------------------------------------


class ByNumber(Own):
    """Divides by the number of its parameters."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"] / len(group["params"]))


class Drawing(Own):
    """Decays by a number that is drawn once per step."""

    def begin(self) -> None:
        self.decay = random.random()

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        p.mul_(1 - 0.01 * self.decay).add_(grad, alpha=-group["lr"])


class OwnDrawing(Own):
    """Draws from a generator of its own, which nobody else sees."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.random = random.Random(0)

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"] * self.random.random())


class ByNorm(Own):
    """Divides by the norm of all gradients."""

    def begin(self) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        self.norm = torch.nn.utils.get_total_norm([g for g in grads if g is not None])

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        p.add_(grad / self.norm, alpha=-group["lr"])


class CountingParameters(Own):
    """Counts the parameters that it has stepped, and does nothing by it yet."""

    num_stepped = 0

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        self.num_stepped += 1
        super().update(p, grad, group)


class CountingIfAny(Own):
    """Counts the steps of groups in which any parameter has a gradient."""

    def begin(self) -> None:
        for group in self.param_groups:
            if any(p.grad is not None for p in group["params"]):
                group["step"] = group.get("step", 0) + 1


class CountingIfNotEmpty(Own):
    """Counts the steps of groups that have parameters."""

    def begin(self) -> None:
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1


class ByPlace(Own):
    """Has a rate for each parameter, by its place."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, scales=[1.0] * (len(params) - 1) + [0.5])

    def begin(self) -> None:
        for group in self.param_groups:
            for p, scale in zip(group["params"], group["scales"], strict=False):
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * scale)

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        pass


class TakingTheFirst(Own):
    """Asks the first parameter of each group for its device."""

    def begin(self) -> None:
        for group in self.param_groups:
            group["device"] = str(group["params"][0].device)


class BeforeTheClosure(Own):
    """Decays before the closure has run."""

    def prepare(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)


class CountingEarly(Own):
    """Counts its steps before the closure has run, which may look at that."""

    k = 0

    def prepare(self) -> None:
        self.k += 1


class Clearing(Own):
    """Drops the gradients that it has stepped by."""

    def finish(self) -> None:
        self.zero_grad()


class Zeroing(Own):
    """Lets the gradients that it has stepped by be zero."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        super().update(p, grad, group)
        grad.zero_()


class Replacing(Own):
    """Has a method of its own in each object."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.update = super().update  # type: ignore[method-assign]


@dataclass
class Schedule:
    """Something whose changes nobody sees."""

    number: int = 0


class Scheduled(Own):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.schedule = Schedule()


class Tabulated(Own):
    """Has a table of its own for a parameter, which a file may take for a piece's numbers."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        self.state[p].setdefault("table", torch.zeros(10))
        super().update(p, grad, group)


class Sized(Own):
    """Notes the size of a parameter."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        self.state[p]["size"] = p.numel()
        super().update(p, grad, group)


class Inheriting(torch.optim.SGD):
    """Counts around the step of its base class, in which hooks run once more."""

    k = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        self.k += 1
        return loss


NOT_BY_UNIT: dict[type[Any], str] = {
    ByNumber: "when others are stepped before or after it",
    Drawing: "draws random numbers",
    OwnDrawing: "keeps a Random as its attribute 'random'",
    ByNorm: "combines values of several parameters",
    CountingParameters: "changes its attribute 'num_stepped' depending on the parameters it steps",
    CountingIfAny: "changes option 'step' depending on the parameters it steps",
    CountingIfNotEmpty: "changes option 'step' depending on the parameters it steps",
    ByPlace: "option 'scales', a list with one entry per parameter",
    TakingTheFirst: "fails to step a toy parameter .IndexError.*when only some",
    BeforeTheClosure: "touches parameters before calling its closure",
    CountingEarly: "changes its attribute 'k' before calling its closure",
    Clearing: "clears gradients in its step",
    Zeroing: "clears gradients in its step",
    Replacing: "has its own 'update' instead of its class's",
    Scheduled: "keeps a Schedule as its attribute 'schedule'",
    Tabulated: "keeps 'table' in a state in a shape other than",
    Inheriting: "calls the step of a base class",
    Sized: "keeps different numbers for a part of a parameter",
}
