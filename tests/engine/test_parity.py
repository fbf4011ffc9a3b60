"""The engine against the oracle, and the oracle against DistributedDataParallel and itself."""

import contextlib
import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_zero.comm import Communicator
from tests.oracle.models import MODELS, Batch, Case
from tests.oracle.parity import (
    NORMS,
    RECIPES,
    Result,
    assert_parity,
    distance_in_ulps,
    reference,
    share,
)
from tests.oracle.ranks import Pools
from tests.oracle.sharded import CPU, adamw, sgd, train

supported = [(n, p) for n, case in MODELS.items() for p in RECIPES if p not in case.unsupported]
# Weights that are used twice, or outside of what autocast casts, unseen from their modules alone.
used_elsewhere = {"called_twice", "borrowed_weight", "penalty"}


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


# ------------------------------------------------------------------------------ the engine

# Ranks that run other units cannot gather them together, unless they share memory.
stage_3_models = [name for name in MODELS if name != "experts"]
Run = dict[str, Any]


def train_each(runs: list[Run]) -> list[Result]:
    """One training per run, on every rank; runs of the same `wires` share them."""
    comms: dict[str, Communicator] = {}
    results = []
    for run in runs:
        how = dict(run)
        wires = how.pop("wires", "windows")
        if wires not in comms:
            comms[wires] = Communicator(
                CPU, direct=wires != "backend", reads_peers=wires == "windows"
            )
        how["comm"] = comms[wires]
        results.append(train(**how))
    return results


def results_of(ranks: Pools, world: int, runs: list[Run]) -> list[Result]:
    by_rank = ranks(world).run(train_each, runs)
    return [Result.over_ranks(results) for results in zip(*by_rank, strict=True)]


