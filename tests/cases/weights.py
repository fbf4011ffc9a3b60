"""Weights between steps: read, averaged, edited, saved, differentiated, within torch's contexts."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, linearize, vmap
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.overrides import BaseTorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import BaseTorchDispatchMode

import lightning_zero
from tests.cases import scheduled, user
from tests.oracle.eight_bits import quantize
from tests.oracle.play import UNUSED, Player, case, widen
from tests.oracle.projects import WIDTH, Noted, Regression, Trace, rows

SHORT: dict[str, Any] = {"data": lambda: (rows(), rows(4, seed=1)), "max_epochs": 2}


class Averaging(Noted):
    """Validates with an average of its weights as most projects do, each time in another way."""

    num_validations = 0

    def on_fit_start(self) -> None:
        self.average = {n: p.detach().clone() for n, p in self.named_parameters()}

    def on_train_batch_end(self, *_: Any) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                with torch.no_grad():
                    self.average[name].lerp_(parameter, 0.3)
            else:
                self.average[name] = (0.3 * parameter.data + 0.7 * self.average[name]).clone()

    def on_validation_epoch_start(self) -> None:
        self.num_validations += 1
        self.backup = {}
        for name, parameter in self.named_parameters():
            if self.num_validations % 3 == 0:
                self.backup[name] = parameter.detach().clone()
                parameter.data.copy_(self.average[name])
                continue
            self.backup[name], parameter.data = parameter.data, self.average[name]
            if self.num_validations % 3 == 1:  # the two take turns
                self.average[name] = self.backup[name]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # In a step of mixed precision, data that are replaced must not be used any more.
        params = list(self.parameters()) if self.trainer.precision == "32-true" else []
        backup = [p.data for p in params]
        for parameter in params:
            parameter.data = 0.5 * parameter.data
        super().validation_step(batch, batch_idx)
        for parameter, value in zip(params, backup, strict=True):
            parameter.data = value

    def on_validation_epoch_end(self) -> None:
        for name, parameter in self.named_parameters():
            if self.num_validations % 3 == 1:
                self.average[name] = parameter.data
            parameter.data = self.backup[name]

    def on_train_end(self) -> None:
        self.notes.append({name: value.clone() for name, value in self.average.items()})


def orthogonal(m: Any) -> None:
    """Keep a weight orthogonal, from the beginning or as soon as it trains."""
    if not nn.utils.parametrize.is_parametrized(m.head):
        nn.utils.parametrizations.orthogonal(m.head)


@case("weights in hooks")
def orthogonal_amid_a_run(play: Player) -> Trace:
    module = user(Regression, on_fit_start=orthogonal)()
    if play.is_ddp:  # it leaves out of its averages what lies in other memory than when it began
        orthogonal(module)
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


def averaged() -> Noted:
    module = Noted()
    module.average = AveragedModel(module.net).requires_grad_(False)  # sharded, too
    return module


@torch.no_grad()
def average_by_torch(m: Any, *_: Any) -> Any:
    """Run code of torch that keeps views of many parameters while it goes on to others."""
    m.average.update_parameters(m.net)
    vector = nn.utils.parameters_to_vector(m.net.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, m.net.parameters())
    return [p.detach().clone() for p in m.average.parameters()]


def saved(m: Any) -> Any:
    torch.save(m.state_dict(), file := io.BytesIO())
    assert file.tell() < 10_000, "no more than the weights"
    file.seek(0)
    return torch.load(file)


def save(m: Any) -> Any:
    """Save weights as ``save_pretrained`` does."""
    tensors = pytest.importorskip("safetensors.torch")
    found = tensors.load(tensors.save(m.net.state_dict()))
    assert all(torch.equal(found[n], value) for n, value in m.net.state_dict().items())
    return saved(m)


EDITED: dict[str, Any] = {"moments": dict.fromkeys(EDITING_HOOKS, edit_all), **SHORT}
AVERAGED: dict[str, Any] = {"data": SHORT["data"], "max_epochs": 3, "ulps": 64}
for name, module, how in (("edits", Noted, EDITED), ("averages", Averaging, AVERAGED)):
    case("weights in hooks", module, name, **how, worlds=(1, 2), stages=(1, 2, 3))
    case("weights in hooks", module, f"{name}_of_masters", **how, precisions=("bf16-mixed",), stages=(1, 2, 3))  # fmt: skip
    case("weights in hooks", module, f"{name}_accumulating", **{**how, "ulps": 64}, accumulate_grad_batches=2)  # fmt: skip
case("weights in hooks", Noted, "edits_of_copies", **EDITED, worlds=(4,), precisions=("32-true", "bf16-mixed"),
     settings=({"shard": 2},), ulps=64)  # fmt: skip
case("weights in hooks", averaged, "of_torch", **SHORT, moments={"on_train_batch_end": average_by_torch})  # fmt: skip
case("weights in hooks", Noted, "saves", **SHORT, moments={"on_train_epoch_end": save})
case("weights in hooks", Noted, "saves_of_one_rank", **SHORT, stages=(1, 2),
     moments={"on_train_epoch_end": lambda m: None if m.global_rank else save(m)})  # fmt: skip


def clamp_in_steps(m: Any, optimizer: Any) -> Any:
    """Let hooks of the optimizer change weights, whenever they are registered, and no rank wait."""

    @torch.no_grad()
    def clamp(*_: Any) -> None:
        time.sleep(0.005 * m.global_rank)
        for parameter in m.parameters():
            parameter.clamp_(-0.2, 0.2)

    optimizer.register_step_pre_hook(clamp)
    optimizer.register_step_post_hook(clamp)
    return optimizer


CLAMPED = user(configure_optimizers=lambda m: clamp_in_steps(m, Noted.configure_optimizers(m)),
               on_train_start=lambda m: clamp_in_steps(m, m.trainer.optimizers[0]))  # fmt: skip
case("weights in hooks", CLAMPED, "clamps_in_steps", max_steps=3, stages=(1, 2, 3, 3), precisions=("32-true", "bf16-mixed"),
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


def whole(module: nn.Module) -> list[Tensor]:
    return [p.detach() for p in module.parameters()]


READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda m: [p.norm() for p in m.parameters()],
    "add": lambda m: m.head.weight + 1,
    "data": lambda m: m.head.weight.data.sum(),
    "detach": lambda m: m.head.weight.detach().sum(),
    "clone": lambda m: m.head.weight.clone(),
    "cpu": lambda m: m.head.weight.cpu().sum(),
    "item": lambda m: m.head.weight[0, 0].item(),
    "tolist": lambda m: m.net.blocks[1].linear.bias.tolist(),
    "numpy": lambda m: float(m.net.blocks[1].linear.weight.detach().numpy().sum()),
    "matmul": lambda m: torch.ones(6) @ m.net.blocks[0].linear.weight,
    "equal": lambda m: torch.equal(m.head.bias, torch.ones(6)),
    "linear": lambda m: F.linear(torch.ones(6), m.net.stem.weight),
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "foreach": lambda m: torch._foreach_norm(list(m.parameters())),
    "state dict": lambda m: {k: v.sum() for k, v in m.state_dict().items()},
    "saved": lambda m: float(sum(value.double().sum() for value in saved(m).values())),
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
    def loss(self, batch: Any) -> Tensor:
        self.notes.append(read_all(self))
        loss = super().loss(batch)
        self.notes.append(read_all(self))
        return loss


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
        return scheduled(torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9), 0.8, "epoch")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.notes.append(self.loss(batch).item())


def towards_unit_norm(average: Tensor, current: Tensor, num_averaged: Tensor) -> Tensor:
    mean = average + (current - average) / (num_averaged + 1)
    return mean / mean.norm().clamp_min(0.1)


def keep_average(m: Any) -> Any:
    (callback,) = (c for c in m.trainer.callbacks if isinstance(c, WeightAveraging))
    return {name: value.clone() for name, value in callback._average_model.state_dict().items()}


AVERAGES: dict[str, Callable[[], Callback]] = {
    "ema": lambda: EMAWeightAveraging(decay=0.5),
    "mean": lambda: WeightAveraging(use_buffers=False),
    "multi": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.7)),
    "normed": lambda: WeightAveraging(avg_fn=towards_unit_norm),
}
AVERAGE: dict[str, Any] = {
    "max_epochs": 3,
    "data": lambda: (rows(32, batch_size=8), rows(8, seed=1)),
    "moments": {"on_train_end": keep_average},
}
READERS: list[tuple[str | int, ...]] = [("ddp", 3), (1,), (3,), ("ddp",)]
for (name, make), readers in zip(AVERAGES.items(), READERS, strict=True):
    case("averages", Averaged, f"average_{name}", **AVERAGE, ulps=256, save_at=2, readers=readers,
         callbacks=lambda m=make: [m()])  # fmt: skip
case("averages", Averaged, "average_of_masters", **AVERAGE, precisions=("bf16-mixed",),
     callbacks=lambda: [EMAWeightAveraging(decay=0.9)])  # fmt: skip


@case("averages", ulps=256)
def an_average_begins_with_a_plain_checkpoint(play: Player) -> Trace:
    data, path = AVERAGE["data"](), str(play.folder / "plain.ckpt")
    trainer = play.trainer(max_epochs=1)
    trainer.fit(Averaged(), *data)
    trainer.save_checkpoint(path)
    module, callbacks = Averaged(), [EMAWeightAveraging(decay=0.5)]
    module.on_train_end = lambda: module.notes.append(keep_average(module))
    return play.fit(module, *data, callbacks=callbacks, max_epochs=3, ckpt_path=path)


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


def gradients_of_each_row(module: Regression, batch: list[Tensor]) -> Tensor:
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    grads = vmap(grad(functional_loss(module)), (None, 0, 0))(parameters, *batch)
    return Regression.loss(module, batch) * sum(each.pow(2).sum() for each in grads.values())


def by_inputs(module: Regression, batch: list[Tensor]) -> Tensor:
    loss = lambda x: Regression.loss(module, (x, batch[1]))  # noqa: E731
    out, tangent = jvp(module, (batch[0],), (batch[1],))
    curvature = vmap(hessian(lambda x: module(x).sum()))(batch[0]).pow(2).sum()
    penalty = grad(loss)(batch[0]).pow(2).sum() + loss(batch[0])
    return F.mse_loss(out, batch[1]) + tangent.pow(2).mean() + curvature + penalty


def linearized(module: Regression, batch: list[Tensor]) -> Tensor:
    out, tangent = linearize(module, batch[0])
    return out.pow(2).mean() + tangent(batch[1]).pow(2).mean()


for transform in (linearized, maml, gradients_of_each_row, by_inputs):
    case("transforms", user(Regression, loss=transform), transform.__name__, max_steps=2, ulps=64, ddp=UNUSED, stages=(1, 2),
         is_slow=transform is linearized)  # fmt: skip


# -- contexts --------------------------------------------------------------------------------------


@contextlib.contextmanager
def switched(switch: Callable[[Any], None], within: Any, after: Any) -> Iterator[None]:
    switch(within)
    try:
        yield
    finally:
        switch(after)


def within(context: Callable[[], Any]) -> Callable[..., Any]:
    def call(function: Callable[[], Any]) -> Any:
        with context():
            return function()

    return call


CONTEXTS: dict[str, Callable[..., Any]] = {
    "inference": within(torch.inference_mode),
    "function mode": within(BaseTorchFunctionMode),
    "dispatch mode": within(BaseTorchDispatchMode),
    "device": within(lambda: torch.device("meta")),
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

    automatic_optimization = False

    def __init__(self, context: str) -> None:
        super().__init__(optimizer=lambda p, lr: torch.optim.SGD(p, lr, momentum=0.5))
        self.within, self.has_grad = CONTEXTS[context], context != "inference"
        self.run = self.within if self.has_grad else within(contextlib.nullcontext)

    def do(self, action: Callable[[], Any]) -> Any:
        result = self.within(action)
        self.notes += [result.detach().clone()] if isinstance(result, Tensor) else []
        return result

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        with torch.set_grad_enabled(self.has_grad):
            loss = self.do(lambda: self.loss(batch))
        loss = loss if self.has_grad else self.loss(batch)
        optimizer.zero_grad()
        self.run(lambda: self.manual_backward(loss))
        self.do(lambda: self.head.weight.grad.sum())
        self.do(lambda: lightning_zero.full_grad(self.head.weight))
        self.run(lambda: self.clip_gradients(optimizer, 0.1, "norm"))
        self.run(optimizer.step)
        self.losses.append(loss.item())

    def on_train_batch_end(self, *args: Any) -> None:
        self.do(lambda: self.net.blocks[1].linear.weight.sum())
        self.do(lambda: sum(value.sum() for value in self.state_dict().values()))
        self.do(self.whole_bias)
        self.do(torch.no_grad()(lambda: self.head.bias.mul_(0.5)))
        self.do(self.trainer.strategy.barrier)
        path = f"{self.trainer.default_root_dir}/saved.ckpt"
        self.run(lambda: self.trainer.save_checkpoint(path))
        saved = torch.load(path, weights_only=True)
        self.notes += [saved["state_dict"], saved["optimizer_states"][0]["state"]]

    def whole_bias(self) -> Tensor:
        with lightning_zero.gathered(self):
            return self.head.bias.sum()


for context in CONTEXTS:
    case("contexts", functools.partial(Visited, context), f"within_{context.replace(' ', '_')}", max_steps=2, ulps=64)  # fmt: skip


@torch.compile(backend="eager")
def read_weights(m: Any, *_: Any) -> None:
    m.total = m.head.weight.sum() + m.net.blocks[0].linear.bias.sum()


# A whole hook is compiled; it reads weights between steps.
case("contexts", user(Regression, on_train_batch_end=read_weights), "a_compiled_hook", max_steps=2,
     moments={"on_train_end": lambda m: float(m.total)})  # fmt: skip


# -- graphs between steps --------------------------------------------------------------------------


def scaled(module: Regression) -> tuple[Tensor, Tensor]:
    """Return something, and what it gives with all weights that it scales."""
    scale = torch.ones(2, requires_grad=True)
    return scale, sum((p * scale[0]).pow(2).sum() for p in module.parameters())


def by_weights(module: Regression) -> Tensor:
    """Differentiate twice by the weights themselves."""
    weights = list(module.parameters())
    total = sum(p.pow(3).sum() for p in weights)
    grads = torch.autograd.grad(total, weights, create_graph=True)
    second = torch.autograd.grad(sum(g.pow(2).sum() for g in grads), weights)
    return torch.cat([g.flatten() for g in second])


def read_between(module: Regression) -> Tensor:
    """All weights are read between two passes over a graph."""
    scale, total = scaled(module)
    first = torch.autograd.grad(total, scale, retain_graph=True)[0]
    norms = sum(p.detach().norm() for p in module.parameters())
    return first + torch.autograd.grad(total, scale)[0] + norms


def scaled_in_gathered(module: Regression) -> Tensor:
    with lightning_zero.gathered(module):
        scale, total = scaled(module)
        return torch.autograd.grad(total, scale)[0]


def kept_by_one_rank(module: Regression) -> Tensor:
    """Ranks whose graphs differ still gather the same weights."""
    scale, total = scaled(module)
    if module.global_rank:
        total = total.detach()
    norms = [p.detach().norm() for p in (*module.parameters(), *module.parameters())]
    found = torch.autograd.grad(total, scale)[0].sum() if module.global_rank == 0 else 0.0
    return sum(norms) + found


for graph in (by_weights, read_between, scaled_in_gathered, kept_by_one_rank):
    case("weights in hooks", Noted, f"graph_{graph.__name__}", max_steps=2, ulps=64,
         moments={"on_train_batch_end": lambda m, *_, g=graph: g(m).detach()})  # fmt: skip


def keep_a_graph(m: Any, *_: Any) -> Any:
    """Keep a graph over a step, which changes the weights that it has saved."""
    if not hasattr(m, "kept"):
        m.kept = scaled(m.head)
    elif m.head.weight.requires_grad:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(m.kept[1], m.kept[0])
    else:
        return torch.autograd.grad(m.kept[1], m.kept[0])[0]
    return None


def frozen_head() -> Regression:
    module = Regression()
    module.head.requires_grad_(False)
    return module


LATE: dict[str, Any] = {"max_steps": 2, "moments": {"on_train_batch_end": keep_a_graph}}
case("weights in hooks", Regression, "a_graph_of_weights_that_are_gone", **LATE, stages=(1, 2, 3),
     precisions=("32-true", "bf16-mixed", "32-true"))  # fmt: skip
case("weights in hooks", frozen_head, "a_graph_of_weights_not_stepped", **LATE, stages=(1, 2))


class Quantized(Regression):
    """A frozen body in eight bits, whose numbers DDP and every stage keep whole."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.net.blocks:
            quantize(block.linear)


case("weights in hooks", Quantized, "frozen_weights_in_eight_bits", max_steps=3, stages=(1, 2, 3),
     precisions=("32-true", "32-true", "bf16-mixed"), rests=True, save_at=1)  # fmt: skip
widen("by_inputs", "within_profiler")
widen("average_mean", worlds=(1, 2))


def measure(m: Any, *_: Any) -> None:
    """Call modules without parameters, a metric and a loss, on one rank only."""
    if m.global_rank == 0:
        zeros = torch.zeros(2)
        assert m.metric(zeros, zeros) == m.others[0](zeros, zeros) == 0


def metered() -> Regression:
    module = Regression()
    module.metric, module.others = nn.MSELoss(), nn.ModuleList([nn.L1Loss()])
    return module


case("weights in hooks", metered, max_steps=2, transports=("point to point", "backend"), moments={"on_train_batch_end": measure})  # fmt: skip
