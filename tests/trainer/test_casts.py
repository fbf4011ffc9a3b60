"""A language model in mixed precision: which weights arrive in half, and DDP's bits."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as OfFabric
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_zero import ZeROStrategy
from tests.oracle.projects import Regression, fit, rows
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


def _trained(way: str, strategy: Any) -> tuple[list[float], list[str]]:
    plugins = [MixedPrecision("bf16-mixed", "cpu")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = fit(Using(way), strategy, plugins=plugins, max_steps=3)
    return run.losses, [str(one.message) for one in caught if "several times" in str(one.message)]


def _looped(way: str) -> list[str]:
    # On CPU Fabric itself would make "bf16-true" of "bf16-mixed".
    fabric = Fabric(
        accelerator="cpu", strategy="zero3", devices=2, plugins=[OfFabric("bf16-mixed", "cpu")]
    )
    fabric.launch()
    module = Using(way)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in rows(4):
            fabric.backward(model(batch[0]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in caught if "several times" in str(one.message)]


@pytest.mark.parametrize("way", ["", "a penalty", "two calls"])
def test_weights_that_are_used_otherwise_too_are_named(ranks: Pools, way: str) -> None:
    ddp = [losses for losses, _ in ranks(2).run(_trained, way, "ddp")]
    full = ranks(2).run(_trained, way, ZeROStrategy(cast_weights="none"))
    assert full == [(losses, []) for losses in ddp]
    for stage in (1, 3):
        (losses, told), (_, by_other) = ranks(2).run(_trained, way, stage)
        assert by_other == []
        assert (losses == ddp[0]) is not bool(way)
        assert len(told) == bool(way)
        for warning in told:
            assert "'head.weight'" in warning
            assert "net." not in warning
            assert "cast_weights='none'" in warning
    assert ranks(2).run(_trained, way, ZeROStrategy(cast_weights="all"))[0][1] == []


def test_loops_of_fabric_are_told_too(ranks: Pools) -> None:
    assert ranks(2).run(_looped, "") == [[], []]
    (told,), by_other = ranks(2).run(_looped, "two calls")
    assert "'head.weight'" in told
    assert by_other == []
