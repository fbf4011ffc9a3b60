"""The oracle of all numbers: one process, the whole global batch, a plain optimizer.

The global batch is cut as the ranks of a real run would cut it (`share`), the gradients of the
shares are averaged as they would be, but every line is ordinary torch. A run over ranks is held
against it:

    def train(name, stage):                  # on every rank
        ...
        rows = share(batch, rank, world_size, micro, accumulate)
        ...
        return Result(losses, params)

    actual = Result.over_ranks(ranks(2).run(train, "tied", 3))
    assert_parity(actual, reference(MODELS["tied"], adamw, steps=3, world=2))

The order of sums is fixed. A gradient that travels in its weight's dtype is multiplied by 1 / world
as it leaves its rank, as DistributedDataParallel does; one that is cast on the way is multiplied
when the ranks' gradients have been summed. Ranks are summed in their order, and microbatches after
the ranks (`policy="reduce"`) or before (`policy="local"`). A run that keeps this order gives the
same bits.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.oracle.models import Batch, Case

ROWS = 4
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
Clip = float | Callable[[Sequence[nn.Parameter]], object] | None


@dataclass(frozen=True)
class Recipe:
    """The meaning of a precision without sharding."""

    weight: torch.dtype
    master: torch.dtype
    autocast: bool = False
    scaled: bool = False


RECIPES = {
    "32-true": Recipe(torch.float32, torch.float32),
    "64-true": Recipe(torch.float64, torch.float64),
    "bf16-mixed": Recipe(torch.bfloat16, torch.float32, autocast=True),
    "16-mixed": Recipe(torch.float16, torch.float32, autocast=True, scaled=True),
    "bf16-true": Recipe(torch.bfloat16, torch.bfloat16),
    "16-true": Recipe(torch.float16, torch.float16),
}


@dataclass
class Result:
    """The results of a training run.

    Attributes:
        losses: Per step, the mean over ranks of the mean over microbatches.
        params: The final masters at full shape, by name; tied ones under their first name.
        buffers: Rank 0's final buffers.
        norms: Per step, the norm of the averaged gradients before clipping; infinite when
            there was an overflow.
    """

    losses: list[float]
    params: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.norms = [norm if math.isfinite(norm) else math.inf for norm in self.norms]

    @classmethod
    def of(cls, model: nn.Module, losses: list[float], norms: Sequence[float] = ()) -> Result:
        """Copies of what the whole model holds now."""
        params = {name: p.detach().clone() for name, p in model.named_parameters()}
        buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
        return cls(losses, params, buffers, list(norms))

    @classmethod
    def over_ranks(cls, results: Sequence[Result]) -> Result:
        """One result out of each rank's own; the ranks must agree on all but the losses."""
        first = results[0]
        for rank, other in enumerate(results[1:], start=1):
            assert other.norms == first.norms, f"ranks 0 and {rank} have other gradient norms"
            for name, value in first.params.items():
                same = torch.equal(value, other.params[name])
                assert same, f"ranks 0 and {rank} disagree on {name}"
        losses = [_mean(step) for step in zip(*(r.losses for r in results), strict=True)]
        return cls(losses, first.params, first.buffers, first.norms)


def share(batch: Batch, rank: int, world: int, micro: int = 0, accumulate: int = 1) -> Batch:
    """The rows of one rank in one microbatch: microbatches follow one another, ranks in each."""
    part = micro * world + rank
    return {name: rows.chunk(world * accumulate)[part] for name, rows in batch.items()}


