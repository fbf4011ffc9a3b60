"""Activations on the host: the same bits, each byte down and up once, and weights never."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import ZeROStrategy
from lightning_zero.engine import ActivationCheckpointing, ActivationOffload, Engine
from lightning_zero.plan import Settings
from tests.oracle.device import beside_the_host
from tests.oracle.models import Block
from tests.oracle.projects import Regression, fit
from tests.oracle.ranks import Pools

WIDTH, ROWS = 16, 64


class Residual(nn.Module):
    """Saves views, one tensor twice, its own input, and what dropout drew."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, dim=-1)
        mixed = nn.functional.dropout(torch.sigmoid(gate) * value, 0.5)
        return x + self.down(mixed) * mixed.tanh()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def train(
    stage: int, *, is_away: bool, checkpointed: bool, precision: torch.dtype | None = None
) -> tuple[list[Tensor], list[dict[str, int]]]:
    torch.manual_seed(0)
    model, crossed = Stack(), []
    with beside_the_host() as memories:
        engine = Engine(model, Settings(stage=stage, units=[Residual]))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        engine.adopt(optimizer)
        recompute = ActivationCheckpointing(model.blocks if checkpointed else [])
        stand_ins = [recompute]
        if is_away:
            offload = ActivationOffload.of(engine.sharded.units, engine.comm.host_copies, 1)
            stand_ins.insert(0, offload)
        torch.manual_seed(1 + engine.comm.control.rank)
        for _ in range(3):
            optimizer.zero_grad()
            memories.restart()
            with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
                loss = model(torch.randn(ROWS, WIDTH)).square().mean()
            loss.backward()
            crossed.append(dict(memories.crossed))
            optimizer.step()
            assert not memories.waits
        for stand_in in stand_ins:
            stand_in.remove()
        assert all("forward" not in vars(block) for block in model.blocks)
        engine.close()
    return [parameter.detach() for parameter in model.parameters()], crossed


def compare(stage: int) -> None:
    for how in (
        {"checkpointed": False},
        {"checkpointed": True},
        {"checkpointed": False, "precision": torch.bfloat16},
    ):
        plain, nothing = train(stage, is_away=False, **how)  # type: ignore[arg-type]
        away, crossed = train(stage, is_away=True, **how)  # type: ignore[arg-type]
        assert all(map(torch.equal, plain, away))
        assert nothing == [{}] * 3
        for moved in crossed:
            assert moved["down"] == moved["up"]
            # Under checkpointing only the inputs of the four units.
            assert not how["checkpointed"] or moved["up"] == 4 * ROWS * WIDTH * 4


@pytest.mark.parametrize(("world", "stage"), [(1, 1), (2, 3)])
def test_numbers_are_the_same(ranks: Pools, world: int, stage: int) -> None:
    ranks(world).run(compare, stage)


class Dropping(nn.Module):
    """Asks for what its forward has saved, and makes nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).exp().tanh()


def test_what_is_fetched_and_dropped_is_written_before_it_is_freed() -> None:
    with beside_the_host():
        blocks = nn.Sequential(*[Dropping() for _ in range(3)])
        engine = Engine(blocks, Settings(units=[Dropping]))
        offload = ActivationOffload.of(engine.sharded.units, engine.comm.host_copies, 1)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        middle = blocks[:2](x)
        # Backward of the second block fetches the first one's, which is dropped with the graph.
        torch.autograd.grad(middle.sum(), blocks[1].inner.weight)
        del middle
        gc.collect()
        offload.remove()
        engine.close()


def test_activations_leave_the_device() -> None:
    alive: list[weakref.ref[Any]] = []

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.inner(x).exp()
            alive.append(weakref.ref(hidden.untyped_storage()))
            return hidden * hidden

    for is_away in (False, True):
        alive.clear()
        with beside_the_host(followed=False):
            engine = Engine(nn.Sequential(Noting(), Noting()), Settings(units=[Noting]))
            offload = ActivationOffload.of(
                engine.sharded.units if is_away else [], engine.comm.host_copies, 1
            )
            output = engine.module(torch.randn(ROWS, WIDTH))
            gc.collect()
            assert [ref() is None for ref in alive] == [is_away] * 2
            output.sum().backward()
            offload.remove()
            engine.close()


def fit_both_ways() -> None:
    every_storage = functools.partial(ActivationOffload.of, least_bytes=1)
    losses = []
    for choices in ({}, {"activation_offload": True, "activation_checkpointing": True}):
        with (
            beside_the_host() as memories,
            mock.patch.object(ActivationOffload, "of", every_storage),
            mock.patch.object(ActivationOffload, "require"),
        ):
            losses.append(fit(Regression(), ZeROStrategy(3, units=[Block], **choices)).losses)
        assert (memories.crossed["up"] > 0) == bool(choices)
    assert losses[0] == losses[1]


def test_the_strategys_argument_goes_with_checkpointing(ranks: Pools) -> None:
    ranks(1).run(fit_both_ways)


def refused() -> None:
    strategy = ZeROStrategy(3, units=[Block], activation_offload=True)
    with pytest.raises(ValueError, match="needs a device other than the host"):
        fit(Regression(), strategy)


def test_a_host_without_a_device_is_refused(ranks: Pools) -> None:
    ranks(1).run(refused)
