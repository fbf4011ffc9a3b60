"""Whatever of the package runs within a context of torch that user code has entered is not in it.

Transforms of ``torch.func`` in a training step; and everything that a run does (forward, backward,
a step, reads and edits of weights, collectives, a checkpoint) within each kind of context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, jvp, vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_zero
from tests.oracle.projects import Regression, Run, assert_like_ddp, fit, under_all
from tests.oracle.ranks import Pools

UNUSED = "ddp_find_unused_parameters_true"


# -- transforms ------------------------------------------------------------------------------------


def maml(module: Regression, batch: list[Tensor]) -> Tensor:
    parameters = dict(module.net.named_parameters())

    def inner(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(module.net, parameters, (x,)), y)

    def outer(x: Tensor, y: Tensor) -> Tensor:
        grads = grad(inner)(parameters, x, y)
        return inner({name: p - 0.1 * grads[name] for name, p in parameters.items()}, x, y)

    x, y = (part.view(2, 1, -1) for part in batch)
    return vmap(outer)(x, y).mean()


def functional_loss(module: Regression) -> Callable[..., Tensor]:
    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(module, parameters, (x,)), y)

    return loss


def gradients_of_all_weights(module: Regression, batch: list[Tensor]) -> Tensor:
    parameters = dict(module.named_parameters())
    grads, loss = grad_and_value(functional_loss(module))(parameters, *batch)
    return loss + sum(each.pow(2).sum() for each in grads.values())


def gradients_of_each_row(module: Regression, batch: list[Tensor]) -> Tensor:
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    grads = vmap(grad(functional_loss(module)), (None, 0, 0))(parameters, *batch)
    return module.loss(batch) * sum(each.pow(2).sum() for each in grads.values())


def tangents(module: Regression, batch: list[Tensor]) -> Tensor:
    out, tangent = jvp(module, (batch[0],), (batch[1],))
    return F.mse_loss(out, batch[1]) + tangent.pow(2).mean()


def pulled_back(module: Regression, batch: list[Tensor]) -> Tensor:
    out, pull = vjp(module, batch[0])
    return out.pow(2).mean() + pull(out)[0].pow(2).mean()


def curvature(module: Regression, batch: list[Tensor]) -> Tensor:
    return vmap(hessian(lambda x: module(x).sum()))(batch[0]).pow(2).sum()


def jacobians(module: Regression, batch: list[Tensor]) -> Tensor:
    return vmap(jacrev(module))(batch[0]).pow(2).sum()


def penalty(module: Regression, batch: list[Tensor]) -> Tensor:
    return grad(lambda x: module.loss((x, batch[1])))(batch[0]).pow(2).sum() + module.loss(batch)


TRANSFORMS = [
    maml, gradients_of_all_weights, gradients_of_each_row, tangents, pulled_back, curvature,
    jacobians, penalty,
]  # fmt: skip


class Transformed(Regression):
    loss_of: Callable[..., Tensor]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(self, batch)
        self.losses.append(loss.item())
        return loss


def transform(strategy: Any, index: int) -> Run:
    module = Transformed()
    object.__setattr__(module, "loss_of", TRANSFORMS[index])
    return fit(module, UNUSED if strategy == "ddp" else strategy, max_steps=2)


@pytest.mark.parametrize("index", range(len(TRANSFORMS)), ids=lambda i: TRANSFORMS[i].__name__)
def test_transforms_train_as_under_ddp(ranks: Pools, index: int) -> None:
    assert_like_ddp(ranks(2).run(under_all, transform, index, stages=(1, 2, 3)), ulps=64)


# -- contexts --------------------------------------------------------------------------------------


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def switched(switch: Callable[[Any], None], within: Any, after: Any) -> Iterator[None]:
    switch(within)
    try:
        yield
    finally:
        switch(after)


def transformed(call: Callable[[Callable[[Tensor], Any]], Any]) -> Callable[..., Any]:
    """Run functions within a transform, as something that it passes on."""
    return lambda function: call(lambda z: (z.sum(), function()))


def within(context: Callable[[], Any]) -> Callable[..., Any]:
    def call(function: Callable[[], Any]) -> Any:
        with context():
            return function()

    return call


Z = torch.ones(2)
LEVELS = {
    "grad": transformed(lambda run: grad(run, has_aux=True)(Z)[1]),
    "vmap": transformed(lambda run: vmap(run, out_dims=(0, None))(torch.ones(3, 2))[1]),
    "jvp": transformed(lambda run: jvp(run, (Z,), (Z,), has_aux=True)[2]),
    "vjp": transformed(lambda run: vjp(run, Z, has_aux=True)[2]),
}
WITHOUT_GRAD = {
    "inference": within(torch.inference_mode),
    "fake": within(lambda: FakeTensorMode(allow_non_fake_inputs=True)),
}
CONTEXTS: dict[str, Callable[..., Any]] = {
    **LEVELS,
    **WITHOUT_GRAD,
    "function mode": within(Functions),
    "dispatch mode": within(Operations),
    "device": within(lambda: torch.device("meta")),
    "default device": within(lambda: switched(torch.set_default_device, "meta", None)),
    "default dtype": within(
        lambda: switched(torch.set_default_dtype, torch.float64, torch.float32)
    ),
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "deterministic": within(lambda: switched(torch.use_deterministic_algorithms, True, False)),
    "anomaly": within(torch.autograd.detect_anomaly),
    "profiler": within(lambda: profile(activities=[ProfilerActivity.CPU])),
    "saved on cpu": within(torch.autograd.graph.save_on_cpu),
}


class Visited(Regression):
    """Does everything within a context, and notes what it sees there."""

    def __init__(self, context: str, path: str) -> None:
        super().__init__(optimizer=lambda p, lr: torch.optim.SGD(p, lr, momentum=0.5))
        self.within = CONTEXTS[context]
        self.has_grad = context not in WITHOUT_GRAD
        # In a transform nothing may be changed that is not its own, under DDP either.
        self.changes = context not in LEVELS
        self.path = path
        self.automatic_optimization = False
        self.notes: list[Any] = []

    def do(self, action: Callable[[], Any]) -> Any:
        result = self.within(action)
        if isinstance(result, Tensor):
            is_fake = type(result).__name__ == "FakeTensor"
            self.notes.append(list(result.shape) if is_fake else result.detach().clone())
        return result

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        with torch.set_grad_enabled(self.has_grad):
            loss = self.do(lambda: self.loss(batch))
        if not self.has_grad:
            loss = self.loss(batch)
        optimizer.zero_grad()
        plainly = within(contextlib.nullcontext)
        run = self.within if self.changes and self.has_grad else plainly
        run(lambda: self.manual_backward(loss))
        self.do(lambda: self.head.weight.grad.sum())
        self.do(lambda: lightning_zero.full_grad(self.head.weight))
        run(lambda: self.clip_gradients(optimizer, 0.1, "norm"))
        run(optimizer.step)
        self.losses.append(loss.item())

    def on_train_batch_end(self, *args: Any) -> None:
        self.do(lambda: self.net.blocks[1].linear.weight.sum())
        self.do(lambda: sum(value.sum() for value in self.state_dict().values()))
        self.do(self.whole_bias)
        if self.changes:
            self.do(self.halve)
            self.do(self.trainer.strategy.barrier)
        if self.changes and self.has_grad:
            self.do(lambda: self.trainer.save_checkpoint(self.path))

    def halve(self) -> None:
        with torch.no_grad():
            self.head.bias.mul_(0.5)

    def whole_bias(self) -> Tensor:
        with lightning_zero.gathered(self):
            return self.head.bias.sum()


def visit(strategy: Any, context: str, folder: str) -> Run:
    module = Visited(context, f"{folder}/{strategy}.ckpt")
    run = fit(module, strategy, max_steps=2)
    run.notes = module.notes
    if module.changes and module.has_grad:
        saved = torch.load(module.path, weights_only=True)
        run.notes += [saved["state_dict"], saved["optimizer_states"][0]["state"]]
    return run


@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_are_as_under_ddp(ranks: Pools, context: str, tmp_path: Path) -> None:
    assert_like_ddp(ranks(2).run(under_all, visit, context, str(tmp_path), stages=(1, 3)), ulps=64)


class Hooked(Regression):
    """A whole hook is compiled; it reads weights between steps."""

    @torch.compile(backend="eager")
    def on_train_batch_end(self, *args: Any) -> None:
        self.total = self.head.weight.sum() + self.net.blocks[0].linear.bias.sum()

    def on_train_end(self) -> None:
        self.losses.append(float(self.total))


def compile_a_hook(strategy: Any) -> Run:
    return fit(Hooked(), strategy, max_steps=2)


def test_a_hook_may_be_compiled(ranks: Pools) -> None:
    assert_like_ddp(ranks(2).run(under_all, compile_a_hook, stages=(1, 3)))


# -- graphs between steps --------------------------------------------------------------------------


class Differentiating(Regression):
    """Differentiates by something that all weights scale, between steps."""

    def on_train_batch_end(self, *args: Any) -> None:
        scale = torch.ones(2, requires_grad=True)
        total = sum((p * scale[0]).pow(2).sum() for p in self.parameters())
        torch.autograd.grad(total, scale)


def differentiate() -> str:
    with pytest.raises(RuntimeError) as caught:
        fit(Differentiating(), 3, max_steps=1)
    return str(caught.value)


def test_a_graph_never_reads_weights_that_are_gone(ranks: Pools) -> None:
    for error in ranks(2).run(differentiate):
        assert "modified by an inplace operation" in error
