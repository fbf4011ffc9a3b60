"""Weights in mixed precision that a step uses in other ways than their module's forward."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_zero import ZeROStrategy
from tests.oracle.projects import Regression, fit
from tests.oracle.ranks import Pools


class Using(Regression):
    """Uses the weights of its head in another way besides."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return self.head(y) if self.way == "two calls" else y

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.way == "a penalty":
            loss = loss + sum(p.square().sum() for p in self.head.parameters())
        return loss


def _trained(way: str, strategy: Any) -> list[float]:
    plugins = [MixedPrecision("bf16-mixed", "cpu")]
    return fit(Using(way), strategy, plugins=plugins, max_steps=3).losses


@pytest.mark.parametrize("way", ["", "a penalty", "two calls"])
def test_other_uses_of_weights_have_the_numbers_of_ddp_without_casts(
    ranks: Pools, way: str
) -> None:
    ddp = ranks(2).run(_trained, way, "ddp")
    assert ranks(2).run(_trained, way, ZeROStrategy(cast_weights="none")) == ddp
    for stage in (1, 3):
        losses = ranks(2).run(_trained, way, stage)[0]
        assert losses == pytest.approx(ddp[0], rel=2e-2)
        assert way or losses == ddp[0]
