"""A model with every kind of state, trained, saved and resumed by hand, without a Trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prodigyopt
import pytorch_optimizer
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_zero.checkpoint import load_module_state, module_state
from lightning_zero.engine import Engine
from lightning_zero.fabric import Checkpoints
from lightning_zero.plan import RECIPES, Settings
from tests.oracle.models import Block

NUM_BEFORE, NUM_AFTER = 2, 2


class Everything(nn.Module):
    """Every kind of state that a checkpoint has to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.convolution = nn.Conv1d(6, 6, 3, padding=1)
        self.blocks = nn.ModuleList([Block(6), Block(6), Block(6)])
        self.blocks[1].requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 6))
        self.unused = nn.Linear(3, 5)
        self.planes = nn.Parameter(
            torch.randn(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        )
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.embedding(x)
        x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.flatten(0, 1)).view_as(x) * self.scale + self.planes.sum() * 0.01
        return self.head(torch.cat([x, self.nothing.expand(0, 6).view(0, *x.shape[1:])]))


def elements(model: nn.Module) -> list[Optimizer]:
    """Two optimizers, one of them with two groups."""
    small = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    large = [p for p in model.parameters() if p.ndim >= 2 and p.requires_grad]
    half = len(large) // 2
    groups = [{"params": small, "weight_decay": 0.0}, {"params": large[:half]}]
    adam = torch.optim.AdamW(groups, lr=0.01)
    sgd = torch.optim.SGD(large[half:], lr=0.05, momentum=0.9)
    return [adam, sgd]


class Lbfgs(torch.optim.LBFGS):
    """Keeps lists of tensors in its state; for a step in which nothing is searched."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure or (lambda: torch.zeros(())))


def mixing(model: nn.Module) -> list[Optimizer]:
    """Two optimizers that mix elements: by parameter, and all at once."""
    matrices = [p for p in model.parameters() if p.ndim == 2 and p.requires_grad and p.numel()]
    others = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    muon = [{"params": matrices[:2], "lr": 0.02}, {"params": matrices[2:], "weight_decay": 0.0}]
    return [torch.optim.Muon(muon, lr=0.01), Lbfgs(others, lr=0.1, max_iter=1)]


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and p.numel()]


MIXING: dict[str, Callable[[nn.Module], Any]] = {
    "mixing": mixing,
    "prodigy": lambda m: [prodigyopt.Prodigy(_trained(m))],
    "sam": lambda m: [pytorch_optimizer.SAM(_trained(m), torch.optim.AdamW, lr=0.01)],
    "lookahead": lambda m: [
        pytorch_optimizer.Lookahead(
            torch.optim.AdamW(_trained(m), lr=0.02), k=2, pullback_momentum="pullback"
        )
    ],
    "lookahead of adafactor": lambda m: [
        pytorch_optimizer.Lookahead(torch.optim.Adafactor(_trained(m), lr=0.02), k=3)
    ],
    "schedulefree": lambda m: [
        pytorch_optimizer.ScheduleFreeWrapper(torch.optim.SGD(_trained(m), lr=0.02))
    ],
}
"""Optimizers that are not stepped by element."""

OWN_FORMATS = "lookahead", "lookahead of adafactor", "schedulefree"
"""Those whose state dict is not as torch's, for which there is no place in a directory."""


def build(what: str = "elements") -> tuple[nn.Module, list[Optimizer]]:
    """The model, and the optimizers that have this name."""
    torch.default_generator.manual_seed(0)
    model = Everything()
    return model, MIXING.get(what, elements)(model)


