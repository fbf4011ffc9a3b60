"""A plain loop over the engine, and the same loop under DistributedDataParallel.

    def compare(name):                       # top level: ranks import it by name
        require_same(train(name, stage=3), replicate(name))

Tiny models have no module that is worth a unit by itself, so `units` is chosen by name here:
"blocks" cuts at the elements of `ModuleList` and `Sequential`, "leaves" at every module that owns
parameters, "nested" at every module that has any, "root" nowhere.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_zero.comm import Communicator
from lightning_zero.engine import Engine
from lightning_zero.plan import RECIPES, Settings
from tests.oracle.models import MODELS, Batch, Blocks, Case
from tests.oracle.projects import Trace

CPU = torch.device("cpu")
ROWS = 4
"""Of a rank, in a microbatch."""
MASTERS = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
"""The dtype of masters by precision, where it is not fp32."""


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _blocks(model: nn.Module) -> Callable[[nn.Module], bool]:
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    inside = {id(child) for module in lists for child in module}
    return lambda module: id(module) in inside and _has_parameters(module)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


UNITS: dict[str, Callable[[nn.Module], Callable[[nn.Module], bool]]] = {
    "blocks": _blocks,
    "leaves": lambda model: lambda module: bool(module._parameters),
    "nested": lambda model: _has_parameters,
    "root": lambda model: lambda module: False,
}


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


def adopted(
    model: nn.Module, make: Callable[[nn.Module], Any] = sgd, **how: Any
) -> tuple[Engine, Any]:
    """An engine around `model`, and the optimizer that it has adopted."""
    engine = shard(model, **how)
    optimizer = make(model)
    engine.adopt(optimizer)
    return engine, optimizer


def whole(engine: Engine) -> dict[str, Tensor]:
    """Copies of the masters at full shape on the CPU, by name; all ranks call it."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    masters = {names[id(p)]: v.to("cpu", copy=True) for p, v in engine.sharded.whole_parameters()}
    return {name: masters[name] for name in names.values()}


def train(
    case: str | Case,
    make_optimizer: Callable[[nn.Module], Any] = adamw,
    *,
    stage: int | None = 3,
    steps: int = 3,
    accumulate: int = 1,
    precision: str = "32-true",
    policy: str | None = None,
    clip_norm: float = math.inf,
    comm: Communicator | None = None,
    device: torch.device = CPU,
    **how: Any,
) -> Trace:
    """Train on global batches of seeds 0, 1, ..., sharded, or under DDP if there is no `stage`.

    The trace has the masters, rank 0's buffers, this rank's losses, and as notes the norms of the
    averaged gradients before clipping. `how` goes to `shard`.
    """
    case = MODELS[case] if isinstance(case, str) else case
    recipe, device = RECIPES[precision], device if comm is None else comm.device
    model = case.build(dtype=MASTERS.get(precision, torch.float32)).to(device)
    engine = None
    if stage is not None:
        how |= {"comm": comm, "recipe": recipe, "accumulate": policy, "device": device}
        engine = shard(model, stage=stage, **how)
    optimizer = make_optimizer(model)
    loss_of: Any = _WithLoss(case, model)
    if engine is None:
        loss_of = DistributedDataParallel(loss_of, find_unused_parameters=True)
    else:
        engine.adopt(optimizer)
    no_sync = loss_of.no_sync if engine is None else engine.no_sync
    scaler = torch.amp.GradScaler(device.type, enabled=recipe.loss_scaled)
    losses, norms = [], []
    for step in range(steps):
        for micro, part in enumerate(_parts(case, step, accumulate, precision, device)):
            with contextlib.nullcontext() if micro == accumulate - 1 else no_sync():
                watched = engine.step() if engine else contextlib.nullcontext(lambda _: None)
                with watched as watch, _surroundings(precision, device):
                    watch(loss := loss_of(part))
                scaler.scale(loss / accumulate).backward()
            losses.append(loss.item())
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    own = dict(model.named_parameters()) if engine is None else whole(engine)
    buffers = dict(model.named_buffers()) if dist.get_rank() == 0 else {}
    kept = {k: v.detach().to("cpu", copy=True) for k, v in {**own, **buffers}.items()}
    if engine:
        engine.close()
    finite = [norm if math.isfinite(norm) else math.inf for norm in norms]
    return Trace(kept, losses=losses, notes=finite)


replicate = partial(train, stage=None)
"""The same under DistributedDataParallel."""


class _WithLoss(nn.Module):
    """A module whose forward is the loss, as DistributedDataParallel needs it."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        super().__init__()
        self.case, self.model = case, model

    def forward(self, batch: Batch) -> Tensor:
        return self.case.loss(self.model, batch)


def _parts(
    case: Case, step: int, accumulate: int, precision: str, device: torch.device
) -> Iterator[Batch]:
    """This rank's rows in each microbatch of a step; autocast casts them, or they are cast here."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batch = case.batch(world * accumulate * ROWS, step)
    for micro in range(accumulate):
        # Microbatches follow one another, ranks in each.
        part = {k: v.chunk(world * accumulate)[micro * world + rank] for k, v in batch.items()}
        if precision in MASTERS:
            to = MASTERS[precision]
            part = {k: v.to(to) if v.is_floating_point() else v for k, v in part.items()}
        yield {name: value.to(device) for name, value in part.items()}


@contextlib.contextmanager
def _surroundings(precision: str, device: torch.device = CPU) -> Iterator[None]:
    """Enter what a Lightning precision plugin puts around a forward."""
    autocast = RECIPES[precision].autocast
    if autocast is not None:
        with torch.autocast(device.type, autocast, cache_enabled=False):
            yield
        return
    default = torch.get_default_dtype()
    torch.set_default_dtype(MASTERS.get(precision, torch.float32))
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def is_in_file(tensor: Tensor, folder: str) -> bool:
    """Return whether the system has mapped a file of the folder where the tensor's values are."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, path = line.split(maxsplit=5)
        first, last = (int(address, 16) for address in addresses.split("-"))
        if first <= tensor.data_ptr() < last:
            return path.startswith(folder)
    return False


def padded(sizes: list[int], world: int) -> int:
    """Elements of a buffer: each parameter begins at a multiple of 64, all shards are equal."""
    total = sum(-(-size // 64) * 64 for size in sizes)
    return -(-total // (64 * world)) * 64 * world


# ------------------------------------------------------------------- a model for single steps


class Stack(Blocks):
    """A stem, blocks that are units, a head in the root."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__(num_blocks)
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.default_generator.manual_seed(7)
    return make()


def rows(rank: int, seed: int = 0) -> Tensor:
    """One rank's input."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * seed + rank))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()
