"""A model with every kind of state, trained, saved and resumed by hand, without a Trainer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_zero.checkpoint import load_module_state
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


def build() -> tuple[nn.Module, list[Optimizer]]:
    """The model and two optimizers, one of them with two groups."""
    torch.default_generator.manual_seed(0)
    model = Everything()
    small = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    large = [p for p in model.parameters() if p.ndim >= 2 and p.requires_grad]
    half = len(large) // 2
    groups = [{"params": small, "weight_decay": 0.0}, {"params": large[:half]}]
    adam = torch.optim.AdamW(groups, lr=0.01)
    sgd = torch.optim.SGD(large[half:], lr=0.05, momentum=0.9)
    return model, [adam, sgd]


def build_mixing() -> tuple[nn.Module, list[Optimizer]]:
    """The same model and two optimizers that mix elements: by parameter, and all at once."""
    torch.default_generator.manual_seed(0)
    model = Everything()
    matrices = [p for p in model.parameters() if p.ndim == 2 and p.requires_grad and p.numel()]
    others = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    return model, [torch.optim.Muon(matrices, lr=0.01), Lbfgs(others, lr=0.1, max_iter=1)]


class Lbfgs(torch.optim.LBFGS):
    """Keeps lists of tensors in its state; for a step in which nothing is searched."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure or (lambda: torch.zeros(())))


def steps(model: nn.Module, optimizers: list[Optimizer], first: int, count: int) -> list[float]:
    """Train, every rank on the same rows; returns the losses."""
    losses = []
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        text = torch.randint(11, (4, 6), generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def settings(stage: int, precision: str, **more: Any) -> Settings:
    return Settings(stage=stage, recipe=RECIPES[precision], **more)


def shard(
    stage: int, precision: str, build: Any = build, **more: Any
) -> tuple[nn.Module, list[Optimizer], Engine]:
    model, optimizers = build()
    engine = Engine(model, settings(stage, precision, **more))
    for optimizer in optimizers:
        engine.adopt(optimizer)
    return model, optimizers, engine


def autocast(precision: str) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")


def resume(paths: list[str], stage: int | str, precision: str, **more: Any) -> list[list[float]]:
    """Losses after each checkpoint; stage "ddp" is DistributedDataParallel."""
    results = []
    for path in paths:
        if stage == "ddp":
            model, optimizers = build()
            checkpoint = torch.load(path, weights_only=True)
            model.load_state_dict(checkpoint["state_dict"])
            for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
                optimizer.load_state_dict(state)
            model = DistributedDataParallel(model)
        else:
            model, optimizers, engine = shard(int(stage), precision, **more)
            with torch.no_grad():  # other values than those to come
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        for piece in group["params"]:
                            piece.add_(1)
            engines = [engine]
            checkpoints = Checkpoints(engine.comm.control, engine.sharded.settings, engines.copy)
            checkpoint = checkpoints.load(path, weights_only=True)
            states = checkpoints.prepared(optimizers, checkpoint["optimizer_states"])
            load_module_state(model, engine, checkpoint["state_dict"])
            checkpoints.load_optimizers(zip(optimizers, states, strict=True))
            del checkpoint, states
            with engine.sharded.gathered():
                assert model.head.weight is model.embedding.weight
        with autocast(precision):
            results.append(steps(model, optimizers, NUM_BEFORE, NUM_AFTER))
    return results
