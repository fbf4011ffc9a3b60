"""Hooks of a LightningModule see true gradients, and what they do to gradients counts."""

from __future__ import annotations

import copy
import pickle
import tempfile
from itertools import cycle
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm as lightning_grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from lightning_zero import full_grad, gathered, grad_norm
from lightning_zero.engine import Engine
from lightning_zero.optimizer import clip
from lightning_zero.parameters.full_grad import FullGrad
from lightning_zero.plan import Settings
from tests.oracle.projects import WIDTH, Regression, Run, assert_like_ddp, fit, rows, under_all
from tests.oracle.ranks import Pools


class Noting(Regression):
    """Notes what its hooks see; SGD, so that small gradients make small steps."""

    def __init__(self) -> None:
        super().__init__(lr=0.1, optimizer=torch.optim.SGD)
        self.notes: list[Any] = []

    def note_norms(self) -> None:
        self.notes.append([p.grad is None for p in self.parameters()])
        self.notes.append([float(p.grad.norm()) for p in self.parameters() if p.grad is not None])


class _NotesNorms(Noting):
    def on_after_backward(self) -> None:
        self.notes.append(dict(lightning_grad_norm(self, 2)))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.notes += [float(get_total_norm(grads, order)) for order in (1, 2, 3.5, float("inf"))]
        self.notes += [float(norm) for norm in torch._foreach_norm(grads, 1)]
        self.notes += [float(grad_norm(self)), float(grads[0].norm("fro")), float(grads[0].norm(0))]
        self.notes += [grad.norm(dim=-1).tolist() for grad in grads]

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.notes.append("before zero_grad")


class _Reads(Noting):
    """Reads gradients in every way that gathers them."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        first, *_, last = [p.grad for p in self.parameters()]
        assert first is not None
        assert last is not None
        self.notes += [
            (first + 1).tolist(),
            first.cpu().clone().tolist(),
            first.data.numpy().tolist(),
            first.tolist(),
            copy.deepcopy(first).tolist(),
            pickle.loads(pickle.dumps(first)).tolist(),
            first[1].sum().item(),
            (last.detach() * last).sum().item(),
            torch.histc(first.float(), bins=5).tolist(),
            last.mean().item(),
            last.shape,
            torch.isfinite(last).all().item(),
            full_grad(next(self.parameters())).tolist(),
            torch.cat([p.grad.flatten() for p in self.parameters()]).tolist(),
        ]


class _ClipsByNorm(Noting):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.notes.append(float(clip_grad_norm_(self.parameters(), 0.1)))
        self.notes.append(float(clip_grad_norm_(self.parameters(), 0.05, norm_type=1)))


class _ClipsByValue(Noting):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip_grad_value_(self.parameters(), 0.02)
        clip_grad_value_([self.head.weight], 0.01, foreach=True)
        self.note_norms()


class _Operates(Noting):
    """Gradient surgery of every kind."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weights = [block.linear.weight for block in self.net.blocks]
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
        with gathered(self.head):
            self.head.weight.grad = self.head.weight.grad.clone() + self.head.weight.detach()
        self.head.bias.grad = None
        self.net.stem.bias.grad.zero_()
        self.net.stem.weight.grad.copy_(mask)
        others = [weight.grad for weight in weights]
        torch._foreach_mul_(others, 0.5)
        torch._foreach_add_(others, [weight.grad.clone() for weight in reversed(weights)])
        self.note_norms()


class _Keeps(Noting):
    """Keeps gradients when their parameters have others, or none, and puts some back."""

    kept: tuple[Tensor | None, ...] = ()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        former, self.kept = self.kept, tuple(p.grad for p in self.parameters())
        self.notes += [
            float((now - then).norm()) for now, then in zip(self.kept, former, strict=bool(former))
        ]
        views = [grad.detach() for grad in self.kept]
        bias = self.head.bias
        bias.grad = bias.grad * 3
        self.notes.append((bias.grad - views[-1]).tolist())
        for parameter in self.net.parameters():
            parameter.grad = parameter.grad.data
        optimizer.zero_grad()
        for parameter, grad in zip(self.parameters(), views, strict=True):
            parameter.grad = grad if parameter.ndim > 1 else grad.mul_(2.0) * 0.5


class _Hooked(Noting):
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


class _Drops(Noting):
    """Drops the gradients of every other step, by one of three ways."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step % 4 == 1:
            self.zero_grad()
        if self.global_step % 4 == 2:
            for parameter in self.head.parameters():
                parameter.grad = None
        if self.global_step % 4 == 3:
            self.net.zero_grad(set_to_none=False)
        self.note_norms()


class _Unused(Noting):
    """A block has no gradient in every other step, and then none is seen."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.stem(x)
        for index, block in enumerate(self.net.blocks):
            if index != 1 or self.global_step % 2:
                x = block(x)
        return self.head(x)

    def on_after_backward(self) -> None:
        self.notes.append([p.grad is None for p in self.parameters()])
        self.notes.append(dict(lightning_grad_norm(self, 2)))


