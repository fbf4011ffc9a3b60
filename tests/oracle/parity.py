"""Rows of ranks, gradients of ranks, and distances of numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.oracle.models import Batch


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
            total = functools.reduce(torch.add, parts)
            parameter.grad = total if parameter.grad is None else parameter.grad + total


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
