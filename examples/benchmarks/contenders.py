"""The GPT of the benchmarks, and the ways to train it: DDP, ZeRO, FSDP and others."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from lightning_zero.comm import device_mesh
from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.engine import Engine
from lightning_zero.parameters import make_local
from lightning_zero.plan.plan import RECIPES, Offload
from lightning_zero.plan.settings import Settings


@dataclass(frozen=True)
class Ranks:
    """The processes of a run; with ``fake_world``, rank 0 of so many alone."""

    world: int = 2
    threads: int = 1
    device: str = "cpu"
    fake_world: int = 0


@dataclass(frozen=True)
class Job(Ranks):
    """A run to measure; the defaults give the 34 M parameters of the published figures."""

    dim: int = 512
    layers: int = 8
    heads: int = 8
    vocabulary: int = 8192
    length: int = 128
    batch: int = 4
    steps: int = 8
    warmup: int = 3
    precision: str = "32-true"
    windows: bool = True


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        # With tensor parallelism, a rank has some of the heads.
        heads = self.qkv(self.norm1(x)).view(batch, length, -1, 3, dim // self.heads)
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder with an untied head."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.tokens = nn.Embedding(job.vocabulary, job.dim)
        self.positions = nn.Embedding(job.length, job.dim)
        self.blocks = nn.ModuleList(Block(job.dim, job.heads) for _ in range(job.layers))
        self.norm = nn.LayerNorm(job.dim)
        self.head = nn.Linear(job.dim, job.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class Contender:
    """A model that is ready to train, its optimizer, and the engine if it is ours."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    engine: Engine | None = None
    backward: Callable[[Tensor], None] = Tensor.backward
    step: Callable[[], Any] | None = None
    tensor_size: int = 1


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4, fused=True)


def _alone(model: nn.Module, job: Job) -> Contender:
    return Contender(model, adamw(model))


def _ddp(model: nn.Module, job: Job) -> Contender:
    wrapped = nn.parallel.DistributedDataParallel(model)
    return Contender(wrapped, adamw(wrapped))


def zero(stage: int, **settings: Any) -> Callable[[nn.Module, Job], Contender]:
    def build(model: nn.Module, job: Job) -> Contender:
        recipe = RECIPES[job.precision]
        device = torch.device(job.device)
        comm = None if job.windows else Communicator(device, reads_peers=False)
        engine = Engine(model, Settings(stage, recipe=recipe, device=device, **settings), comm)
        optimizer = adamw(model)
        engine.adopt(optimizer)
        return Contender(model, optimizer, engine)

    return build


def fsdp2(*, reshard: bool, shard: int | None = None) -> Callable[[nn.Module, Job], Contender]:
    def build(model: nn.Module, job: Job) -> Contender:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        recipe, world = RECIPES[job.precision], dist.get_world_size()
        shape = (world,) if shard is None else (world // shard, shard)
        names = ("replicate", "shard")[-len(shape) :]
        options = {
            "mesh": init_device_mesh(job.device, shape, mesh_dim_names=names),
            "mp_policy": MixedPrecisionPolicy(recipe.weight, recipe.reduce),
            "reshard_after_forward": reshard,
        }
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        return Contender(model, adamw(model))

    return build


def _cut(model: nn.Module, device: str) -> Any:
    """Cut a model over pairs of ranks, as for `ModelParallelStrategy`; return the mesh of all."""
    mesh = device_mesh(device, 2)
    plan = {f"blocks.*.{name}": ColwiseParallel() for name in ("qkv", "up")}
    plan |= {f"blocks.*.{name}": RowwiseParallel() for name in ("proj", "down")}
    head = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tensor_parallel"], {**plan, "head": head})
    return mesh


def _adamw_by_parameter(model: nn.Module) -> torch.optim.Optimizer:
    # The fused step takes no DTensors of two meshes, such as those of FSDP2 here.
    return torch.optim.AdamW(model.parameters(), 1e-4, foreach=False)


def _zero_cut(model: nn.Module, job: Job) -> Contender:
    mesh = _cut(model, job.device)
    make_local(model, mesh)
    device = torch.device(job.device)
    settings = Settings(3, recipe=RECIPES[job.precision], device=device)
    comm = Communicator(device, tensor_size=2, reads_peers=None if job.windows else False)
    engine = Engine(model, settings, comm)
    optimizer = _adamw_by_parameter(model)
    engine.adopt(optimizer)
    return Contender(model, optimizer, engine, tensor_size=2)


def _fsdp2_cut(model: nn.Module, job: Job) -> Contender:
    from torch.distributed.fsdp import fully_shard

    mesh = _cut(model, job.device)["data_parallel"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Contender(model, _adamw_by_parameter(model), tensor_size=2)


def _fsdp1(strategy: str) -> Callable[[nn.Module, Job], Contender]:
    def build(model: nn.Module, job: Job) -> Contender:
        from torch.distributed.fsdp import (
            FullyShardedDataParallel,
            MixedPrecision,
            ShardingStrategy,
        )
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        recipe = RECIPES[job.precision]
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=ShardingStrategy[strategy],
            mixed_precision=MixedPrecision(recipe.weight, recipe.reduce),
            device_id=torch.device(job.device),
            use_orig_params=True,
        )
        return Contender(wrapped, adamw(wrapped))

    return build


def _zero_redundancy(model: nn.Module, job: Job) -> Contender:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-4, fused=True
    )
    return Contender(wrapped, optimizer)


