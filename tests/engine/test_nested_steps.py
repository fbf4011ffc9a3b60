"""Optimizers whose step calls the step of their base class, for which torch calls hooks again.

Torch hooks the step of a class when the first optimizer of just this class is made.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.plan import Settings
from tests.oracle.ranks import Pools


class Around(torch.optim.SGD):
    """Steps by element, and changes gradients before and weights after its base class's step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        members = [p for group in self.param_groups for p in group["params"]]
        if closure is None:
            for member in members:
                if member.grad is not None:
                    member.grad.mul_(0.5)
        loss = super().step(closure)
        for member in members:
            member.mul_(0.99)
        return loss


class Normalized(torch.optim.SGD):
    """Must see whole gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for member in (p for group in self.param_groups for p in group["params"]):
            if member.grad is not None and closure is None:
                member.grad.div_(member.grad.norm() + 1e-6)
        return super().step(closure)


class Handing(torch.optim.SGD):
    """Hands its closure on in another function."""

    def step(self, closure: Any = None) -> Any:
        return super().step(None if closure is None else lambda: closure())


class Failing(torch.optim.SGD):
    """Raises in the middle of its first step."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for member in (p for group in self.param_groups for p in group["params"]):
            if member.grad is not None and closure is None:
                member.grad.mul_(0.5)
        if Failing.fails:
            raise FloatingPointError
        return super().step(closure)


def stepped(cls: Any, **how: Any) -> list[Tensor]:
    """Return losses and weights, under an engine if there are settings."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)  # torch hooks this class's step
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    engine = Engine(model, Settings(units=(nn.Linear,), **how)) if how else None
    optimizer = cls(model.parameters(), 0.1, momentum=0.9)
    if engine is not None:
        engine.adopt(optimizer)

    def closure(number: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1 + number, 20).view(4, 5)).square().mean()
        loss.backward()
        return loss

    losses = []
    for number in range(5):
        Failing.fails = cls is Failing and not number
        if number % 2:
            losses.append(optimizer.step(lambda number=number: closure(number)))
        else:
            losses.append(closure(number))
            with contextlib.suppress(FloatingPointError):
                optimizer.step()
    if engine is not None:
        engine.close()
    return [*losses, *(p.detach() for p in model.parameters())]


def compared(cls: Any, how: dict[str, Any]) -> None:
    torch.testing.assert_close(stepped(cls, **how), stepped(cls), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("cls", [Around, Normalized, Handing, Failing])
def test_a_step_within_a_step_is_part_of_it(ranks: Pools, cls: Any, stage: int) -> None:
    ranks(2).run(compared, cls, {"stage": stage})
