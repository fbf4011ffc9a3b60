"""Weights between steps: read, averaged, edited, saved, differentiated, within torch's contexts."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jvp,
    linearize,
    vjp,
    vmap,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_zero
from tests.oracle.eight_bits import quantize
from tests.oracle.play import UNUSED, Player, case, widen
from tests.oracle.projects import WIDTH, Noted, Regression, Trace, rows

SHORT: dict[str, Any] = {"data": lambda: (rows(), rows(4, seed=1)), "max_epochs": 2}


class EMA(Callback):
    """The average that most projects write for themselves."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = {n: p.detach().clone() for n, p in pl_module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            self.average[name].lerp_(parameter, 0.3)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = {n: p.detach().clone() for n, p in pl_module.named_parameters()}
        for name, parameter in pl_module.named_parameters():
            parameter.data.copy_(self.average[name])

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            parameter.data = self.kept[name]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.notes.append(self.average)


class Orthogonal(Regression):
    """Keeps a weight orthogonal, from the beginning or as soon as it trains."""

    def on_fit_start(self) -> None:
        if not nn.utils.parametrize.is_parametrized(self.head):
            nn.utils.parametrizations.orthogonal(self.head)


@case("weights in hooks")
def orthogonal_amid_a_run(play: Player) -> Trace:
    module = Orthogonal()
    if play.is_ddp:  # it leaves out of its averages what lies in other memory than when it began
        module.on_fit_start()
    return play.fit(module, max_steps=3)


def _by_numpy(p: Tensor) -> None:
    array = p.detach().numpy()
    array *= 0.98


EDITS: list[Callable[[Any], Any]] = [
    lambda p: p.data.clamp_(-0.3, 0.3),
    lambda p: p.clamp_(-0.3, 0.3),
    lambda p: p.mul_(0.98),
    lambda p: setattr(p, "data", 0.98 * p.data),
    lambda p: p.copy_(0.98 * p),
    lambda p: p.div_(p.norm().clamp_min(1.0)),
    _by_numpy,
    lambda p: p.__setitem__(0, p.data[0].mul(0.9)),
]
"""Ways to change a parameter in place."""
EDITING_HOOKS = (
    "on_fit_start", "on_train_epoch_start", "on_train_batch_start", "on_after_backward", "on_before_optimizer_step",
    "on_train_batch_end", "on_validation_epoch_end", "on_train_epoch_end", "on_train_end",
)  # fmt: skip


@torch.no_grad()
def edit_all(m: Any, *_: Any) -> float:
    """Change every parameter, in every hook in another way, and read what is written."""
    m.num_edits = getattr(m, "num_edits", 0) + 1
    for index, parameter in enumerate(m.parameters()):
        EDITS[(index + m.num_edits) % len(EDITS)](parameter)
    return sum(float(p.detach().norm()) for p in m.parameters())


