"""The loss scale reaches every gradient that an optimizer steps, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_zero.fabric import ZeROStrategy
from tests.oracle.models import Blocks
from tests.oracle.ranks import Pools

WIDTH = 8


def fabric_of(stage: int) -> Fabric:
    strategy = ZeROStrategy(stage, min_num_params=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision="16-mixed")
    fabric.launch()
    return fabric


def _with_a_parameter_outside(stage: int) -> tuple[float, float, float, float]:
    """Step once; return the parameter's move, and norms before and after a step left out."""
    fabric = fabric_of(stage)
    torch.manual_seed(0)
    model, factor = Blocks(2, WIDTH), nn.Parameter(torch.ones(()))
    model, optimizer = fabric.setup(model, torch.optim.SGD([*model.parameters(), factor], lr=0.1))
    norms = []
    for _ in range(2):
        loss = (model(torch.ones(4, WIDTH)) * factor).square().mean()
        fabric.backward(loss)
        norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=1e9)))
        move = float(factor.grad)
        if len(norms) == 1:
            optimizer.zero_grad()
    optimizer.step()
    assert float(factor) == pytest.approx(1 - 0.1 * move)
    return move, 2 * loss.item(), *norms


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_of_no_module_are_unscaled_and_clipped(ranks: Pools, stage: int) -> None:
    for move, expected, first, second in ranks(2).run(_with_a_parameter_outside, stage):
        assert move == pytest.approx(expected, rel=1e-2)
        assert expected < first < 1e3
        # A step that was left out after clipping does not count for the next gradients.
        assert second == pytest.approx(first, rel=1e-2)


def _without_sharded_parameters(_: Any) -> float:
    fabric = fabric_of(3)
    other = nn.Parameter(torch.ones(()))
    optimizer = fabric.setup_optimizers(torch.optim.SGD([other], lr=0.1))
    fabric.backward(3 * other)
    optimizer.step()
    return float(other)


def test_an_optimizer_without_sharded_parameters_steps(ranks: Pools) -> None:
    assert ranks(2).run(_without_sharded_parameters, None) == pytest.approx([0.7, 0.7])
