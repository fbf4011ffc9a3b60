"""Steps in fp32 of what rests in bf16, rounded by chance."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.optimizer import unit_step
from lightning_zero.optimizer.unit_step import round_by_chance
from tests.oracle.own_optimizers import GroupCounting, Nested, SelfCounting
from tests.oracle.parity import require_same
from tests.oracle.ranks import Pools
from tests.oracle.sharded import adopted, replicate, train

BF16 = torch.bfloat16


def rounded(values: Tensor, seed: int = 0) -> Tensor:
    out = torch.empty_like(values, dtype=BF16)
    round_by_chance(values, out, torch.Generator().manual_seed(seed))
    return out


def test_numbers_of_bf16_stay_as_they_are() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    found = rounded(every.float())
    assert torch.equal(found.isnan(), every.isnan())
    is_number = ~every.isnan()
    assert torch.equal(found[is_number].view(torch.int16), every[is_number].view(torch.int16))
    # Also those that are not a number and have every bit set, to which nothing can be added.
    odd = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert rounded(odd).isnan().all()


def test_others_become_a_neighbour_and_their_mean_is_true() -> None:
    ulp = 2.0**-7
    for fraction, sign in ((0.01, 1), (0.25, -1), (0.9, 1)):
        values = torch.full((100_000,), sign * (1 + fraction * ulp))
        found = rounded(values).double().mul_(sign)
        assert set(found.unique().tolist()) == {1.0, 1 + ulp}
        share = float((found - 1).mean() / ulp)
        # Five deviations of the mean of so many.
        assert abs(share - fraction) < 5 * (fraction * (1 - fraction) / 100_000) ** 0.5
    assert torch.equal(rounded(values), rounded(values))
    assert not torch.equal(rounded(values), rounded(values, seed=1))


class InFp32:
    """The plain recipe: all in fp32, stepped, all to bf16."""

    def __init__(self, make: Callable[[nn.Module], Optimizer], model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.twins = nn.ParameterList(p.detach().float() for p in self.params)
        self.inner = make(self.twins)

    @torch.no_grad()
    def step(self) -> None:
        for own, twin in zip(self.params, self.twins, strict=True):
            twin.copy_(own)
            twin.grad = None if own.grad is None else own.grad.float()
        self.inner.step()
        for own, twin in zip(self.params, self.twins, strict=True):
            own.copy_(twin)
            for value in tree_leaves(self.inner.state[twin]):
                if isinstance(value, Tensor) and value.shape == twin.shape:
                    value.copy_(value.bfloat16())

    def zero_grad(self) -> None:
        for own in self.params:
            own.grad = None


def of(cls: Any, **how: Any) -> Callable[[nn.Module], Any]:
    return lambda model: cls(model.parameters(), **how)


HOW: list[tuple[Callable[[nn.Module], Any], int, int]] = [
    (of(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True), 2, 1),
    (of(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True), 1, 2),
    *((of(cls), 3, 2) for cls in (GroupCounting, Nested, SelfCounting)),
]
"""An optimizer, a stage, and the number of microbatches."""


def compare_all() -> None:
    for make, stage, accumulate in HOW:
        how = {"precision": "bf16-true", "steps": 4, "accumulate": accumulate}
        expected = replicate("transformer", partial(InFp32, make), **how)
        with mock.patch.object(
            unit_step, "round_by_chance", lambda source, out, _: out.copy_(source)
        ):
            how |= {"stage": stage, "policy": "local", "stochastic_rounding": True}
            found = train("transformer", make, **how)
        expected.notes = found.notes  # norms round by their order in bf16
        require_same(found, expected, dtype=BF16)


def test_the_step_is_that_of_fp32(ranks: Pools) -> None:
    ranks(2).run(compare_all)


def moved(**how: Any) -> float:
    """Return where weights of 1 are after 50 steps of a 5000th."""
    model = nn.Linear(64, 64, bias=False, dtype=BF16)
    nn.init.ones_(model.weight)
    engine, optimizer = adopted(model, of(torch.optim.SGD, lr=2e-4), **how)
    for _ in range(50):
        model(torch.ones(1, 64, dtype=BF16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    [(_, masters)] = engine.sharded.whole_parameters()
    mean = float(masters.float().mean())
    engine.close()
    return mean


def test_small_steps_are_not_lost(ranks: Pools) -> None:
    assert ranks(2).run(moved) == [1.0, 1.0]
    first, second = (ranks(2).run(moved, stochastic_rounding=True) for _ in range(2))
    assert first == second == pytest.approx([0.99, 0.99], abs=5e-4)
