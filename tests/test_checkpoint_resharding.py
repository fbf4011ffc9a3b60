"""Whoever wrote a checkpoint, whoever resumes from it takes the same next step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_zero.checkpoint import (
    Provenance,
    Saver,
    check_optimizer_states,
    load,
    load_module_state,
    load_optimizer_state,
    module_state,
    optimizer_state,
)
from lightning_zero.engine import Engine
from lightning_zero.plan import RECIPES
from lightning_zero.settings import Settings
from tests.models import Block
from tests.ranks import Pools

NUM_BEFORE, NUM_AFTER = 2, 2
WORLDS, STAGES = (1, 2, 3, 4), (1, 2, 3)


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
    torch.manual_seed(0)
    model = Everything()
    small = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    large = [p for p in model.parameters() if p.ndim >= 2 and p.requires_grad]
    half = len(large) // 2
    groups = [{"params": small, "weight_decay": 0.0}, {"params": large[:half]}]
    adam = torch.optim.AdamW(groups, lr=0.01)
    sgd = torch.optim.SGD(large[half:], lr=0.05, momentum=0.9)
    return model, [adam, sgd]


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


def settings(stage: int, precision: str) -> Settings:
    return Settings(stage=stage, recipe=RECIPES[precision])


def shard(stage: int, precision: str) -> tuple[nn.Module, list[Optimizer], Engine]:
    model, optimizers = build()
    engine = Engine(model, settings(stage, precision))
    for optimizer in optimizers:
        engine.adopt(optimizer)
    return model, optimizers, engine


def save(path: str, stage: int, precision: str) -> list[float]:
    """Train, save, and train on: the uninterrupted run."""
    model, optimizers, engine = shard(stage, precision)
    with autocast(precision):
        steps(model, optimizers, 0, NUM_BEFORE)
    states = [optimizer_state(o, engine, f"optimizer {n}") for n, o in enumerate(optimizers)]
    checkpoint = {"state_dict": module_state(model, engine), "optimizer_states": states}
    provenance = Provenance(stage, engine.comm.world_size, precision)
    Saver(engine.comm).save(checkpoint, path, provenance)
    with autocast(precision):
        return steps(model, optimizers, NUM_BEFORE, NUM_AFTER)


def autocast(precision: str) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")


def resume(paths: list[str], stage: int | str, precision: str) -> list[list[float]]:
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
            model, optimizers, engine = shard(int(stage), precision)
            with torch.no_grad():  # other values than those to come
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        for piece in group["params"]:
                            piece.add_(1)
            checkpoint = load(path, engine.comm)
            check_optimizer_states(optimizers, checkpoint["optimizer_states"], str)
            load_module_state(model, engine, checkpoint["state_dict"])
            for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
                load_optimizer_state(optimizer, state)
            del checkpoint
            with engine.gathered():
                assert model.head.weight is model.embedding.weight
        with autocast(precision):
            results.append(steps(model, optimizers, NUM_BEFORE, NUM_AFTER))
    return results


@pytest.fixture(scope="module")
def files(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Checkpoints of all stages and world sizes, and by a plain loop, with the losses after."""
    folder = tmp_path_factory.mktemp("files")
    losses = {}
    for world in WORLDS:
        for stage in STAGES:
            path = str(folder / f"stage{stage}-world{world}.ckpt")
            losses[path] = ranks(world).run(save, path, stage, "32-true")[0]
    path = str(folder / "plain.ckpt")
    model, optimizers = build()
    steps(model, optimizers, 0, NUM_BEFORE)
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"state_dict": model.state_dict(), "optimizer_states": states}, path)
    losses[path] = steps(model, optimizers, NUM_BEFORE, NUM_AFTER)
    return losses


def test_all_uninterrupted_runs_agree(files: dict[str, list[float]]) -> None:
    first, *others = files.values()
    for other in others:
        assert other == pytest.approx(first, rel=1e-5)


