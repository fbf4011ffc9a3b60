"""Activations that are computed again, or on the host: the same bits, and weights stay."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_zero import ZeROStrategy
from lightning_zero.engine import ActivationCheckpointing, ActivationOffload, Engine
from lightning_zero.plan import Settings
from tests.oracle.device import beside_the_host
from tests.oracle.models import Block
from tests.oracle.projects import Regression, fit
from tests.oracle.ranks import Pools

WIDTH, ROWS, NUM_BLOCKS, NUM_STEPS = 16, 64, 4, 3


class Residual(nn.Module):
    """Saves views, one tensor twice, its own input, and what dropout drew."""

    num_calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        gate, value = self.both(x).chunk(2, dim=-1)
        mixed = nn.functional.dropout(torch.sigmoid(gate) * value, 0.5)
        return x + self.down(mixed) * mixed.tanh()


def offloading(engine: Engine, *, is_on: bool = True) -> ActivationOffload:
    units = engine.sharded.units if is_on else []
    return ActivationOffload(units, engine.comm.host_copies, 1)


def train(*, is_away: bool, recomputes: bool = False, autocast: bool = False) -> list[Tensor]:
    """Return the weights, having seen that all that is saved goes down and up once."""
    torch.manual_seed(0)
    blocks = [Residual() for _ in range(NUM_BLOCKS)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)
    with beside_the_host() as memories:
        engine = Engine(model, Settings(units=[Residual]))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        engine.adopt(optimizer)
        recompute = ActivationCheckpointing(blocks if recomputes else [])
        offload = offloading(engine, is_on=is_away)
        torch.manual_seed(1 + engine.comm.control.rank)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            memories.restart()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(torch.randn(ROWS, WIDTH)).square().mean()
            loss.backward()
            moved = memories.crossed
            assert moved["down"] == moved["up"]
            assert (moved["up"] > 0) == is_away
            if is_away and recomputes:  # only the inputs of the blocks are kept
                assert moved["up"] == NUM_BLOCKS * ROWS * WIDTH * 4
            optimizer.step()
            assert not memories.waits
        offload.remove()
        recompute.remove()
        assert all("forward" not in vars(block) for block in blocks)
        engine.close()
    assert blocks[0].num_calls == NUM_STEPS * (1 + recomputes)
    return [parameter.detach() for parameter in model.parameters()]


def compare() -> None:
    expected = train(is_away=False)
    for how in ({"is_away": False, "recomputes": True}, {"is_away": True, "recomputes": True}):
        assert all(map(torch.equal, train(**how), expected))
    mixed = (train(is_away=is_away, autocast=True) for is_away in (False, True))
    assert all(map(torch.equal, *mixed))


def test_numbers_are_the_same(ranks: Pools) -> None:
    ranks(2).run(compare)


def test_copies_keep_what_the_user_put_in_place_of_forward() -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    plain = linear.forward
    linear.forward = lambda x: 2 * plain(x)  # type: ignore[method-assign]
    x = torch.randn(2, WIDTH, requires_grad=True)
    expected = linear(x)
    checkpointing = ActivationCheckpointing([linear])
    assert torch.equal(copy.deepcopy(linear)(x), expected)
    checkpointing.remove()
    assert torch.equal(linear(x), expected)


class Noting(nn.Module):
    """Notes who holds what its forward saves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.alive: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).exp()
        self.alive.append(weakref.ref(hidden.untyped_storage()))
        return hidden * hidden


def test_what_is_fetched_and_dropped_is_written_before_it_is_freed() -> None:
    with beside_the_host():
        blocks = nn.Sequential(*[Noting() for _ in range(3)])
        engine = Engine(blocks, Settings(units=[Noting]))
        offload = offloading(engine)
        middle = blocks[:2](torch.randn(ROWS, WIDTH, requires_grad=True))
        # Backward of the second block fetches the first one's, which is dropped with the graph.
        torch.autograd.grad(middle.sum(), blocks[1].inner.weight)
        del middle
        gc.collect()
        offload.remove()
        engine.close()


def fit_both_ways() -> None:
    losses = []
    for choices in ({}, {"activation_offload": True, "activation_checkpointing": True}):
        with (
            beside_the_host() as memories,
            mock.patch.object(ActivationOffload.__init__, "__defaults__", (1,)),
            mock.patch.object(ActivationOffload, "require"),
        ):
            losses.append(fit(Regression(), ZeROStrategy(3, units=[Block], **choices)).losses)
        assert (memories.crossed["up"] > 0) == bool(choices)
    assert losses[0] == losses[1]


def test_the_strategys_argument_goes_with_checkpointing(ranks: Pools) -> None:
    ranks(1).run(fit_both_ways)
