"""The plain loop over the engine: what `parity.reference` is held against, on every rank.

    def train_all(stage):                    # top level: ranks import it by name
        return {name: train(name, stage=stage) for name in MODELS}

Tiny models have no module that is worth a unit by itself, so `units` is chosen by name here:
"blocks" cuts at the elements of `ModuleList` and `Sequential`, "leaves" at every module that owns
parameters, "nested" at every module that has any, "root" nowhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.comm import Communicator
from lightning_zero.engine import Engine
from lightning_zero.optimizer import LossScaler, clip
from lightning_zero.plan import RECIPES, Settings
from tests.oracle.models import MODELS, Batch, Case
from tests.oracle.parity import RECIPES as PRECISIONS
from tests.oracle.parity import ROWS, Result, share

CPU = torch.device("cpu")


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def blocks(model: nn.Module) -> Callable[[nn.Module], bool]:
    """The elements of every list of modules."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    inside = {id(child) for module in lists for child in module}
    return lambda module: id(module) in inside and _owns_or_calls(module)


def leaves(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Every module that owns parameters, a MultiheadAttention with what is inside it."""
    closed = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    inside = {id(inner) for module in closed for inner in module.modules() if inner is not module}
    return lambda module: bool(module._parameters) and id(module) not in inside


def nested(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Every module with parameters anywhere, a MultiheadAttention with what is inside it."""
    closed = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    inside = {id(inner) for module in closed for inner in module.modules() if inner is not module}
    return lambda module: id(module) not in inside


def root(model: nn.Module) -> Callable[[nn.Module], bool]:
    return lambda module: False


def _owns_or_calls(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


UNITS = {"blocks": blocks, "leaves": leaves, "nested": nested, "root": root}


def shard(
    model: nn.Module,
    *,
    stage: int = 3,
    units: str = "blocks",
    comm: Communicator | None = None,
    **settings: Any,
) -> Engine:
    """An engine around `model`, cut into units by a name of `UNITS`."""
    return Engine(model, Settings(stage=stage, units=UNITS[units](model), **settings), comm)


def whole(engine: Engine) -> dict[str, Tensor]:
    """Copies of the masters at full shape on the CPU, by name; all ranks call it."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    masters = {names[id(p)]: v.to("cpu", copy=True) for p, v in engine.sharded.whole_parameters()}
    return {name: masters[name] for name in names.values()}


def result_of(engine: Engine, losses: list[float], norms: list[float]) -> Result:
    """Return what the run leaves behind, with the masters whole."""
    named = engine.module.named_buffers()
    buffers = {name: b.detach().to("cpu", copy=True) for name, b in named}
    return Result(losses, whole(engine), buffers if engine.comm.control.rank == 0 else {}, norms)


def train(
    case: str | Case,
    make_optimizer: Callable[[nn.Module], Optimizer] = adamw,
    *,
    steps: int = 3,
    accumulate: int = 1,
    rows: int = ROWS,
    precision: str = "32-true",
    policy: str | None = None,
    clip_norm: float | None = None,
    comm: Communicator | None = None,
    **how: Any,
) -> Result:
    """Train as `parity.reference` does, sharded; `how` goes to `shard`."""
    case = MODELS[case] if isinstance(case, str) else case
    recipe = RECIPES[precision]
    device = CPU if comm is None else comm.device
    model = case.build(dtype=PRECISIONS[precision].master).to(device)
    engine = shard(model, comm=comm, recipe=recipe, accumulate=policy, device=device, **how)
    optimizer = make_optimizer(model)
    engine.adopt(optimizer)
    scaler = LossScaler() if recipe.loss_scaled else None
    rank, world = engine.comm.control.rank, engine.comm.control.world_size
    losses, norms = [], []
    for step in range(steps):
        batch = case.batch(world * accumulate * rows, step)
        step_losses = []
        for micro in range(accumulate):
            is_last = micro == accumulate - 1
            part = cast_inputs(share(batch, rank, world, micro, accumulate), precision)
            part = {name: value.to(device) for name, value in part.items()}
            with contextlib.nullcontext() if is_last else engine.no_sync():
                with engine.step() as watch, surroundings(precision, device):
                    loss = case.loss(model, part)
                    watch(loss)
                factor = 1.0 if scaler is None else scaler.scale
                (loss / accumulate * factor).backward()
            step_losses.append(loss.item())
        norms.append(_step(engine, optimizer, scaler, clip_norm))
        losses.append(sum(step_losses) / accumulate)
    result = result_of(engine, losses, norms)
    engine.close()
    return result


def _step(
    engine: Engine, optimizer: Optimizer, scaler: LossScaler | None, clip_norm: float | None
) -> float:
    """Clip, step, zero; returns the norm before clipping."""
    pieces, comm = engine.sharded.pieces, engine.comm
    found_inf = scaler is not None and clip.unscale(pieces, comm, scaler.scale)
    norm = clip.total_norm(pieces, comm).item()
    if clip_norm is not None:
        clip.clip_by_norm(pieces, comm, clip_norm)
    if not found_inf:
        optimizer.step()
    if scaler is not None:
        scaler.update(found_inf=found_inf)
    optimizer.zero_grad()
    return norm


@contextlib.contextmanager
def surroundings(precision: str, device: torch.device = CPU) -> Iterator[None]:
    """Enter what a Lightning precision plugin puts around a forward."""
    autocast = RECIPES[precision].autocast
    if autocast is not None:
        with torch.autocast(device.type, autocast, cache_enabled=False):
            yield
        return
    default = torch.get_default_dtype()
    torch.set_default_dtype(PRECISIONS[precision].weight)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def cast_inputs(batch: Batch, precision: str) -> Batch:
    """Inputs in the weights' dtype, unless autocast sees to that."""
    recipe = PRECISIONS[precision]
    if recipe.autocast:
        return batch
    return {k: v.to(recipe.weight) if v.is_floating_point() else v for k, v in batch.items()}


def padded(sizes: list[int], world: int) -> int:
    """Elements of a buffer: each parameter begins at a multiple of 64, all shards are equal."""
    total = sum(-(-size // 64) * 64 for size in sizes)
    return -(-total // (64 * world)) * 64 * world
