"""Predicted bytes of activations that wait on the host: those of a run, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import ZeROStrategy
from lightning_zero.engine import ActivationCheckpointing, ActivationOffload, Engine
from lightning_zero.memory import ModelPlan, compare, estimate
from lightning_zero.plan import Settings
from tests.oracle.device import beside_the_host

WIDTH, ROWS = 64, 512
"""A tensor of a unit has 128 KiB: it moves; weights are smaller than what is saved."""


class Block(nn.Module):
    """Saves views, one storage twice, and something small."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, dim=-1)
        mixed = torch.sigmoid(gate) * value
        small = mixed.mean(dim=-1, keepdim=True).exp()
        return x + self.down(mixed) * mixed.tanh() * small


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def of_run(*, is_away: bool, checkpointed: bool) -> tuple[dict[str, int], int]:
    """Bytes that go down in a step, and the most that are on the device in it."""
    with beside_the_host() as memories:
        model = Stack()
        engine = Engine(model, Settings(3, units=[Block]))
        optimizer = sgd(model.parameters())
        engine.adopt(optimizer)
        recompute = ActivationCheckpointing(model.blocks if checkpointed else [])
        units = engine.sharded.units if is_away else []
        offload = ActivationOffload.of(units, engine.comm.host_copies)
        for _ in range(2):
            memories.restart()
            optimizer.zero_grad()
            loss(model, torch.randn(ROWS, WIDTH)).backward()
            optimizer.step()
        crossed, peak = dict(memories.crossed), memories.peak
        offload.remove()
        recompute.remove()
        engine.close()
    return crossed, peak


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_peak_falls_as_a_runs(checkpointed: bool) -> None:
    peaks, predicted = [], []
    for is_away in (False, True):
        crossed, peak = of_run(is_away=is_away, checkpointed=checkpointed)
        found = estimate(
            Stack(),
            ZeROStrategy(
                units={Block}, activation_checkpointing=checkpointed, activation_offload=is_away
            ),
            batch=torch.randn(ROWS, WIDTH),
            step=loss,
            optimizer=sgd,
        )
        peaks.append(peak)
        predicted.append(found.peak.total)
        # All that goes down is there until backward.
        assert found.host["staging"] == found.host_peak == crossed.get("down", 0) or not is_away
        assert found.is_on_host is not is_away
        assert found.device_peak == found.peak.total
        assert predicted[-1] == pytest.approx(peak, rel=0.02)
    assert peaks[1] < peaks[0]


def test_ddp_has_none() -> None:
    how: Any = {"batch": torch.randn(ROWS, WIDTH), "step": loss, "optimizer": sgd}
    found = [
        compare(ModelPlan(Stack(), settings, **how, device=torch.device("cpu")), (0,), [1])
        for settings in (Settings(), Settings(activation_offload=True))
    ]
    assert found[0] == found[1] == [estimate(Stack(), "ddp", **how)]


def test_a_device_that_is_the_host_is_refused() -> None:
    with pytest.raises(ValueError, match="activation_offload=True needs a device beside the host"):
        estimate(
            Stack(),
            ZeROStrategy(offload_optimizer="nvme", offload_weights="nvme", activation_offload=True),
        )