def assert_same_bits(one: Result, other: Result, what: str) -> None:
    try:
        # Norms are sums over other pieces and keep their bits only where pieces are the same.
        assert_parity(one, Result(other.losses, other.params, other.buffers), ulps=0)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_stage_is_the_plain_loop_bit_for_bit_the_same(ranks: Pools, world: int) -> None:
    # Worlds 3 and 4 take one model in two each, and together all of them; stages 1 and 2 in turns,
    # and worlds 1 and 2 the one that is left.
    names = list(MODELS)[world % 2 :: 2] if world > 2 else list(MODELS)
    # A branch that is taken in turns comes back in the third step.
    steps = {name: 3 if name == "branch_by_step" else 2 for name in names}
    turns = {
        name: (1 + (number if world > 2 else number // 2 + 1) % 2, 3)
        for number, name in enumerate(names)
    }
    runs = [
        {"case": name, "stage": stage, "steps": steps[name]}
        for name in names
        for stage in turns[name]
        if stage < 3 or name in stage_3_models
    ]
    results = results_of(ranks, world, runs)
    first: dict[str, Result] = {}
    for run, result in zip(runs, results, strict=True):
        name = run["case"]
        if name not in first:
            assert_parity(result, reference(MODELS[name], adamw, steps[name], world), ulps=2)
        assert_same_bits(result, first.setdefault(name, result), f"{run} and the first stage")


@pytest.mark.parametrize("world", [2, 3])
def test_every_precision_is_the_same_recipe_unsharded(ranks: Pools, world: int) -> None:
    precise = [pair for pair in supported if pair[1] != "32-true"]
    runs = []
    for number, (name, precision) in enumerate(precise):
        if number % 2 != world % 2:
            continue
        stage = (number // 2) % 3 + 1
        if name not in stage_3_models:
            stage = 1 + number % 2
        how = {"cast_weights": "none"} if name in used_elsewhere else {}
        steps = 3 if precision == "16-mixed" else 2  # which skips the first ones: its scale falls
        run = {"case": name, "precision": precision, "stage": stage, "make_optimizer": sgd}
        runs.append({**run, **how, "steps": steps})
    # Where all weights are cast, the plain loop has such weights too.
    mixed = {"precision": "bf16-mixed", "make_optimizer": sgd, "cast_weights": "all", "steps": 2}
    runs += [{"case": name, "stage": world, **mixed} for name in ("tied", "transformer")]
    results = results_of(ranks, world, runs)
    for run, result in zip(runs, results, strict=True):
        name, precision = run["case"], run["precision"]
        full = NORMS if run.get("cast_weights") == "all" else None
        expected = reference(
            MODELS[name], sgd, run["steps"], world, precision=precision, full_modules=full
        )
        try:
            assert_parity(result, expected, ulps=2)
        except AssertionError as error:
            raise AssertionError(f"{run}: {error}") from None


@pytest.mark.parametrize(
    ("world", "precision"), [(1, "32-true"), (2, "bf16-mixed"), (3, "32-true"), (4, "16-mixed")]
)
def test_accumulation_is_the_plain_loops(ranks: Pools, world: int, precision: str) -> None:
    names = ["tied", "frozen", "unused_branch", "batchnorm_conv", "nested", "transformer"]
    names = names[world // 2 % 2 :: 2]
    ways = [(1, "local"), (2, "local"), (3, "local"), (2, "reduce"), (3, "reduce")]
    runs = [
        {"case": name, "stage": stage, "policy": policy, "accumulate": 3, "precision": precision}
        for name, (stage, policy) in product(names, ways)
    ]
    runs = [{**run, "make_optimizer": sgd, "clip_norm": 0.1, "steps": 2} for run in runs]
    first: dict[tuple[str, str], Result] = {}
    for run, result in zip(runs, results_of(ranks, world, runs), strict=True):
        key = (run["case"], run["policy"])
        if key not in first:
            expected = reference(
                MODELS[run["case"]],
                sgd,
                2,
                world,
                3,
                clip=0.1,
                precision=precision,
                policy=run["policy"],
            )
            try:
                assert_parity(result, expected, ulps=4)
            except AssertionError as error:
                raise AssertionError(f"{run}: {error}") from None
        assert_same_bits(result, first.setdefault(key, result), f"{run} and the first stage")


@pytest.mark.parametrize("world", [2, 3])
def test_no_setting_changes_a_bit(ranks: Pools, world: int) -> None:
    names = [
        "tied",
        "unused_branch",
        "branch_by_step",
        "called_twice",
        "transformer",
        "nested",
        "inplace_views",
        "borrowed_weight",
        "rnn",
        "multihead_attention",
    ]
    ways: list[Run] = [
        {},
        {"prefetch": 0},
        {"prefetch": 2},
        {"reshard_after_forward": False},
        {"units": "leaves"},
        {"units": "nested", "prefetch": 2},
        {"units": "root"},
    ]
    if world == 2:  # the backend may add up three ranks in another order
        ways += [{"wires": "backend"}, {"wires": "backend", "stage": 2}]
    ways += [{"wires": "messages"}, {"wires": "messages", "stage": 2}, {"stage": 2}]
    # Each model beside one setting in two, each setting with every other model.
    runs = [
        {"case": name, "steps": 2, **way}
        for (row, name), (column, way) in product(enumerate(names), enumerate(ways))
        if not way or (row + column) % 2 == 0
    ]
    if world == 3:
        runs = runs[::2]
    first: dict[str, Result] = {}
    for run, result in zip(runs, results_of(ranks, world, runs), strict=True):
        assert_same_bits(result, first.setdefault(run["case"], result), str(run))
    for name, result in first.items():
        assert_parity(result, reference(MODELS[name], adamw, 2, world), ulps=2)


def test_backend_collectives_are_the_plain_loop_at_three_ranks(ranks: Pools) -> None:
    runs: list[Run] = [
        {"case": name, "stage": stage, "wires": "backend", "accumulate": 2}
        for stage, name in product((1, 2), ("experts", "unused_branch", "nested"))
    ]
    runs.append({"case": "nested", "stage": 3, "wires": "backend", "accumulate": 2})
    for run, result in zip(runs, results_of(ranks, 3, runs), strict=True):
        policy = "local" if run["stage"] == 1 else "reduce"
        expected = reference(MODELS[run["case"]], adamw, 3, 3, 2, policy=policy)
        assert_parity(result, expected, ulps=64)


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float16])
def test_reduce_dtype_is_the_references(ranks: Pools, reduce_dtype: torch.dtype) -> None:
    runs: list[Run] = [
        {"case": name, "stage": stage, "reduce_dtype": reduce_dtype, "make_optimizer": sgd}
        for name, stage in product(("nested", "tied"), (1, 3))
    ]
    for run, result in zip(runs, results_of(ranks, 3, runs), strict=True):
        expected = reference(MODELS[run["case"]], sgd, 3, 3, reduce_dtype=reduce_dtype)
        assert_parity(result, expected, ulps=2)