@pytest.mark.parametrize("world", WORLDS)
def test_every_file_resumes_at_every_stage(
    ranks: Pools, files: dict[str, list[float]], world: int
) -> None:
    for stage in STAGES:
        for losses in ranks(world).run(resume, list(files), stage, "32-true"):
            for path, expected, found in zip(files, files.values(), losses, strict=True):
                assert found == pytest.approx(expected, rel=1e-5), (path, stage, world)


def test_every_file_resumes_under_ddp_and_alone(
    ranks: Pools, files: dict[str, list[float]]
) -> None:
    for world in (1, 2):
        losses = ranks(world).run(resume, list(files), "ddp", "32-true")[0]
        for path, expected, found in zip(files, files.values(), losses, strict=True):
            assert found == pytest.approx(expected, rel=1e-5), path
    for path, expected in files.items():
        model, optimizers = build()
        checkpoint = torch.load(path, weights_only=True)
        model.load_state_dict(checkpoint["state_dict"])
        for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)
        assert steps(model, optimizers, NUM_BEFORE, NUM_AFTER) == pytest.approx(expected, rel=1e-5)


def test_master_is_kept_under_mixed_precision(ranks: Pools, tmp_path: Path) -> None:
    files = {}
    for stage in STAGES:
        path = str(tmp_path / f"{stage}.ckpt")
        files[path] = ranks(2).run(save, path, stage, "bf16-mixed")[0]
        state = torch.load(path, weights_only=True)
        weight = state["state_dict"]["blocks.0.linear.weight"]
        assert weight.dtype is torch.float32
        assert not torch.equal(weight, weight.bfloat16().float())
        assert state["optimizer_states"][0]["state"][0]["exp_avg"].dtype is torch.float32
    for world in (1, 3):
        for stage in STAGES:
            losses = ranks(world).run(resume, list(files), stage, "bf16-mixed")[0]
            for expected, found in zip(files.values(), losses, strict=True):
                assert found == pytest.approx(expected, rel=1e-2)


def fit_faults(path: str) -> list[str]:
    """What is said about states that do not fit, and whether anything changed."""
    model, optimizers, engine = shard(3, "32-true")
    before = [piece.detach().clone() for piece in engine.pieces]
    checkpoint = load(path, engine.comm)
    states = checkpoint["optimizer_states"]
    names = {id(p): name for name, p in model.named_parameters()}
    told = []

    def attempt(change: Any) -> None:
        try:
            change()
        except (RuntimeError, ValueError) as error:
            told.append(str(error))

    def check(states: list[Any]) -> None:
        check_optimizer_states(optimizers, states, lambda piece: names[id(piece.parameter)])

    attempt(lambda: check(states[:1]))
    group = states[0]["param_groups"][0]
    one = {**states[0], "param_groups": [group]}
    attempt(lambda: check([one, states[1]]))
    fewer = {**states[0], "param_groups": [group, {**group, "params": group["params"][:1]}]}
    attempt(lambda: check([fewer, states[1]]))
    shaped = {**states[0], "state": {**states[0]["state"], 0: {"exp_avg": torch.ones(7)}}}
    attempt(lambda: check([shaped, states[1]]))
    weights = dict(checkpoint["state_dict"])
    weights["surplus"] = torch.ones(1)
    weights["scale"] = torch.ones(9)
    del weights["norm.weight"]
    attempt(lambda: load_module_state(model, engine, weights))
    assert all(torch.equal(a, b) for a, b in zip(before, engine.pieces, strict=True))
    assert model.count.item() == 0
    return told


def test_what_does_not_fit_is_told_before_anything_changes(
    ranks: Pools, files: dict[str, list[float]]
) -> None:
    told = ranks(2).run(fit_faults, next(iter(files)))
    assert told[0] == told[1]
    optimizers, groups, parameters, shape, weights = told[0]
    assert "1 optimizers" in optimizers
    assert "returned 2" in optimizers
    assert "1 param groups, the optimizer 2" in groups
    assert "param group 1 has 1 parameters there" in parameters
    assert "'exp_avg' of 'scale' has shape (7,) there, the parameter has ()" in shape
    assert all(word in weights for word in ("surplus", "norm.weight", "scale", "[9]"))