def steps(model: nn.Module, optimizers: list[Optimizer], first: int, count: int) -> list[float]:
    """Train, every rank on the same rows; returns the losses."""
    losses = []
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        text = torch.randint(11, (4, 6), generator=generator)

        def closure(text: Tensor = text) -> Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            logits = model(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
            return loss

        for optimizer in optimizers:
            if isinstance(optimizer, pytorch_optimizer.ScheduleFreeWrapper):
                optimizer.train()
        losses.append(closure().item())
        for optimizer in optimizers:
            given = (closure,) if isinstance(optimizer, pytorch_optimizer.SAM) else ()
            optimizer.step(*given)
    return losses


@dataclass(frozen=True)
class Saved:
    """What is saved, and by which layout."""

    world: int
    stage: int
    what: str = "elements"
    precision: str = "32-true"
    shard: Any = "all"

    @property
    def name(self) -> str:
        """What distinguishes it."""
        return f"{self.what} {self.precision} {self.world} {self.stage} {self.shard}"


def save_all(folder: str, rows: list[Saved]) -> list[list[float]]:
    """Train, save a file and, if it has a place, a directory, and train on: the losses after."""
    found = []
    for row in rows:
        model, optimizers, engine = shard(row.stage, row.precision, row.what, shard=row.shard)
        with autocast(row.precision):
            steps(model, optimizers, 0, NUM_BEFORE)
        for kind in ("file", "dcp"):
            if kind == "dcp" and row.what in OWN_FORMATS:
                continue
            chosen = dataclasses.replace(engine.sharded.settings, checkpoint=kind)
            checkpoints = Checkpoints(engine.comm.control, chosen, [engine].copy)
            states = [
                checkpoints.optimizer_state(one, f"optimizer {n}")
                for n, one in enumerate(optimizers)
            ]
            checkpoint = {
                "state_dict": module_state(model, engine),
                "optimizer_states": states,
                "epoch": 3,
                "global_step": 7,
                "average": {"of": {"weight": module_state(model, engine)["head.weight"], "n": 2}},
                "alone": module_state(model, engine)["norm.weight"],
            }
            path = f"{folder}/{row.name}.{kind}"
            checkpoints.save(checkpoint, path, row.precision, optimizers=optimizers)
        with autocast(row.precision):
            found.append(steps(model, optimizers, NUM_BEFORE, NUM_AFTER))
    return found


def save_plain(path: Path, what: str) -> list[float]:
    """The same by a plain loop."""
    model, optimizers = build(what)
    steps(model, optimizers, 0, NUM_BEFORE)
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"state_dict": model.state_dict(), "optimizer_states": states}, path)
    return steps(model, optimizers, NUM_BEFORE, NUM_AFTER)


def shard(
    stage: int, precision: str, what: str = "elements", **more: Any
) -> tuple[nn.Module, list[Optimizer], Engine]:
    model, optimizers = build(what)
    engine = Engine(model, Settings(stage=stage, recipe=RECIPES[precision], **more))
    for optimizer in optimizers:
        engine.adopt(optimizer)
    return model, optimizers, engine


def autocast(precision: str) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")


def resume(reads: list[tuple[str, Saved, int | str, Any]]) -> list[list[float]]:
    """Losses after each: a path, what it has, and stage and copies that read it; "ddp" is DDP."""
    results = []
    for path, row, stage, num_shards in reads:
        if stage == "ddp":
            model, optimizers = build(row.what)
            checkpoint = torch.load(path, weights_only=True)
            model.load_state_dict(checkpoint["state_dict"])
            for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
                optimizer.load_state_dict(state)
            if dist.is_initialized():
                model = DistributedDataParallel(model, find_unused_parameters=True)
        else:
            model, optimizers, engine = shard(int(stage), row.precision, row.what, shard=num_shards)
            with torch.no_grad():  # other values than those to come
                for piece in engine.sharded.pieces:
                    piece.add_(1)
            checkpoints = Checkpoints(engine.comm.control, engine.sharded.settings, [engine].copy)
            checkpoint = checkpoints.load(path, TorchCheckpointIO(), weights_only=True)
            states = checkpoints.prepared(optimizers, checkpoint["optimizer_states"])
            load_module_state(model, engine, checkpoint["state_dict"])
            checkpoints.load_optimizers(zip(optimizers, states, strict=True))
            del checkpoint, states
            with engine.sharded.gathered():
                assert model.head.weight is model.embedding.weight
        with autocast(row.precision):
            results.append(steps(model, optimizers, NUM_BEFORE, NUM_AFTER))
    return results
