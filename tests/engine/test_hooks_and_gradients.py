"""Hooks of a LightningModule see true gradients, and what they do to gradients counts."""

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


class Noting(Regression):
    """Notes what its hooks see; SGD, so that small gradients make small steps."""

    def __init__(self) -> None:
        super().__init__(lr=0.1, optimizer=torch.optim.SGD)
        self.notes: list[Any] = []

    def note_norms(self) -> None:
        self.notes.append([p.grad is None for p in self.parameters()])
        self.notes.append([float(p.grad.norm()) for p in self.parameters() if p.grad is not None])


class _Refused(Noting):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grad = self.head.weight.grad
        for data in (torch.zeros(WIDTH), torch.zeros(WIDTH, WIDTH, dtype=torch.float64)):
            with pytest.raises(RuntimeError, match=r"cannot be assigned .* 'head.weight', of"):
                grad.data = data
            with pytest.raises(RuntimeError, match=r"cannot be assigned .* 'head.weight', of"):
                self.head.weight.grad = data
        assert "sharded" in repr(grad)
        with pytest.raises(RuntimeError, match=r"'head.bias' was assigned to parameter 'net"):
            self.net.stem.bias.grad = self.head.bias.grad
        self.net.stem.bias.grad = self.head.bias.grad.clone()
        assert torch.equal(full_grad(self.net.stem.bias), self.head.bias.grad.clone())


class _TakesNoMemory(Noting):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            assert isinstance(parameter.grad, FullGrad)
            assert parameter.grad is parameter.grad
            assert parameter.grad.shape == parameter.shape
            assert parameter.grad.dtype == parameter.dtype
            assert parameter.grad.stride() == parameter.grad.clone().stride()
            with pytest.raises(RuntimeError, match="storage"):
                parameter.grad.untyped_storage().data_ptr()


def _check(strategy: int, case: type[Noting]) -> None:
    fit(case(), strategy, max_steps=2)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("case", [_Refused, _TakesNoMemory])
def test_faces_of_gradients(ranks: Pools, stage: int, case: type[Noting]) -> None:
    ranks(2).run(_check, stage, case)


# ------------------------------------------------------------------------- once per real step


def engine_with_grads(stage: int = 2) -> tuple[nn.Linear, Engine]:
    model = nn.Linear(4, 3)
    engine = Engine(model, Settings(stage=stage))
    engine.adopt(torch.optim.SGD(model.parameters(), 0.1))
    model(torch.ones(2, 4)).sum().backward()
    return model, engine


def test_norms_of_shown_and_plain_gradients_gather_nothing(mocker: Any) -> None:
    model, engine = engine_with_grads()
    whole = mocker.spy(FullGrad, "whole")
    plain = torch.arange(3.0)
    grads = [plain, model.weight.grad, model.bias.grad]
    norms = torch._foreach_norm(grads, 2)
    # Both rows of the batch are ones, and the loss is a sum.
    expected = [plain.norm(), torch.full((3, 4), 2.0).norm(), torch.full((3,), 2.0).norm()]
    torch.testing.assert_close(norms, expected)
    assert whole.call_count == 0
    engine.close()


def test_gradients_that_users_put_in_are_counted() -> None:
    model, engine = engine_with_grads()
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


def test_kept_gradients_that_a_step_drops_or_only_torch_holds() -> None:
    model = nn.Linear(4, 3)
    engine = Engine(model, Settings(stage=2))
    engine.adopt(optimizer := _ZeroesInStep(model.parameters()))
    model(torch.ones(2, 4)).sum().backward()
    kept, scale, other = model.weight.grad, torch.ones(3).requires_grad_(), torch.zeros(3)
    other.grad = model.bias.grad
    loss = (scale * model.bias.grad).sum()
    optimizer.step()
    assert model.bias.grad is None
    (model(torch.ones(2, 4)) * 7).sum().backward()
    loss.backward()
    assert kept.tolist() == [[2.0] * 4] * 3
    assert other.grad.tolist() == scale.grad.tolist() == [2.0] * 3
    engine.close()