class TorchsOwn(Callback):
    """Code of torch that keeps views of many parameters while it goes on to others."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.average = AveragedModel(pl_module.net).requires_grad_(False)  # sharded, too

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.average.update_parameters(pl_module.net)
        vector = nn.utils.parameters_to_vector(pl_module.net.parameters())
        nn.utils.vector_to_parameters(vector * 0.9, pl_module.net.parameters())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.notes.append([p.detach().clone() for p in pl_module.average.parameters()])


class Saves(Callback):
    """Saves weights as ``save_pretrained`` does, on all ranks or on one."""

    def __init__(self, *, of_all: bool) -> None:
        self.of_all = of_all

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not (self.of_all or trainer.is_global_zero):
            return
        tensors = pytest.importorskip("safetensors.torch")
        found = tensors.load(tensors.save(pl_module.net.state_dict()))
        assert all(torch.equal(found[n], value) for n, value in pl_module.net.state_dict().items())
        file = io.BytesIO()
        torch.save(pl_module.state_dict(), file)
        assert file.tell() < 10_000, "no more than the weights"
        file.seek(0)
        pl_module.notes.append(torch.load(file))


EDITED: dict[str, Any] = {"moments": dict.fromkeys(EDITING_HOOKS, edit_all), **SHORT}
AVERAGED: dict[str, Any] = {"callbacks": lambda: [EMA()], **SHORT}
for name, how in {"edits": EDITED, "EMA": AVERAGED}.items():
    case("weights in hooks", Noted, name, **how, worlds=(1, 2), stages=(1, 2, 3))
    case("weights in hooks", Noted, f"{name}_of_masters", **how, precisions=("bf16-mixed",))
    case(
        "weights in hooks", Noted, f"{name}_accumulating", **how, accumulate_grad_batches=2, ulps=64
    )
case("weights in hooks", Noted, "edits_of_copies", **EDITED, worlds=(4,), precisions=("32-true", "bf16-mixed"),
     settings=({"shard": 2},), ulps=64)  # fmt: skip
case("weights in hooks", Noted, "of_torch", **SHORT, callbacks=lambda: [TorchsOwn()])
case("weights in hooks", Noted, "saves", **SHORT, callbacks=lambda: [Saves(of_all=True)])
case("weights in hooks", Noted, "saves_of_one_rank", **SHORT, stages=(1, 2), callbacks=lambda: [Saves(of_all=False)])  # fmt: skip


class ClampsInSteps(Noted):
    """Hooks of the optimizer change weights, whenever they were registered, and no rank waits."""

    def clamp(self, *_: Any) -> None:
        time.sleep(0.005 * self.global_rank)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.2, 0.2)

    def configure_optimizers(self) -> Any:
        return self.hooked(super().configure_optimizers())

    def on_train_start(self) -> None:
        self.hooked(self.trainer.optimizers[0])

    def hooked(self, optimizer: Any) -> Any:
        optimizer.register_step_pre_hook(self.clamp)
        optimizer.register_step_post_hook(self.clamp)
        return optimizer


case("weights in hooks", ClampsInSteps, max_steps=3, stages=(1, 2, 3, 3), precisions=("32-true", "bf16-mixed"),
     transports=("windows", "point to point", "backend"))  # fmt: skip


class EditsInSteps(Noted):
    """Changes weights before a forward, where torch allows it also behind one, and in validation."""

    @torch.no_grad()
    def edit(self, ways: Iterable[int]) -> None:
        for parameter, how in zip(self.parameters(), itertools.cycle(ways), strict=False):
            EDITS[how % len(EDITS)](parameter)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.edit(range(batch_idx, batch_idx + 8))
        if batch_idx == 1:
            self.load_state_dict({n: 0.98 * value for n, value in self.state_dict().items()})
        loss = super().training_step(batch, batch_idx)
        self.edit([0])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.edit(range(8))
        super().validation_step(batch, batch_idx)


class EditsBehindSteps(EditsInSteps):
    """Changes weights right after the optimizer's step, before the new ones have arrived."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss := self.loss(batch))
        optimizer.step()
        self.losses.append(loss.item())
        self.edit(range(batch_idx, batch_idx + 8))


for module in (EditsInSteps, EditsBehindSteps):
    case("weights in hooks", module, **SHORT, stages=(1, 2, 3))


# -- every use in every hook -----------------------------------------------------------------------


def saved(module: nn.Module) -> float:
    torch.save(module.state_dict(), file := io.BytesIO())
    file.seek(0)
    return float(sum(value.double().sum() for value in torch.load(file).values()))


def whole(module: nn.Module) -> list[Tensor]:
    return [p.detach() for p in module.parameters()]


READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda m: [p.norm() for p in m.parameters()],
    "add": lambda m: m.head.weight + 1,
    "data": lambda m: m.head.weight.data.sum(),
    "detach": lambda m: m.head.weight.detach().sum(),
    "clone": lambda m: m.head.weight.clone(),
    "cpu": lambda m: m.head.weight.cpu().sum(),
    "double": lambda m: m.head.weight.to(torch.float64).sum(),
    "item": lambda m: m.head.weight[0, 0].item(),
    "tolist": lambda m: m.net.blocks[1].linear.bias.tolist(),
    "numpy": lambda m: float(m.net.blocks[1].linear.weight.detach().numpy().sum()),
    "matmul": lambda m: torch.ones(6) @ m.net.blocks[0].linear.weight,
    "equal": lambda m: torch.equal(m.head.bias, torch.ones(6)),
    "linear": lambda m: F.linear(torch.ones(6), m.net.stem.weight),
    "stack": lambda m: torch.stack([p.flatten()[0] for p in m.parameters()]),
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "foreach": lambda m: torch._foreach_norm(list(m.parameters())),
    "state dict": lambda m: {k: v.sum() for k, v in m.state_dict().items()},
    "saved": saved,
    "deepcopy": lambda m: whole(copy.deepcopy(m)),
    "copied child": lambda m: whole(pickle.loads(pickle.dumps(copy.deepcopy(m.net)))),
    "parameter": lambda m: pickle.loads(pickle.dumps(m.head.bias)),
    "float": lambda m: whole(m.float().to("cpu", torch.float32)),
    "metadata": lambda m: [
        (p.shape, p.ndim, p.numel(), p.dtype, p.requires_grad) for p in m.parameters()
    ],
}
MOMENTS = (
    "on_fit_start", "on_train_start", "on_train_batch_start", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end", "on_validation_start",
    "on_validation_batch_end", "on_train_epoch_end", "on_train_end", "on_fit_end",
)  # fmt: skip


def read_all(module: Any, *_: Any) -> Any:
    with torch.no_grad():
        return {name: detached(read(module)) for name, read in READS.items()}


def detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [detached(each) for each in value] if isinstance(value, list | tuple) else value


THREE: dict[str, Any] = {"data": SHORT["data"], "max_steps": 3}
# What is read in one hook must not be there for the next: every other one reads.
for number in range(2):
    case("weights in hooks", Noted, f"reads_{number}", moments=dict.fromkeys(MOMENTS[number::2], read_all), **THREE)  # fmt: skip


class ReadsInSteps(Noted):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before = read_all(self)
        loss = super().training_step(batch, batch_idx)
        self.notes += [before, read_all(self)]
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.notes.append(read_all(self))
        super().validation_step(batch, batch_idx)


case("weights in hooks", ReadsInSteps, **THREE, stages=(1, 2, 3))


for moment in ("on_after_backward", "on_train_batch_end"):
    case("weights in hooks", Noted, f"reads_masters_{moment}", moments={moment: read_all}, **THREE, stages=(1, 2, 3),
         precisions=("bf16-mixed",))  # fmt: skip


# -- Lightning's averages --------------------------------------------------------------------------


class Averaged(Regression):
    """SGD with momentum, a buffer that training changes, and notes of what validation saw."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[1].norm = nn.BatchNorm1d(WIDTH)
        self.head.bias.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.notes.append(self.loss(batch).item())


def towards_unit_norm(average: Tensor, current: Tensor, num_averaged: Tensor) -> Tensor:
    mean = average + (current - average) / (num_averaged + 1)
    return mean / mean.norm().clamp_min(0.1)


class KeepsAverage(Callback):
    """Notes the average at the end."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        average = next(
            c for c in trainer.callbacks if isinstance(c, WeightAveraging)
        )._average_model
        pl_module.notes.append({n: t.detach().clone() for n, t in average.state_dict().items()})


AVERAGES: dict[str, Callable[[], Callback]] = {
    "ema": lambda: EMAWeightAveraging(decay=0.5),
    "mean": lambda: WeightAveraging(use_buffers=False),
    "multi": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.7)),
    "normed": lambda: WeightAveraging(avg_fn=towards_unit_norm),
}
AVERAGE: dict[str, Any] = {
    "max_epochs": 3,
    "data": lambda: (rows(32, batch_size=8), rows(8, seed=1)),
}
READERS: list[tuple[str | int, ...]] = [("ddp", 3), (1,), (3,), ("ddp",)]
for (name, make), readers in zip(AVERAGES.items(), READERS, strict=True):
    case("averages", Averaged, f"average_{name}", **AVERAGE, ulps=256, save_at=2, readers=readers,
         callbacks=lambda m=make: [m(), KeepsAverage()])  # fmt: skip
