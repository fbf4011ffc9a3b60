"""Gradients that are kept, put in or dropped: what the table's hooks and loops do not show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from lightning_zero import full_grad
from lightning_zero.engine import Engine
from lightning_zero.optimizer import clip
from lightning_zero.parameters.full_grad import FullGrad
from lightning_zero.plan import Settings
from tests.oracle.projects import WIDTH, Regression, fit
from tests.oracle.ranks import Pools


class Faces(Regression):
    """Looks at what stands for a gradient, and assigns what is none."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            grad: Any = parameter.grad
            assert isinstance(grad, FullGrad)
            assert parameter.grad is grad
            assert (grad.shape, grad.dtype) == (parameter.shape, parameter.dtype)
            assert grad.stride() == grad.clone().stride()
            with pytest.raises(RuntimeError, match="storage"):
                grad.untyped_storage().data_ptr()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grad: Any = self.head.weight.grad
        for data in (torch.zeros(WIDTH), torch.zeros(WIDTH, WIDTH, dtype=torch.float64)):
            for owner, name in ((grad, "data"), (self.head.weight, "grad")):
                with pytest.raises(RuntimeError, match=r"cannot be assigned .* 'head.weight', of"):
                    setattr(owner, name, data)
        assert "sharded" in repr(grad)
        with pytest.raises(RuntimeError, match=r"'head.bias' was assigned to parameter 'net"):
            self.net.stem.bias.grad = self.head.bias.grad
        self.net.stem.bias.grad = self.head.bias.grad.clone()
        assert torch.equal(full_grad(self.net.stem.bias), self.head.bias.grad.clone())


def show_faces() -> None:
    for stage in (1, 3):
        fit(Faces(), stage, max_steps=2)


def test_faces_of_gradients(ranks: Pools) -> None:
    ranks(2).run(show_faces)


# ------------------------------------------------------------------------- on one rank

X = torch.ones(2, 4)


def engine_of(
    stage: int = 2, make: Any = lambda p: torch.optim.SGD(p, 0.1), model: nn.Module | None = None
) -> tuple[Any, Engine, Any]:
    model = nn.Linear(4, 3) if model is None else model
    engine = Engine(model, Settings(stage=stage))
    engine.adopt(optimizer := make(model.parameters()))
    return model, engine, optimizer


def test_gradients_that_users_put_in_are_counted() -> None:
    model, engine, _ = engine_of()
    model(X).sum().backward()
    shard = engine.sharded.memory()["gradients"]
    model.weight.grad = torch.ones(3, 4)
    assert engine.sharded.memory()["gradients"] == shard + model.weight.nbytes
    model.bias.grad = torch.ones(3)
    # No piece shows a part of the shard any more, and it is gone.
    assert engine.sharded.memory()["gradients"] == model.weight.nbytes + model.bias.nbytes
    engine.close()


class _ZeroesInStep(torch.optim.Optimizer):
    """Drops gradients in its own step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad)
        self.zero_grad()


class _DropsInStep(_ZeroesInStep):
    """Drops the gradients of what it holds, without a call of ``zero_grad``."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


def test_kept_gradients_that_a_step_drops_or_only_torch_holds() -> None:
    model, engine, optimizer = engine_of(make=_ZeroesInStep)
    model(X).sum().backward()
    kept, scale, other = model.weight.grad, torch.ones(3).requires_grad_(), torch.zeros(3)
    other.grad = model.bias.grad
    loss = (scale * model.bias.grad).sum()
    optimizer.step()
    assert model.bias.grad is None
    (model(X) * 7).sum().backward()
    loss.backward()
    assert kept.tolist() == [[2.0] * 4] * 3
    assert other.grad.tolist() == scale.grad.tolist() == [2.0] * 3
    engine.close()


def test_what_a_step_has_dropped_is_not_used_again() -> None:
    both = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    model, engine, optimizer = engine_of(make=_DropsInStep, model=both)
    (model[0](X) + model[1](X)).sum().backward()
    type(optimizer).zero_grad(optimizer)
    (model[0](X) + model[1](X)).sum().backward()
    optimizer.step()
    model[0](X).sum().backward()
    assert model[1].bias.grad is None
    assert model[0].bias.grad.tolist() == [2.0] * 3
    engine.close()


def test_gradients_behind_a_backward_pass_that_failed() -> None:
    """One that was put back, and none of those that were not sent and read."""
    model, engine, _ = engine_of()
    model(X).sum().backward()
    kept = model.bias.grad
    batch = X.clone().requires_grad_()
    batch.register_hook(lambda grad: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(batch).sum().backward()
        engine.reset()
        model.bias.grad = kept
        assert model.bias.grad.tolist() == [2.0] * 3
        with engine.no_sync():
            model(X).sum().backward()
        assert model.bias.grad.tolist() == [4.0] * 3
        with pytest.raises(ZeroDivisionError):
            model(batch).sum().backward()
        model.zero_grad()
        model(X).sum().backward()
        kept = model.bias.grad
        assert kept.tolist() == [2.0] * 3
    engine.close()


ORDERS = ("inf", float("-inf"), 0, -1, 0.5, 1, "2", 3.5)


def clipped_by_both(stage: int) -> None:
    """Norms and clipped gradients of every order that torch accepts."""
    grads = [torch.arange(1.0, 13.0).view(3, 4), torch.tensor([0.0, -2.0, 5.0])]
    model, engine, _ = engine_of(stage)
    for order in ORDERS:
        for way in (clip_grad_norm_, clip.clip_by_norm):
            model(X).sum().backward()
            alike = nn.Linear(4, 3)
            for module in (model, alike):
                for parameter, grad in zip(module.parameters(), grads, strict=True):
                    parameter.grad = grad.clone()
            is_torchs = way is clip_grad_norm_
            who = (model.parameters(),) if is_torchs else (engine.sharded.pieces, engine.comm)
            expected = clip_grad_norm_(alike.parameters(), 1.5, order)
            torch.testing.assert_close(way(*who, 1.5, order), expected)
            for parameter, other in zip(model.parameters(), alike.parameters(), strict=True):
                torch.testing.assert_close(full_grad(parameter), other.grad)
                torch.testing.assert_close(parameter.grad.norm(), other.grad.norm())
            model.zero_grad()
    engine.close()


def test_clipping_takes_every_order_that_torch_takes(ranks: Pools) -> None:
    ranks(2).run(clipped_by_both, 3)
