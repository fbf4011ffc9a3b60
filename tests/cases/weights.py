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
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.overrides import BaseTorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import BaseTorchDispatchMode

from lightning_zero import ZeROStrategy, full_grad, gathered, join
from tests.cases import scheduled, user
from tests.oracle.eight_bits import quantize
from tests.oracle.models import Block
from tests.oracle.play import UNUSED, Player, case, widen
from tests.oracle.projects import WAYS, WIDTH, ByHand, Noted, Regression, Trace, rows

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


@case("weights in hooks")
def orthogonal_amid_a_run(play: Player) -> Trace:
    orthogonal = lambda m: nn.utils.parametrizations.orthogonal(m.head) and None  # noqa: E731
    # DDP leaves out of its averages what lies in other memory than when it began.
    how = {"build" if play.is_ddp else "on_fit_start": orthogonal}
    return play.fit(user(Regression, **how)(), max_steps=3)


def by_array(p: Tensor) -> None:
    array = p.detach().numpy()
    array *= 0.98


EDITS: list[Callable[[Any], Any]] = [
    lambda p: p.data.clamp_(-0.3, 0.3),
    lambda p: p.clamp_(-0.3, 0.3),
    lambda p: p.mul_(0.98),
    lambda p: setattr(p, "data", 0.98 * p.data),
    lambda p: p.copy_(0.98 * p),
    lambda p: p.div_(p.norm().clamp_min(1.0)),
    by_array,
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


# Weights that hooks edit or read in half precision would be off by thousands of fp32's roundings.
MASTERS: dict[str, Any] = {"precisions": ("bf16-mixed",), "stages": (1, 2, 3), "dtype": torch.float32, "ulps": 64}  # fmt: skip
EDITED: dict[str, Any] = {"moments": dict.fromkeys(EDITING_HOOKS, edit_all), **SHORT}
AVERAGING: dict[str, Any] = {"data": SHORT["data"], "max_epochs": 3}
for name, module, how in (("edits", Noted, EDITED), ("averages", Averaging, AVERAGING)):
    case("weights in hooks", module, name, **how, worlds=(1, 2), stages=(1, 2, 3), ulps=64 * (name == "averages"))  # fmt: skip
    case("weights in hooks", module, f"{name}_of_masters", **how, **MASTERS, limit_train_batches=3)
    case("weights in hooks", module, f"{name}_accumulating", **how, ulps=64, accumulate_grad_batches=2)  # fmt: skip
case("weights in hooks", Noted, "edits_of_copies", **EDITED, worlds=(4,), precisions=("32-true", "bf16-mixed"),
     settings=({"shard": 2},), ulps=64)  # fmt: skip
AVERAGED = user(build=lambda m: setattr(m, "average", AveragedModel(m.net).requires_grad_(False)))
case("weights in hooks", AVERAGED, "of_torch", **SHORT, moments={"on_train_batch_end": average_by_torch})  # fmt: skip
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


@torch.no_grad()
def edit(m: Any, ways: Iterable[int]) -> None:
    for parameter, how in zip(m.parameters(), itertools.cycle(ways), strict=False):
        EDITS[how % len(EDITS)](parameter)


def edit_around(m: Any, batch: Any, batch_idx: int) -> Tensor:
    """Change weights before a forward, and where torch allows it also behind one."""
    edit(m, range(batch_idx, batch_idx + 8))
    if batch_idx == 1:
        m.load_state_dict({n: 0.98 * value for n, value in m.state_dict().items()})
    loss = Noted.training_step(m, batch, batch_idx)
    edit(m, [0])
    return loss


def edit_behind(m: Any, batch: Any, batch_idx: int) -> None:
    """Change weights right after the optimizer's step, before the new ones have arrived."""
    ByHand.training_step(m, batch, batch_idx)
    edit(m, range(batch_idx, batch_idx + 8))


IN_STEPS = {"around": user(training_step=edit_around), "behind": user(ByHand, training_step=edit_behind)}  # fmt: skip
MOMENT = {"moments": {"on_validation_batch_start": lambda m, *_: edit(m, range(8))}}
for name, module in IN_STEPS.items():
    case("weights in hooks", module, f"edits_{name}_steps", **SHORT, **MOMENT, stages=(1, 2, 3))
case("weights in hooks", module, "edits_of_masters_behind_steps", **SHORT, **MOMENT, **MASTERS)


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
    case("weights in hooks", Noted, f"reads_{number}", moments=dict.fromkeys(MOMENTS[number::2], read_all), **THREE,
         stages=(3, 1 + number, 3), precisions=("32-true", "bf16-mixed", "bf16-mixed"))  # fmt: skip


def read_around(m: Any, batch: Any) -> Tensor:
    before, loss, after = read_all(m), Noted.loss(m, batch), read_all(m)
    m.notes += [before, after]
    return loss


case("weights in hooks", user(loss=read_around), "reads_in_steps", **THREE, stages=(1, 2, 3))


# -- Lightning's averages --------------------------------------------------------------------------


def partly_frozen(m: Any) -> None:
    m.net.blocks[1].norm = nn.BatchNorm1d(WIDTH)  # a buffer that training changes
    m.head.bias.requires_grad_(False)


Averaged = user(
    Regression,
    partly_frozen,
    configure_optimizers=lambda m: scheduled(SGD(m.parameters(), 0.1, momentum=0.9), 0.8, "epoch"),
    validation_step=lambda m, batch, _: m.notes.append(m.loss(batch).item()),
)


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


def by_inputs(module: Regression, batch: list[Tensor]) -> Tensor:
    loss = lambda x: Regression.loss(module, (x, batch[1]))  # noqa: E731
    out, tangent = jvp(module, (batch[0],), (batch[1],))
    curvature = vmap(hessian(lambda x: module(x).sum()))(batch[0]).pow(2).sum()
    penalty = grad(loss)(batch[0]).pow(2).sum() + loss(batch[0])
    return F.mse_loss(out, batch[1]) + tangent.pow(2).mean() + curvature + penalty


for transform in (maml, by_inputs):
    case("transforms", user(Regression, loss=transform), transform.__name__, max_steps=2, ulps=64, ddp=UNUSED, stages=(1, 2),
         transports=tuple(WAYS))  # fmt: skip


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
        self.do(lambda: full_grad(self.head.weight))
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
        with gathered(self):
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


def kept_by_one_rank(module: Regression) -> Tensor:
    """Ranks whose graphs differ still gather the same weights."""
    scale, total = scaled(module)
    if module.global_rank:
        total = total.detach()
    norms = [p.detach().norm() for p in (*module.parameters(), *module.parameters())]
    found = torch.autograd.grad(total, scale)[0].sum() if module.global_rank == 0 else 0.0
    return sum(norms) + found


for graph in (by_weights, read_between, kept_by_one_rank):
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


LATE: dict[str, Any] = {"max_steps": 2, "moments": {"on_train_batch_end": keep_a_graph}}
case("weights in hooks", Regression, "a_graph_of_weights_that_are_gone", **LATE, stages=(1, 2, 3),
     precisions=("32-true", "bf16-mixed", "32-true"))  # fmt: skip
case("weights in hooks", user(Regression, lambda m: m.head.requires_grad_(False)), "a_graph_of_weights_not_stepped", **LATE,
     stages=(1, 2))  # fmt: skip


# -- gathered, moved, lent or kept, and read later --------------------------------------------------

EVERY: dict[str, Any] = {"max_steps": 3, "stages": (1, 2, 3)}


def is_ours(module: Any) -> bool:
    return isinstance(module.trainer.strategy, ZeROStrategy)


@torch.no_grad()
def moved(p: Tensor) -> None:
    """Change the storage, as cuDNN's RNNs do when they flatten their weights."""
    p.set_(0.98 * p)  # type: ignore[call-overload]


def edited_gathered(m: Any, *_: Any) -> Any:
    """Edit what is gathered, on rank 0 in each way; DDP would not average what is moved."""
    ways = EDITS[3], by_array, moved
    with gathered(m, modify=True):
        for number, parameter in enumerate(m.parameters()):
            if not is_ours(m):
                parameter.data.mul_(0.98)
            elif m.global_rank == 0:
                ways[number % 3](parameter)
    with gathered(m), gathered(m.head):
        return float(m.head.bias.sum())


def move_first(m: Any, batch: Any) -> Tensor:
    """Move the weights before every forward."""
    for parameter in m.parameters():
        moved(parameter) if is_ours(m) else parameter.data.mul_(0.98)
    return Noted.loss(m, batch)


class Keeping(Block):
    """Keeps views of its weight from its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.linear.weight.data, self.linear.weight.detach()[1:]]
        return super().forward(x)


def note_views(m: Any, *_: Any) -> None:
    m.notes.append([view.clone() for view in m.net.blocks[1].kept])


def step_with_views(m: Any, batch: Any, batch_idx: int) -> Tensor:
    """Read views that were taken of gathered weights, when these may be gone."""
    with gathered(m):
        views = [p.detach() for p in m.parameters()]
    loss = Noted.training_step(m, batch, batch_idx)
    m.notes.append([view.clone() for view in views])
    return loss


def snapshot(m: Any, *_: Any) -> None:
    """Keep what is read between steps, which is a snapshot; DDP's goes on changing."""
    state, views = m.state_dict(), [p.detach()[:1] for p in m.parameters()]
    arrays = [torch.from_numpy(p.detach().numpy()) for p in m.parameters()]
    if is_ours(m):
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in state.values())
    found = state, views, arrays
    m.notes.append(found if is_ours(m) else copy.deepcopy(found))