case("averages", Averaged, "average_of_masters", **AVERAGE, precisions=("bf16-mixed",),
     callbacks=lambda: [EMAWeightAveraging(decay=0.9)])  # fmt: skip


@case("averages", ulps=256)
def an_average_begins_with_a_plain_checkpoint(play: Player) -> Trace:
    data, path = AVERAGE["data"](), str(play.folder / "plain.ckpt")
    trainer = play.trainer(max_epochs=1)
    trainer.fit(Averaged(), *data)
    trainer.save_checkpoint(path)
    callbacks = [EMAWeightAveraging(decay=0.5), KeepsAverage()]
    return play.fit(Averaged(), *data, callbacks=callbacks, max_epochs=3, ckpt_path=path)


# -- transforms of torch.func ----------------------------------------------------------------------


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


def curvature(module: Regression, batch: list[Tensor]) -> Tensor:
    return vmap(hessian(lambda x: module(x).sum()))(batch[0]).pow(2).sum()


def penalty(module: Regression, batch: list[Tensor]) -> Tensor:
    return grad(lambda x: module.loss((x, batch[1])))(batch[0]).pow(2).sum() + module.loss(batch)


def linearized(module: Regression, batch: list[Tensor]) -> Tensor:
    out, tangent = linearize(module, batch[0])
    return out.pow(2).mean() + tangent(batch[1]).pow(2).mean()


TRANSFORMS = [
    linearized, maml, gradients_of_all_weights, gradients_of_each_row, tangents, curvature, penalty,
]  # fmt: skip


class Transformed(Regression):
    def __init__(self, loss_of: Callable[..., Tensor]) -> None:
        super().__init__()
        self.loss_of = loss_of

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(self, batch)
        self.losses.append(loss.item())
        return loss


for transform in TRANSFORMS:
    case("transforms", lambda t=transform: Transformed(t), transform.__name__, max_steps=2, ulps=64, ddp=UNUSED,
         stages=(1, 2))  # fmt: skip


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


def visit(context: str) -> Callable[[Player], Trace]:
    def loop(play: Player) -> Trace:
        module = Visited(context, f"{play.folder}/saved.ckpt")
        trace = play.fit(module, max_steps=2)
        if module.changes and module.has_grad:
            saved = torch.load(module.path, weights_only=True)
            trace.notes += [saved["state_dict"], saved["optimizer_states"][0]["state"]]
        return trace

    return loop


for context in CONTEXTS:
    stages = (1, 2) if context in LEVELS else ()  # transforms are refused at stage 3
    case("contexts", name=f"within_{context.replace(' ', '_')}", loop=visit(context), ulps=64, stages=stages)  # fmt: skip


class Hooked(Regression):
    """A whole hook is compiled; it reads weights between steps."""

    @torch.compile(backend="eager")
    def on_train_batch_end(self, *args: Any) -> None:
        self.total = self.head.weight.sum() + self.net.blocks[0].linear.bias.sum()

    def on_train_end(self) -> None:
        self.losses.append(float(self.total))


case("contexts", Hooked, "a_compiled_hook", max_steps=2)


# -- graphs between steps --------------------------------------------------------------------------


def scaled(module: Regression) -> Tensor:
    """Differentiate by something that all weights scale."""
    scale = torch.ones(2, requires_grad=True)
    total = sum((p * scale[0]).pow(2).sum() for p in module.parameters())
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


GRAPHS = (scaled, by_weights, read_between, scaled_in_gathered, kept_by_one_rank)
for graph in GRAPHS:
    case("weights in hooks", Noted, f"graph_{graph.__name__}", max_steps=2, ulps=64,
         moments={"on_train_batch_end": lambda m, *_, g=graph: g(m).detach()})  # fmt: skip