def backward_of_ranks(model: nn.Module, losses: Sequence[Tensor]) -> None:
    """Add the average of the gradients of the ranks' losses to what is there.

    In the order of ranks, to the bit: with another last one SOAP takes other bases at once.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    of_ranks = [torch.autograd.grad(loss, parameters, allow_unused=True) for loss in losses]
    for parameter, column in zip(parameters, zip(*of_ranks, strict=True), strict=True):
        parts = [grad * (1 / len(losses)) for grad in column if grad is not None]
        if parts:
            parameter.grad = _add(parameter.grad, functools.reduce(torch.add, parts))


def reference(
    case: Case,
    make_optimizer: Callable[[nn.Module], Optimizer],
    steps: int,
    world: int = 1,
    accumulate: int = 1,
    *,
    rows: int = ROWS,
    clip: Clip = None,
    precision: str | None = None,
    reduce_dtype: torch.dtype | None = None,
    full_modules: tuple[type[nn.Module], ...] | None = None,
    policy: Literal["reduce", "local"] = "reduce",
) -> Result:
    """Train `case` on `steps` global batches of `world * accumulate * rows` rows, seeds 0, 1, ...

    Args:
        case: The model, its data and its loss.
        make_optimizer: Makes the optimizer from the model that holds the masters.
        steps: Number of optimizer steps.
        world: Ranks to imitate.
        accumulate: Microbatches per step; each one's loss is divided by it.
        rows: Rows per rank and microbatch.
        clip: A norm to clip to, or a function of the parameters.
        precision: A key of `RECIPES`; None is "32-true".
        reduce_dtype: The dtype in which gradients leave a rank; None is the master's.
        full_modules: Cast all weights before forward but the own parameters of these modules, as
            `NORMS`; None leaves it to autocast, as DDP does.
        policy: Whether microbatches are summed after the ranks or before.

    A parameter that no share of a step reaches has no gradient in it, and the optimizer skips it.
    """
    recipe = RECIPES[precision or "32-true"]
    master = case.build(dtype=recipe.master)
    model = _compute_copy(master, recipe, full_modules)
    optimizer = make_optimizer(master)
    scaler = torch.amp.GradScaler("cpu", enabled=recipe.scaled)
    params = [p for p in master.parameters() if p.requires_grad]
    losses, norms = [], []
    for step in range(steps):
        batch = case.batch(world * accumulate * rows, step)
        grads = _Grads(master, model, world, reduce_dtype or recipe.master, policy)
        step_losses: list[list[float]] = [[] for _ in range(world)]
        for micro in range(accumulate):
            for rank in range(world):
                part = _cast(share(batch, rank, world, micro, accumulate), recipe)
                with _buffers_of(rank, model), _surroundings(recipe):
                    loss = case.loss(model, part)
                scaler.scale(loss / accumulate).backward()
                step_losses[rank].append(loss.item())
                grads.take(rank)
            grads.microbatch_ends()
        grads.install()
        scaler.unscale_(optimizer)
        norms.append(_clip(params, clip))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        _sync(master, model)
        losses.append(_mean([_mean(rank_losses) for rank_losses in step_losses]))
    result = Result.of(master, losses, norms)
    result.buffers = Result.of(model, []).buffers
    return result


def assert_parity(
    actual: Result, expected: Result, *, ulps: float = 4.0, dtype: torch.dtype | None = None
) -> None:
    """Fail unless losses, parameters, buffers and, where both have them, norms agree.

    Args:
        actual: The run in question.
        expected: What it should be.
        ulps: How far a value may be off, in roundings of the largest value of its tensor;
            0 asks for the same bits.
        dtype: The dtype whose roundings count; None is each tensor's own, and the
            parameters' for losses and norms.
    """
    own = next((p.dtype for p in expected.params.values()), torch.float32)
    rows = [("losses", _numbers(actual.losses, own), _numbers(expected.losses, own))]
    if actual.norms and expected.norms:
        rows += [("norms", _numbers(actual.norms, own), _numbers(expected.norms, own))]
    for kind in ("params", "buffers"):
        ours, theirs = getattr(actual, kind), getattr(expected, kind)
        assert list(ours) == list(theirs), f"{kind} have other names"
        rows += [(name, ours[name], theirs[name]) for name in theirs]
    far = []
    for name, value, target in rows:
        assert value.shape == target.shape, f"{name} has shape {value.shape}, not {target.shape}"
        assert value.dtype == target.dtype, f"{name} has dtype {value.dtype}, not {target.dtype}"
        distance = distance_in_ulps(value, target, dtype)
        if not distance <= ulps:
            far.append((distance, name))
    lines = [f"  {name}: {distance:.3g} ulps" for distance, name in sorted(far, reverse=True)]
    if far:
        message = f"{len(far)} of {len(rows)} values are off by more than {ulps:g} ulps:"
        raise AssertionError("\n".join([message, *lines]))


def distance_in_ulps(value: Tensor, target: Tensor, dtype: torch.dtype | None = None) -> float:
    """Largest difference in roundings of the largest target; infinity where kinds differ."""
    dtype = dtype or target.dtype
    if torch.equal(value, target):
        return 0.0
    if target.is_complex() and value.is_complex():
        value, target = torch.view_as_real(value), torch.view_as_real(target)
        dtype = dtype.to_real()
    finite = target.isfinite()
    is_same = torch.equal(value.isfinite(), finite)
    is_same = is_same and value[~finite].tolist() == target[~finite].tolist()
    if not dtype.is_floating_point or not is_same:
        return math.inf
    value, target = value[finite].double(), target[finite].double()
    largest = target.abs().max().clamp_min(torch.finfo(dtype).smallest_normal)
    return float((value - target).abs().max() / largest / torch.finfo(dtype).eps)


class _Grads:
    """Sums the gradients of all shares in the order of a real run."""

    def __init__(
        self, master: nn.Module, model: nn.Module, world: int, dtype: torch.dtype, policy: str
    ) -> None:
        self.pairs = list(zip(master.parameters(), model.parameters(), strict=True))
        self.world, self.dtype, self.policy = world, dtype, policy
        self.of_ranks: list[list[Tensor | None]] = self._none_yet()
        self.total: list[Tensor | None] = [None] * len(self.pairs)

    def _none_yet(self) -> list[list[Tensor | None]]:
        return [[None] * len(self.pairs) for _ in range(self.world)]

    def take(self, rank: int) -> None:
        """Take this rank's new gradients off the weights."""
        mine = self.of_ranks[rank]
        for index, (_, weight) in enumerate(self.pairs):
            if weight.grad is None:
                continue
            grad, weight.grad = weight.grad, None
            if self._is_cast(weight):
                mine[index] = _add(mine[index], grad.to(self.dtype))
            elif mine[index] is None:
                mine[index] = grad * (1 / self.world)
            else:
                mine[index] = mine[index].add(grad, alpha=1 / self.world)

    def _is_cast(self, weight: Tensor) -> bool:
        return weight.dtype != self.dtype

    def microbatch_ends(self) -> None:
        """Average over the ranks if this policy does so now."""
        if self.policy == "reduce":
            self._average()

    def install(self) -> None:
        """Show the averages to the optimizer."""
        if self.policy == "local":
            self._average()
        for (master, _), total in zip(self.pairs, self.total, strict=True):
            master.grad = total

    def _average(self) -> None:
        of_ranks, self.of_ranks = self.of_ranks, self._none_yet()
        for index, (master, weight) in enumerate(self.pairs):
            column = [grads[index] for grads in of_ranks]
            if all(grad is None for grad in column):
                continue
            zero = torch.zeros_like(weight, dtype=self.dtype)
            first, *rest = [zero if grad is None else grad for grad in column]
            average = first.to(master.dtype)
            for grad in rest:
                average = average + grad
            if self.world > 1 and self._is_cast(weight):
                average = average * (1 / self.world)
            self.total[index] = _add(self.total[index], average)