@torch.no_grad()
def read_alone(m: Any, *_: Any) -> Any:
    """Weights that are whole on each rank need no other rank, over any transport."""
    if m.global_rank == 0:
        return None
    return float(sum(p.sum() for p in m.parameters())), m(torch.ones(2, WIDTH))


def measure_alone(m: Any, *_: Any) -> None:
    """Call a module without parameters on one rank only."""
    if m.global_rank == 0:
        zeros = torch.zeros(2)
        assert m.metric(zeros, zeros) == 0


@torch.no_grad()
def join_unevenly(m: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    """Call the module, or a part, as often as each rank likes; then all go on together."""
    with join(m):
        x = batch[0]
        for _ in range(3 * m.global_rank + batch_idx):
            x = m(x)
        if m.global_rank == 1:
            x = m.net.blocks[2](x)
    m.notes += [x, m(torch.ones(2, WIDTH))]


def double(m: Any) -> None:
    """Put a user's function in the place of a unit's forward, which copies keep."""
    plain = m.net.blocks[1].forward
    m.net.blocks[1].forward = lambda x: 2 * plain(x)


@torch.no_grad()
def call_a_copy(m: Any, *_: Any) -> Tensor:
    return copy.deepcopy(m.net.blocks[1])(torch.ones(2, WIDTH))


class Digits(Noted):
    """Edits an element of each parameter between steps and in one; no other loses a digit."""

    @torch.no_grad()
    def edit(self, value: float) -> None:
        expected = {name: x.clone() for name, x in self.state_dict().items()}
        for name, parameter in self.named_parameters():
            parameter.view(-1)[0] = expected[name].view(-1)[0] = value
        assert all(torch.equal(x, expected[name]) for name, x in self.state_dict().items())

    def on_train_batch_end(self, *_: Any) -> None:
        self.edit(0.5)
        with gathered(self, modify=True):
            self.edit(0.25)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for value in (0.75, 0.125):  # the scale of a block is another one the second time
            self.edit(value)
        return super().training_step(batch, batch_idx)


# Ranks broadcast a module's buffers together.
JOINS = user(build=lambda m: m.register_buffer("shift", torch.zeros(WIDTH)))
METERED = user(build=lambda m: m.add_module("metric", nn.MSELoss()))
EVERYWHERE: dict[str, Any] = {**EVERY, "transports": tuple(WAYS)}
AFTER_BATCHES: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "edited_gathered": ("weights in hooks", Noted, edited_gathered, EVERY),
    "snapshots": ("weights in hooks", Noted, snapshot, {**EVERY, "worlds": (1, 2)}),
    "read_alone": ("weights in hooks", Noted, read_alone, {**EVERYWHERE, "stages": (1, 2, 1)}),
    "metered": ("weights in hooks", METERED, measure_alone, EVERYWHERE),
    "joins": ("loops", JOINS, join_unevenly, {**EVERYWHERE, "worlds": (2, 3), "ulps": 8}),
    "doubling": ("recompute", user(build=double), call_a_copy, {"max_steps": 2, "settings": ({"activation_checkpointing": True},)}),
}  # fmt: skip
for name, (feature, module, use, how) in AFTER_BATCHES.items():
    case(feature, module, name, **how, moments={"on_train_batch_end": use})
case("weights in hooks", user(loss=move_first), "moved", **EVERY)
KEEPING = user(build=lambda m: m.net.blocks.__setitem__(1, Keeping(WIDTH)), training_step=step_with_views)  # fmt: skip
case("weights in hooks", KEEPING, "views", **EVERY, settings=({"units": {Block, Keeping}},), data=SHORT["data"],
     moments=dict.fromkeys(("on_before_backward", "on_before_optimizer_step", "on_validation_batch_end"), note_views))  # fmt: skip
case("weights in hooks", Digits, max_steps=3, ulps=2**20, settings=({"gather_bits": 8, "reduce_bits": 8},), stages=(3,),
     transports=("point to point",))  # fmt: skip
# A frozen body in eight bits, whose numbers DDP and every stage keep whole.
QUANTIZED = user(Regression, lambda m: [quantize(block.linear) for block in m.net.blocks])
case("weights in hooks", QUANTIZED, "frozen_weights_in_eight_bits", max_steps=3, stages=(1, 2, 3),
     precisions=("32-true", "32-true", "bf16-mixed"), rests=True, save_at=1)  # fmt: skip
widen("by_inputs", "within_profiler")
widen("average_mean", worlds=(1, 2))
