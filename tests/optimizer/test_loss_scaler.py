"""The loss scaler against torch's own, step by step."""

import pytest
import torch

from lightning_zero.optimizer import LossScaler

OPTIONS = {"init_scale": 8.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}


def torch_scales(overflows: list[bool], state: dict | None = None) -> list[float]:
    """The scale before each step and after the last, under torch's scaler."""
    scaler = torch.amp.GradScaler("cpu", **OPTIONS)
    if state is not None:
        scaler.load_state_dict(state)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = []
    for overflow in overflows:
        scales.append(scaler.get_scale())
        weight.grad = torch.full((2,), float("inf") if overflow else 1.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
    return [*scales, scaler.get_scale()]


@pytest.mark.parametrize("pattern", ["......", "x.....", "..x...x...", "xx..xx....", ".........x"])
def test_scales_are_torchs(pattern: str) -> None:
    overflows = [letter == "x" for letter in pattern]
    scaler = LossScaler(**OPTIONS)
    scales = [scaler.scale]
    for overflow in overflows:
        scaler.update(found_inf=overflow)
        scales.append(scaler.scale)
    assert scales == torch_scales(overflows)


def test_states_are_exchanged_with_torchs() -> None:
    scaler = LossScaler(**OPTIONS)
    for overflow in (False, True, False, False):
        scaler.update(found_inf=overflow)
    scales = torch_scales([False, False], scaler.state_dict())
    other = LossScaler()
    other.load_state_dict(scaler.state_dict())
    for expected in scales:
        assert other.scale == expected
        other.update(found_inf=False)


def test_defaults_are_torchs() -> None:
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(torch.ones(()))
    assert LossScaler().state_dict() == theirs.state_dict()