def _deepspeed(stage: int) -> Callable[[nn.Module, Job], Contender]:
    def build(model: nn.Module, job: Job) -> Contender:
        import deepspeed

        # Its buckets hold 500 M elements by default. Here they hold the largest unit, as ours do.
        bucket = max(12 * job.dim, job.vocabulary) * job.dim
        sizes = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
        config = {
            "train_micro_batch_size_per_gpu": job.batch,
            "zero_optimization": {"stage": stage, **sizes},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": job.precision == "bf16-mixed"},
        }
        wrapped, optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=adamw(model), config=config
        )
        return Contender(wrapped, optimizer, backward=wrapped.backward, step=wrapped.step)

    return build


CONTENDERS: dict[str, Callable[[nn.Module, Job], Contender]] = {
    "ddp": _ddp,
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
    "zero3 keep": zero(3, reshard_after_forward=False),
    "fsdp2": fsdp2(reshard=True),
    "fsdp2 keep": fsdp2(reshard=False),
    "fsdp1": _fsdp1("FULL_SHARD"),
    "fsdp1 grad_op": _fsdp1("SHARD_GRAD_OP"),
    "zero redundancy": _zero_redundancy,
    "no traffic": _alone,
}
if importlib.util.find_spec("deepspeed"):
    CONTENDERS.update({f"deepspeed {stage}": _deepspeed(stage) for stage in (1, 2, 3)})
OFFLOADED = {
    "zero2 offload": zero(2, offload=Offload.of_stage(2, "cpu")),
    "zero3 offload": zero(3, offload=Offload.of_stage(3, "cpu")),
    "zero3 nvme": zero(3, offload=Offload.of_stage(3, "nvme")),
}
"""Those that only an accelerator's host can hold; run by name."""
CUT = {"zero3 2x2": _zero_cut, "fsdp2 2x2": _fsdp2_cut}
"""Four ranks, two tensor-parallel ones of each model; run by name, with ``--world 4``."""
CONTENDERS.update({**OFFLOADED, **CUT})

NEED_OTHERS = ("ddp", "zero redundancy")
"""Contenders that cannot run on torch's fake backend: DDP waits for a sum that never comes."""


def default_names(job: Job) -> list[str]:
    """Return all contenders that can run; fake collectives are compared with "no traffic"."""
    if not job.fake_world:
        return [name for name in CONTENDERS if name not in (*OFFLOADED, *CUT)]
    unable = (*NEED_OTHERS, *OFFLOADED, *CUT, "no traffic")
    able = [name for name in CONTENDERS if name not in unable]
    return ["no traffic", *able]
