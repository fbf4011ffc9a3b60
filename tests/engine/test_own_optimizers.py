"""Optimizers of users' own with states in files, or in bf16: the numbers of one step at once."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_zero.engine.engine import Engine
from lightning_zero.optimizer import clip, staging
from lightning_zero.optimizer.outside import outside_of
from lightning_zero.plan import RECIPES, Offload
from lightning_zero.plan.settings import Settings
from tests.oracle.mapped import is_in_file
from tests.oracle.own_optimizers import BY_UNIT, Nested, SelfCounting
from tests.oracle.ranks import Pools


def wide(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Pieces of several batches of the smallest size, and of a part of one, one of them frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 400), nn.Linear(400, 50), nn.Linear(50, 9))
    model[1].bias.requires_grad_(False)
    return model.to(dtype)


def files(stage: int, folder: str) -> dict[str, Any]:
    return {"offload": Offload.of_stage(stage, "nvme"), "offload_path": folder}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with names, of which a unit that is one piece has only one."""
    named = [*model.named_parameters()]
    return [
        {"params": [(name, p) for name, p in named if name.endswith("weight")]},
        {"params": [(name, p) for name, p in named if name.endswith("bias")], "lr": 0.1},
    ]


def trained(cls: Any, stage: int, dtype: torch.dtype = torch.float32, **how: Any) -> list[Any]:
    """Return weights, states and what else the optimizer keeps, after steps of all kinds."""
    model = wide(dtype)
    recipe = RECIPES["32-true" if dtype is torch.float32 else "bf16-true"]
    engine = Engine(model, Settings(stage=stage, units=(nn.Linear,), recipe=recipe, **how))
    optimizer = cls(groups_of(model))
    engine.adopt(optimizer)
    names = [[*group["param_names"]] for group in optimizer.param_groups]
    first = next(iter(engine.sharded.pieces))

    def accumulated() -> Tensor:
        for micro in range(2):
            rows = torch.linspace(-1, 1 + micro, 300 * (1 + dist.get_rank())).to(dtype)[-300:]
            with contextlib.nullcontext() if micro else engine.no_sync():
                loss = model(rows.view(3, 100)).pow(2).mean()
                loss.backward()
        clip.clip_by_norm(engine.sharded.pieces, engine.comm, 0.3)
        return loss.detach()

    for number in range(5):
        if hasattr(optimizer, "train"):
            optimizer.train()
        if number % 2:
            optimizer.step(accumulated)
        else:
            accumulated()
            if number == 2:
                first.grad = None
            optimizer.step()
        optimizer.zero_grad()
        if hasattr(optimizer, "eval"):
            optimizer.eval()
    assert names == [group["param_names"] for group in optimizer.param_groups]
    held = [optimizer.state.get(piece, {}) for piece in engine.sharded.pieces]
    for piece, state in zip(engine.sharded.pieces, held, strict=True):
        of_elements = [x for x in tree_leaves(state) if torch.is_tensor(x) and x.dim()]
        assert all(x.dtype is dtype for x in of_elements)
        if "offload" in how and piece.numel():
            assert all(is_in_file(x, how["offload_path"]) for x in of_elements)
    states = [x.clone() if torch.is_tensor(x) else x for x in tree_leaves(held)]
    kept = [
        {key: str(value) for key, value in entries.items() if not _is_method(value)}
        for entries in outside_of(optimizer)
    ]
    engine.close()
    return [*kept, *states, *(p.detach() for p in model.parameters())]


def _is_method(value: Any) -> bool:
    return callable(value) or any(map(callable, tree_leaves(value)))


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if torch.is_tensor(one) else one == other


def compare_all(folder: str) -> None:
    with mock.patch.object(staging, "_BATCH_BYTES", 1):
        world = dist.get_world_size()
        for number, cls in enumerate([*BY_UNIT, pytorch_optimizer.AggMo][: 3 + world]):
            stage = (3, 2, 1)[(number + world) % 3]
            expected = trained(cls, stage)
            assert len(expected) > 10
            assert_equal(trained(cls, stage, **files(stage, folder)), expected)


@pytest.mark.parametrize("world", [1, 2])
def test_the_bits_are_those_of_one_step(ranks: Pools, tmp_path: Path, world: int) -> None:
    ranks(world).run(compare_all, str(tmp_path))


def rounded() -> None:
    for cls in (Nested, SelfCounting):
        first, again = (trained(cls, 3, torch.bfloat16, stochastic_rounding=True) for _ in range(2))
        assert_equal(first, again)
        nearest = trained(cls, 3, torch.bfloat16)
        for one, other in zip(first, nearest, strict=True):
            if not torch.is_tensor(one):
                assert one == other
            elif one.dim():
                assert not one.isnan().any()
                torch.testing.assert_close(one, other, rtol=0.1, atol=0.1)


def test_nested_states_and_counters_are_rounded_by_chance(ranks: Pools) -> None:
    ranks(2).run(rounded)