class _DropsInStep(_ZeroesInStep):
    """Drops the gradients of what it holds, without a call of ``zero_grad``."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


def test_what_a_step_has_dropped_is_not_used_again() -> None:
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    engine = Engine(model, Settings(stage=2))
    engine.adopt(optimizer := _DropsInStep(model.parameters()))
    x = torch.ones(2, 4)
    (model[0](x) + model[1](x)).sum().backward()
    type(optimizer).zero_grad(optimizer)
    (model[0](x) + model[1](x)).sum().backward()
    optimizer.step()
    model[0](x).sum().backward()
    assert model[1].bias.grad is None
    assert model[0].bias.grad.tolist() == [2.0] * 3
    engine.close()


def test_an_unsent_gradient_that_was_read_is_gone_behind_a_failure() -> None:
    model, engine = engine_with_grads()
    with engine.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    assert model.bias.grad.tolist() == [4.0] * 3
    batch = torch.ones(2, 4).requires_grad_()
    batch.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch).sum().backward()
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    assert model.bias.grad.tolist() == [2.0] * 3
    engine.close()


def test_a_gradient_is_put_back_behind_a_backward_pass_that_failed() -> None:
    model, engine = engine_with_grads()
    kept = model.bias.grad
    batch = torch.ones(2, 4).requires_grad_()
    batch.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch).sum().backward()
    engine.reset()
    model.bias.grad = kept
    assert model.bias.grad.tolist() == [2.0] * 3
    engine.close()


def test_an_unsent_gradient_is_added_to_an_average() -> None:
    model = nn.Linear(4, 3)
    engine = Engine(model, Settings(stage=1))
    engine.adopt(torch.optim.SGD(model.parameters(), 0.1))
    model(torch.ones(2, 4)).sum().backward()
    kept = model.bias.grad
    with engine.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    assert kept.tolist() == [2.0] * 3
    assert model.bias.grad.tolist() == [4.0] * 3
    model(torch.ones(2, 4)).sum().backward()
    assert model.bias.grad.tolist() == [6.0] * 3
    assert model.weight.grad.tolist() == [[6.0] * 4] * 3
    engine.close()


def test_data_of_a_gradient_that_is_not_sent() -> None:
    model = nn.Linear(4, 3)
    engine = Engine(model, Settings(stage=1))
    engine.adopt(torch.optim.SGD(model.parameters(), 0.1))
    with engine.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    model.weight.grad.data = model.weight.grad.data * 2 + 1.0
    model.weight.grad = kept = model.weight.grad.detach()
    assert model.weight.grad is kept
    model.bias.grad[1:].zero_()
    model.bias.grad.data[:1] = 7.0
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad.tolist() == [[7.0] * 4] * 3
    assert model.bias.grad.tolist() == [9.0, 2.0, 2.0]
    assert kept.tolist() == [[5.0] * 4] * 3
    engine.close()


ORDERS = ("inf", float("inf"), float("-inf"), 0, -1, 0.5, 1, "2", 3.5)


def _clipped_by_both(stage: int) -> None:
    """Norms and clipped gradients of every order that torch accepts."""
    grads = [torch.arange(1.0, 13.0).view(3, 4), torch.tensor([0.0, -2.0, 5.0])]
    for order in ORDERS:
        for way in (clip_grad_norm_, clip.clip_by_norm):
            model, engine = engine_with_grads(stage)
            alike = nn.Linear(4, 3)
            for module in (model, alike):
                for parameter, grad in zip(module.parameters(), grads, strict=True):
                    parameter.grad = grad.clone()
            who = (model.parameters(),) if way is clip_grad_norm_ else (
                engine.sharded.pieces, engine.comm,
            )  # fmt: skip
            expected = clip_grad_norm_(alike.parameters(), 1.5, order)
            torch.testing.assert_close(way(*who, 1.5, order), expected)
            for parameter, other in zip(model.parameters(), alike.parameters(), strict=True):
                torch.testing.assert_close(full_grad(parameter), other.grad)
                torch.testing.assert_close(parameter.grad.norm(), other.grad.norm())
            engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_clipping_takes_every_order_that_torch_takes(ranks: Pools, stage: int) -> None:
    ranks(2).run(_clipped_by_both, stage)
