"""Whatever of the package runs within a context of torch that user code has entered is not in it.

Transforms of ``torch.func`` in a training step; and everything that a run does (forward, backward,
a step, reads and edits of weights, collectives, a checkpoint) within each kind of context.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_zero
from lightning_zero.engine import engine_of
from tests.oracle.projects import WIDTH, Regression, Run, assert_like_ddp, fit, under_all, wired
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


def linearized(module: Regression, batch: list[Tensor]) -> Tensor:
    out, tangent = linearize(module, batch[0])
    return out.pow(2).mean() + tangent(batch[1]).pow(2).mean()


TRANSFORMS = [
    maml, gradients_of_all_weights, gradients_of_each_row, tangents, pulled_back, curvature,
    jacobians, penalty, linearized,
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
    assert_like_ddp(ranks(2).run(under_all, transform, index, stages=(1 + index % 2, 3)), ulps=64)


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


def scaled(module: Regression) -> Tensor:
    """Differentiate by something that all weights scale."""
    scale = torch.ones(2, requires_grad=True)
    total = sum((p * scale[0]).pow(2).sum() for p in module.parameters())
    return torch.autograd.grad(total, scale)[0]


def scaled_data(module: Regression) -> Tensor:
    """The graph saves views of weights, which nothing else keeps."""
    scale = torch.ones(2, requires_grad=True)
    total = sum((p.data.view(-1) * scale[0]).pow(2).sum() for p in module.parameters())
    return torch.autograd.grad(total, scale)[0]


def by_weights(module: Regression) -> Tensor:
    """Differentiate twice by the weights themselves."""
    weights = list(module.parameters())
    total = sum(p.pow(3).sum() for p in weights)
    grads = torch.autograd.grad(total, weights, create_graph=True)
    second = torch.autograd.grad(sum(g.pow(2).sum() for g in grads), weights)
    return torch.cat([g.flatten() for g in second])


def read_between(module: Regression) -> Tensor:
    """All weights are read between two passes over a graph."""
    scale = torch.ones(2, requires_grad=True)
    total = sum((p * scale[0]).pow(2).sum() for p in module.parameters())
    first = torch.autograd.grad(total, scale, retain_graph=True)[0]
    norms = sum(p.detach().norm() for p in module.parameters())
    return first + torch.autograd.grad(total, scale)[0] + norms


def transformed_scale(module: Regression) -> Tensor:
    return grad(lambda z: sum((p * z[0]).pow(2).sum() for p in module.parameters()))(Z)


def pulled_scale(module: Regression) -> Tensor:
    _, pull = vjp(lambda z: sum((p * z[0]).pow(2).sum() for p in module.parameters()), Z)
    return pull(torch.ones(()))[0]


def transformed_weights(module: Regression) -> Tensor:
    """Weights at rest are arguments of a transform, in which they cannot be noticed."""
    found = grad(lambda weights: sum(p.pow(3).sum() for p in weights))(tuple(module.parameters()))
    return torch.cat([g.flatten() for g in found])


def transformed_copies(module: Regression) -> Tensor:
    weights = tuple(p.detach() for p in module.parameters())
    found = grad(lambda weights: sum(p.pow(3).sum() for p in weights))(weights)
    return torch.cat([g.flatten() for g in found])


def mapped_weights(module: Regression) -> Tensor:
    weights = [block.linear.weight for block in module.net.blocks]
    return sum(vmap(lambda *rows: sum(rows))(*weights))


def tangents_of_weights(module: Regression) -> Tensor:
    weights = tuple(module.parameters())
    ones = tuple(torch.ones(p.shape) for p in weights)
    return jvp(lambda *given: sum(p.pow(3).sum() for p in given), weights, ones)[1]


def scaled_in_gathered(module: Regression) -> Tensor:
    with lightning_zero.gathered(module):
        return scaled(module)


def kept_by_one_rank(module: Regression) -> Tensor:
    """Ranks whose graphs differ still gather the same weights."""
    scale = torch.ones(2, requires_grad=True)
    total = sum((p * scale[0]).pow(2).sum() for p in module.parameters())
    if module.global_rank:
        total = total.detach()
    norms = [p.detach().norm() for p in (*module.parameters(), *module.parameters())]
    found = torch.autograd.grad(total, scale)[0].sum() if module.global_rank == 0 else 0.0
    return sum(norms) + found


def traced(module: Regression) -> Tensor:
    x = torch.ones(2, WIDTH)
    exported = torch.export.export(module.net, (x,)).module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jitted = torch.jit.trace(func=module.net, example_inputs=x, check_trace=False)
    total = sum(p.sum() for p in module.parameters())  # others are whole by now
    return make_fx(module.net)(x)(2 * x) + exported(2 * x) + jitted(2 * x) + total


GRAPHS = [
    traced, scaled, scaled_data, by_weights, read_between, transformed_scale, pulled_scale,
    transformed_weights, transformed_copies, mapped_weights, tangents_of_weights,
    scaled_in_gathered, kept_by_one_rank,
]  # fmt: skip


class Differentiating(Regression):
    """Differentiates between steps."""

    graph: Callable[..., Tensor]

    def on_train_start(self) -> None:
        """A graph that is dropped keeps nothing whole."""
        for parameter in self.parameters():
            self.losses.append(float(parameter.norm()))
        engine = engine_of(self.parameters())
        assert engine is None or engine.sharded.shown.num_touched <= 2

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses += self.graph(self).detach().flatten().tolist()


def differentiate(strategy: Any, index: int) -> Run:
    module = Differentiating()
    object.__setattr__(module, "graph", GRAPHS[index])
    return fit(module, strategy, max_steps=2)


def differentiate_over(way: str, index: int) -> dict[str | int, Run]:
    with wired(way):
        return under_all(differentiate, index, stages=(1, 3))


@pytest.mark.parametrize("index", range(len(GRAPHS)), ids=lambda i: GRAPHS[i].__name__)
def test_graphs_between_steps_are_as_under_ddp(ranks: Pools, index: int) -> None:
    way = ("windows", "point to point")[index % 2]  # the last needs messages
    assert_like_ddp(ranks(2).run(differentiate_over, way, index), ulps=64)


class Late(Regression):
    """Keeps a graph over a step, which changes the weights that it has saved."""

    total: Tensor | None = None

    def on_train_batch_end(self, *args: Any) -> None:
        if self.total is None:
            self.scale = torch.ones(2, requires_grad=True)
            self.total = sum((p * self.scale[0]).pow(2).sum() for p in self.head.parameters())
        else:
            self.late = torch.autograd.grad(self.total, self.scale)[0]


def keep_over_a_step(precision: str) -> list[str]:
    errors = []
    for strategy in ("ddp", 1, 2, 3):
        with pytest.raises(RuntimeError) as caught:
            fit(Late(), strategy, max_steps=2, precision=precision)
        errors.append(str(caught.value))
    return errors


def keep_what_is_not_stepped() -> list[Tensor]:
    found = []
    for strategy in ("ddp", 1, 2):
        module = Late()
        module.head.requires_grad_(False)
        fit(module, strategy, max_steps=2)
        found.append(module.late)
    return found


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_graph_never_reads_weights_that_are_gone(ranks: Pools, precision: str) -> None:
    for errors in ranks(2).run(keep_over_a_step, precision):
        assert all("modified by an inplace operation" in error for error in errors)


def test_a_graph_may_read_weights_that_no_step_has_changed(ranks: Pools) -> None:
    for of_ddp, *others in ranks(2).run(keep_what_is_not_stepped):
        assert all(torch.equal(one, of_ddp) for one in others)
