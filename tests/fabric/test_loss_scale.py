"""The loss scale reaches every gradient that an optimizer steps, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import nn

from lightning_zero.fabric import FabricPrecision, ZeROStrategy
from tests.oracle.models import Blocks
from tests.oracle.ranks import Pools

WIDTH = 8


def fabric_of(stage: int, precision: Any = None) -> Fabric:
    # Fabric would replace precision="16-mixed" on CPUs.
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    precision = precision or MixedPrecision("16-mixed", "cpu", scaler)
    strategy = ZeROStrategy(stage, min_num_params=1, precision=precision)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    return fabric


def _with_a_parameter_outside(stage: int, *, is_own: bool = False) -> tuple[float, float, float]:
    """Step once; return the parameter's gradient, what it should be, and the norm."""
    own = FabricPrecision("16-mixed", torch.amp.GradScaler("cpu", 1024.0)) if is_own else None
    fabric = fabric_of(stage, own)
    torch.manual_seed(0)
    model, factor = Blocks(2, WIDTH), nn.Parameter(torch.ones(()))
    model, optimizer = fabric.setup(model, torch.optim.SGD([*model.parameters(), factor], lr=0.1))
    loss = (model(torch.ones(4, WIDTH)) * factor).square().mean()
    fabric.backward(loss)
    norm = float(fabric.clip_gradients(model, optimizer, max_norm=1e9))
    move = float(factor.grad)
    with pytest.raises(RuntimeError, match="SGD were unscaled already"):
        fabric.clip_gradients(model, optimizer, clip_val=1e9)
    optimizer.step()
    assert float(factor) == pytest.approx(1 - 0.1 * move)
    return move, 2 * loss.item(), norm


@pytest.mark.parametrize(("stage", "is_own"), [(1, False), (3, False), (3, True)])
def test_parameters_of_no_module_are_unscaled_and_clipped(
    ranks: Pools, stage: int, is_own: bool
) -> None:
    """Also with a plugin of ours that the user has made."""
    for move, expected, norm in ranks(2).run(_with_a_parameter_outside, stage, is_own=is_own):
        assert move == pytest.approx(expected, rel=1e-2)
        assert expected < norm < 1e3


def _without_sharded_parameters(_: Any) -> float:
    fabric = fabric_of(3)
    other = nn.Parameter(torch.ones(()))
    optimizer = fabric.setup_optimizers(torch.optim.SGD([other], lr=0.1))
    fabric.backward(3 * other)
    optimizer.step()
    return float(other)


def test_an_optimizer_without_sharded_parameters_steps(ranks: Pools) -> None:
    assert ranks(2).run(_without_sharded_parameters, None) == pytest.approx([0.7, 0.7])


class _Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor


def _one_element(stage: int) -> tuple[float, float]:
    """Step an optimizer of one element, of which only one rank has a part, after clipping."""
    fabric = fabric_of(stage)
    torch.manual_seed(0)
    module = _Factor()
    model, optimizer = fabric.setup(module, torch.optim.SGD([module.factor], lr=0.1))
    before = float(module.factor)
    fabric.backward(model(torch.ones(4, WIDTH)).square().mean())
    norm = float(fabric.clip_gradients(model, optimizer, max_norm=1e9))
    optimizer.step()
    return before - float(module.factor), 0.1 * norm


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_without_a_part_of_the_gradients_steps_like_the_others(
    ranks: Pools, stage: int
) -> None:
    for moved, expected in ranks(2).run(_one_element, stage):
        assert moved == pytest.approx(expected, rel=1e-4)
