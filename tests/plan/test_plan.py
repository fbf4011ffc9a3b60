"""Stages as data: where weights, gradients and masters rest."""

import pytest
import torch

from lightning_zero.plan import Placement, Settings

R, P, S = Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED


@pytest.mark.parametrize(
    ("stage", "homes", "reshards", "every"),
    [(1, (R, P, S), False, False), (2, (R, S, S), False, True), (3, (S, S, S), True, True)],
)
def test_stages_are_rows(
    stage: int, homes: tuple[Placement, ...], reshards: bool, every: bool
) -> None:
    plan = Settings(stage).plan(torch.float32)
    assert (plan.weight.placement, plan.grad.placement, plan.master.placement) == homes
    assert plan.reshards is reshards
    assert plan.reduces_every_microbatch is every
    assert Settings(stage, accumulate="local").plan(torch.float32).reduces_every_microbatch is False
