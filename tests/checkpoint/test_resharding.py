"""Whoever wrote a checkpoint, whoever resumes from it takes the same next step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.checkpoint import (
    Provenance,
    Saver,
    check_optimizer_states,
    load,
    load_module_state,
    module_state,
    optimizer_state,
)
from tests.oracle.by_trainer import assert_close
from tests.oracle.ranks import Pools
from tests.oracle.resharding import (
    NUM_AFTER,
    NUM_BEFORE,
    autocast,
    build,
    resume,
    shard,
    steps,
)

WORLDS, STAGES = (1, 2, 3, 4), (1, 2, 3)


def save(path: str, stage: int, precision: str) -> list[float]:
    """Train, save, and train on: the uninterrupted run."""
    model, optimizers, engine = shard(stage, precision)
    with autocast(precision):
        steps(model, optimizers, 0, NUM_BEFORE)
    states = [optimizer_state(o, engine, f"optimizer {n}") for n, o in enumerate(optimizers)]
    checkpoint = {"state_dict": module_state(model, engine), "optimizer_states": states}
    provenance = Provenance(stage, engine.comm.control.world_size, precision)
    Saver(engine.comm.control).save(checkpoint, path, provenance)
    with autocast(precision):
        return steps(model, optimizers, NUM_BEFORE, NUM_AFTER)


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


def test_all_runs_and_files_agree(files: dict[str, list[float]]) -> None:
    """So whoever resumes from one of them resumes from any."""
    (path, first), *others = reversed(files.items())
    plain = torch.load(path, weights_only=True)
    for path, other in others:
        assert other == pytest.approx(first, rel=1e-5)
        found = torch.load(path, weights_only=True)
        assert_close({key: found[key] for key in plain}, plain, path)


@pytest.mark.parametrize("world", WORLDS)
def test_every_file_resumes_at_every_stage(
    ranks: Pools, files: dict[str, list[float]], world: int
) -> None:
    """Each file on two numbers of ranks: all pairs of stages, and all pairs of numbers."""
    for stage in STAGES:
        paths = [
            path
            for number, path in enumerate(files)
            if (world - 1 - number // 3) % 4 in ((0, 1), (2, 3), (0, 2))[number % 3]
            and (sum(divmod(number, 3)) + world) % 3 == stage - 1
        ]
        for losses in ranks(world).run(resume, paths, stage, "32-true"):
            for path, found in zip(paths, losses, strict=True):
                assert found == pytest.approx(files[path], rel=1e-5), (path, stage, world)


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
    for world, turn in ((1, 0), (3, 1)):
        for number, (path, expected) in enumerate(files.items()):
            stage = STAGES[(number + turn) % 3]
            [found] = ranks(world).run(resume, [path], stage, "bf16-mixed")[0]
            assert found == pytest.approx(expected, rel=1e-2), (path, stage, world)


def fit_faults(path: str) -> list[str]:
    """Return what is said about states that do not fit, and whether anything changed."""
    model, optimizers, engine = shard(3, "32-true")
    before = [piece.detach().clone() for piece in engine.sharded.pieces]
    checkpoint = load(path, engine.comm.control)
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

    check(states[:1])  # the other one begins with fresh states
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
    assert all(
        torch.equal(a, b.detach()) for a, b in zip(before, engine.sharded.pieces, strict=True)
    )
    assert model.count.item() == 0
    return told


def test_what_does_not_fit_is_told_before_anything_changes(
    ranks: Pools, files: dict[str, list[float]]
) -> None:
    told = ranks(2).run(fit_faults, next(iter(files)))
    assert told[0] == told[1]
    groups, parameters, shape, weights = told[0]
    assert "1 param groups, but the optimizer has 2" in groups
    assert "its param group 1 has 1 parameters, but the optimizer's has " in parameters
    assert "'exp_avg' of 'scale' has shape (7,), but the parameter has shape ()" in shape
    assert all(word in weights for word in ("surplus", "norm.weight", "scale", "[9]"))