def _add(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more


def _compute_copy(
    master: nn.Module, recipe: Recipe, full_modules: tuple[type[nn.Module], ...] | None
) -> nn.Module:
    if recipe.weight == recipe.master or full_modules is None:
        return master
    model = copy.deepcopy(master)
    full = [module for module in model.modules() if isinstance(module, full_modules)]
    kept = {p for module in full for p in module.parameters(recurse=False)}
    for weight in set(model.parameters()) - kept:
        weight.data = weight.data.to(recipe.weight)
    return model


@torch.no_grad()
def _sync(master: nn.Module, model: nn.Module) -> None:
    if model is not master:
        for source, weight in zip(master.parameters(), model.parameters(), strict=True):
            weight.copy_(source)


@contextmanager
def _buffers_of(rank: int, model: nn.Module) -> Iterator[None]:
    """Only what rank 0 does to buffers lasts; forward in training does not read them."""
    kept = [(m, dict(m._buffers)) for m in model.modules() if rank > 0]
    for module, buffers in kept:
        for name, buffer in buffers.items():
            module._buffers[name] = None if buffer is None else buffer.clone()
    yield
    for module, buffers in kept:
        module._buffers.update(buffers)


@contextmanager
def _surroundings(recipe: Recipe) -> Iterator[None]:
    """Enter what a Lightning precision plugin puts around a forward."""
    if recipe.autocast:
        with torch.autocast("cpu", recipe.weight, cache_enabled=False):
            yield
        return
    default = torch.get_default_dtype()
    torch.set_default_dtype(recipe.weight)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def _cast(batch: Batch, recipe: Recipe) -> Batch:
    """Inputs in the weights' dtype, unless autocast sees to that."""
    if recipe.autocast:
        return batch
    return {k: v.to(recipe.weight) if v.is_floating_point() else v for k, v in batch.items()}


def _clip(params: Sequence[nn.Parameter], clip: Clip) -> float:
    norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    if callable(clip):
        clip(params)
    elif clip is not None:
        torch.nn.utils.clip_grad_norm_(params, clip)
    return float(norm)


def _numbers(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