CASES = [_NotesNorms, _Reads, _ClipsByNorm, _ClipsByValue, _Operates, _Keeps, _Hooked, _Drops]


def _train(strategy: Any, case: type[Noting]) -> Run:
    module = case()
    run = fit(module, strategy, max_steps=5, max_epochs=-1)
    run.notes = module.notes
    return run


@pytest.mark.parametrize(("case", "stage"), list(zip(CASES, cycle((1, 2)), strict=False)))
def test_gradients_on_parameters_are_those_of_ddp(
    ranks: Pools, case: type[Noting], stage: int
) -> None:
    runs = ranks(2).run(under_all, _train, case, stages=(stage, 3))
    assert len(runs[0]["ddp"].notes) >= 5
    assert_like_ddp(runs)


def test_unused_parameters_have_none(ranks: Pools) -> None:
    runs = ranks(3).run(_train_with_unused)
    assert_like_ddp(runs)


def _train_with_unused() -> dict[Any, Run]:
    ddp = "ddp_find_unused_parameters_true"
    return {"ddp": _train(ddp, _Unused), **{stage: _train(stage, _Unused) for stage in (1, 2, 3)}}


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


class _Overrides(Noting):
    """Overrides every hook around a step and notes when it is called and what it sees."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.notes.append(["backward", loss.item()])
        super().backward(loss, *args, **kwargs)

    def on_before_backward(self, loss: Tensor) -> None:
        self.notes.append(["before backward", loss.item()])

    def on_after_backward(self) -> None:
        self.notes.append(["after backward", self.global_step])

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.notes.append("clip")
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        self.note_norms()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.notes.append(["before step", self.global_step])
        with gathered(self):
            for name, parameter in self.named_parameters():
                histogram = torch.histc(parameter.detach(), bins=2, min=-2, max=3.5)
                self.notes.append([name, float(parameter.norm()), histogram.tolist()])
                self.notes.append(parameter.detach().clone())
        if isinstance(optimizer, torch.optim.Optimizer):
            self.notes.append(len(optimizer.param_groups))

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None
    ) -> None:
        # Warms the rate up, as Lightning's documentation shows.
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.global_step + 1) / 3)
        self.notes.append(["step", epoch, batch_idx])
        optimizer.step(closure=closure)
        self.notes.append("stepped")

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.notes.append(["zero", epoch, batch_idx])
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)
        self.notes.append([p.grad is None for p in self.parameters()])

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.notes.append("before zero_grad")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.notes.append(["schedule", metric])
        super().lr_scheduler_step(scheduler, metric)
        self.notes.append(scheduler.get_last_lr())

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class _StepsLater(_Overrides):
    """Steps by hand, with the closure that it was given run first."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None
    ) -> None:
        loss = closure()
        self.notes.append(["ran", None if loss is None else loss.item()])
        optimizer.step(closure=lambda: loss)


def _override(strategy: Any, case: type[Noting], accumulate: int) -> Run:
    module = case()
    run = fit(
        module,
        strategy,
        max_epochs=2,
        gradient_clip_val=0.2,
        accumulate_grad_batches=accumulate,
        data=(rows(12),),
    )
    run.notes = module.notes
    return run


@pytest.mark.parametrize(
    ("case", "accumulate", "stage"), [(_Overrides, 1, 1), (_Overrides, 2, 2), (_StepsLater, 1, 2)]
)
def test_overrides_are_called_once_per_step(
    ranks: Pools, case: type[Noting], accumulate: int, stage: int
) -> None:
    runs = ranks(2).run(under_all, _override, case, accumulate, stages=(stage, 3))
    steps = runs[0]["ddp"].notes.count("clip")
    assert steps == {1: 6, 2: 4}[accumulate]
    assert_like_ddp(runs)


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


class _WithoutElements(Noting):
    """Has a parameter without elements, and notes its states in the optimizer and on disk."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW
        self.none = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.none.sum()

    def on_train_end(self) -> None:
        optimizer = self.trainer.optimizers[0]
        self.notes.append(optimizer.state[self.none])
        path = self.trainer.strategy.broadcast(tempfile.mkdtemp()) + "/saved.ckpt"
        self.trainer.save_checkpoint(path)
        self.notes.append(torch.load(path)["optimizer_states"][0]["state"])
        optimizer.load_state_dict(torch.load(path)["optimizer_states"][0])
        self.notes.append(optimizer.state_dict()["state"])


def test_parameters_without_elements_have_states(ranks: Pools) -> None:
    runs = ranks(2).run(under_all, _train, _WithoutElements, stages=(2, 3))
    states = [note for note in runs[0][3].notes if isinstance(note, dict)]
    assert states[0]["exp_avg"].shape == (0, 4)
    assert states[0]["step"] == 5
    assert_like_ddp(runs)
