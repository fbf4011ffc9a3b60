"""The oracle itself: against DistributedDataParallel, against itself, and its judgement."""

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.models import MODELS, Batch, Case
from tests.parity import (
    NORMS,
    RECIPES,
    Result,
    assert_parity,
    distance_in_ulps,
    reference,
    share,
)
from tests.ranks import Pools

supported = [(n, p) for n, case in MODELS.items() for p in RECIPES if p not in case.unsupported]
linear_models = [name for name, case in MODELS.items() if not case.per_rank_statistics]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class WithLoss(nn.Module):
    """A module whose forward is the loss, as DistributedDataParallel needs it."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        super().__init__()
        self.case, self.model = case, model

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.case.loss(self.model, batch)


def train_replicated(accumulate: int, clip: float | None, steps: int) -> dict[str, Result]:
    """Every model under DistributedDataParallel, on one rank."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return {
        name: _train_replicated(case, rank, world, accumulate, clip, steps)
        for name, case in MODELS.items()
    }


def _train_replicated(
    case: Case, rank: int, world: int, accumulate: int, clip: float | None, steps: int
) -> Result:
    model = case.build()
    optimizer = adamw(model)
    replicated = DistributedDataParallel(WithLoss(case, model), find_unused_parameters=True)
    losses, norms = [], []
    for step in range(steps):
        batch = case.batch(4 * world * accumulate, step)
        of_step = []
        for micro in range(accumulate):
            is_last = micro == accumulate - 1
            with contextlib.nullcontext() if is_last else replicated.no_sync():
                loss = replicated(share(batch, rank, world, micro, accumulate))
                (loss / accumulate).backward()
            of_step.append(loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip is None else clip)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(norm.item())
        losses.append(sum(of_step) / accumulate)
    result = Result.of(model, losses, norms)
    if rank > 0:
        result.buffers = {}
    return result


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, 0.5)])
def test_two_replicas_give_the_same_bits(ranks: Pools, accumulate: int, clip: float | None) -> None:
    replicas = ranks(2).run(train_replicated, accumulate, clip, 4)
    for name, case in MODELS.items():
        actual = Result.over_ranks([results[name] for results in replicas])
        expected = reference(case, adamw, 4, 2, accumulate, clip=clip, policy="local")
        assert_parity(actual, expected, ulps=0)


@pytest.mark.parametrize("name", linear_models)
@pytest.mark.parametrize("policy", ["reduce", "local"])
def test_cutting_the_batch_changes_nothing_but_roundings(name: str, policy: str) -> None:
    case = MODELS[name]
    whole = reference(case, sgd, 3, rows=24, precision="64-true", clip=1.0)
    cut = reference(case, sgd, 3, 3, 2, rows=4, precision="64-true", clip=1.0, policy=policy)
    assert_parity(cut, whole, ulps=1e4)


@pytest.mark.parametrize(("name", "precision"), supported)
def test_every_precision_stays_near_full_precision(name: str, precision: str) -> None:
    case = MODELS[name]
    full_modules = NORMS if case.needs_full_norms else ()
    actual = reference(case, sgd, 4, 2, clip=0.1, precision=precision, full_modules=full_modules)
    master = RECIPES[precision].master
    assert {p.dtype for p in actual.params.values()} == {master}
    full = reference(case, sgd, 4, 2, clip=0.1, precision="64-true")
    bound = torch.finfo(RECIPES[precision].weight).eps
    if precision == "16-mixed":  # the first scale may overflow: a skipped step is half the point
        bound = 0.1
    torch.testing.assert_close(actual.losses, full.losses, rtol=20 * bound, atol=0)


def test_sixteen_bit_scale_overflows_and_recovers() -> None:
    case = MODELS["nested"]
    skipping = reference(case, sgd, 4, 2, precision="16-mixed")
    assert math.isinf(skipping.norms[0])
    assert math.isfinite(skipping.norms[-1])


def test_reduce_dtype_is_felt() -> None:
    case = MODELS["nested"]
    exact = reference(case, sgd, 3, 2)
    rounded = reference(case, sgd, 3, 2, reduce_dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="values are off by more than 100 ulps"):
        assert_parity(rounded, exact, ulps=100)
    assert_parity(rounded, exact, ulps=20, dtype=torch.bfloat16)


def test_clip_may_be_a_function() -> None:
    def by_value(params: list[nn.Parameter]) -> None:
        nn.utils.clip_grad_value_(params, 1e-4)

    start = Result.of(MODELS["tied"].build(), [])
    clipped = reference(MODELS["tied"], sgd, 1, clip=by_value)
    for name, value in clipped.params.items():
        assert (value - start.params[name]).abs().max() < 1e-4 * 0.05 * 1.1


def test_unused_parameters_are_left_alone_even_by_weight_decay() -> None:
    case = MODELS["unused_branch"]
    start = Result.of(case.build(), [])
    trained = reference(case, adamw, 2, 2)
    unchanged = [n for n, p in trained.params.items() if torch.equal(p, start.params[n])]
    assert tuple(unchanged) == case.unused


def test_disagreement_is_named() -> None:
    one = reference(MODELS["tied"], sgd, 2)
    two = reference(MODELS["tied"], sgd, 2)
    two.params["embedding.weight"][3, 1] *= 1.001
    with pytest.raises(AssertionError, match=r"1 of 11 .*\n  embedding.weight: .* ulps"):
        assert_parity(two, one)
    with pytest.raises(AssertionError, match=r"ranks 0 and 1 disagree on embedding.weight"):
        Result.over_ranks([one, two])
    two.params["embedding.weight"][3, 1] = torch.nan
    with pytest.raises(AssertionError, match=r"embedding.weight: inf ulps"):
        assert_parity(two, one, ulps=1e9)


def test_distance_counts_roundings_of_the_largest_value() -> None:
    target = torch.tensor([1.0, 2.0**-20])
    eps = torch.finfo(torch.float32).eps
    assert distance_in_ulps(target.clone(), target) == 0
    assert distance_in_ulps(target + torch.tensor([eps, 0]), target) == 1
    assert distance_in_ulps(target + torch.tensor([0, eps]), target) == 1
    assert distance_in_ulps(torch.tensor([7]), torch.tensor([8])) == math.inf
    assert distance_in_ulps(torch.zeros(0), torch.zeros(0)) == 0
    overflow = torch.tensor([math.inf, 1.0])
    assert distance_in_ulps(torch.tensor([math.inf, 1 + eps]), overflow) == 1
    assert distance_in_ulps(torch.tensor([-math.inf, 1.0]), overflow) == math.inf