class Late(Regression):
    """Keeps a graph over a step, which changes the weights that it has saved."""

    def __init__(self, *, is_frozen: bool) -> None:
        super().__init__()
        self.total: Tensor | None = None
        self.head.requires_grad_(not is_frozen)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.total is None:
            self.scale = torch.ones(2, requires_grad=True)
            self.total = sum((p * self.scale[0]).pow(2).sum() for p in self.head.parameters())
        elif self.head.weight.requires_grad:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(self.total, self.scale)
        else:
            self.notes.append(torch.autograd.grad(self.total, self.scale)[0])


case("weights in hooks", lambda: Late(is_frozen=False), "a_graph_of_weights_that_are_gone", max_steps=2,
     stages=(1, 2, 3), precisions=("32-true", "bf16-mixed", "32-true"))  # fmt: skip
case("weights in hooks", lambda: Late(is_frozen=True), "a_graph_of_weights_not_stepped", max_steps=2, stages=(1, 2))  # fmt: skip


class Quantized(Regression):
    """A frozen body in eight bits, whose numbers DDP and every stage keep whole."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.net.blocks:
            quantize(block.linear)


case("weights in hooks", Quantized, "frozen_weights_in_eight_bits", max_steps=3, stages=(1, 2, 3),
     precisions=("32-true", "32-true", "bf16-mixed"), rests=True, save_at=1)  # fmt: skip
widen("penalty", "within_profiler")
widen("average_mean", worlds=(1, 2))


class Metered(Regression):
    """Modules without parameters, a metric and a loss, are called in a hook of one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.metric, self.others = nn.MSELoss(), nn.ModuleList([nn.L1Loss()])

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 0:
            zeros = torch.zeros(2)
            assert self.metric(zeros, zeros) == self.others[0](zeros, zeros) == 0


case("weights in hooks", Metered, max_steps=2, transports=("point to point", "backend"))


class Swapping(Noted):
    """Validates with an average of its weights, which take turns with it in one way of two."""

    def on_fit_start(self) -> None:
        self.shadow = {n: p.data.clone() for n, p in self.named_parameters()}
        self.swaps = False

    def on_train_batch_end(self, *_: Any) -> None:
        for n, p in self.named_parameters():
            self.shadow[n] = (0.1 * p.data + 0.9 * self.shadow[n]).clone()

    def on_validation_epoch_start(self) -> None:
        self.swaps = not self.swaps
        self.backup = {}
        for n, p in self.named_parameters():
            self.backup[n] = p.data
            p.data = self.shadow[n]
            if self.swaps:
                self.shadow[n] = self.backup[n]

    def on_validation_epoch_end(self) -> None:
        for n, p in self.named_parameters():
            if self.swaps:
                self.shadow[n] = p.data
            p.data = self.backup[n]


class SwapsInStep(Noted):
    """Validates with other weights within each validation step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        backup = {n: p.data for n, p in self.named_parameters()}
        for p in self.parameters():
            p.data = 0.5 * p.data
        super().validation_step(batch, batch_idx)
        for n, p in self.named_parameters():
            p.data = backup[n]


SWAPS: dict[str, Any] = {"data": SHORT["data"], "max_epochs": 3, "stages": (1, 2, 3)}
case("weights in hooks", Swapping, **SWAPS, ulps=64)
case("weights in hooks", Swapping, "swapping_masters", **SWAPS, precisions=("bf16-mixed",), ulps=64)
case("weights in hooks", SwapsInStep, **SWAPS)


class TakesTurns(Regression):
    """Each rank leaves out one block of two, the other one in the next microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.stem(x)
        for index, block in enumerate(self.net.blocks):
            if index != (self.turn + self.global_rank) % 2:
                x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.turn = batch_idx
        return super().training_step(batch, batch_idx)


case("gradients in hooks", TakesTurns, accumulate_grad_batches=2, max_steps=2, ulps=64, ddp=UNUSED, stages=(1, 2))  # fmt: skip
