"""How results are compared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


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


def unequal(found: Any, expected: Any, eps: float, where: str = "") -> Iterator[str]:
    """Say where nested values differ by more than rounding."""
    if isinstance(expected, Tensor):
        kinds = [(v.dtype, v.shape) if isinstance(v, Tensor) else () for v in (found, expected)]
        is_same = kinds[0] == kinds[1]
        if is_same:
            values = (v.resolve_conj() if v.is_complex() else v.double() for v in (found, expected))
            is_same = torch.allclose(*values, rtol=eps, atol=eps / 10)
    elif isinstance(expected, float):
        is_same = found == expected or abs(found - expected) <= eps / 10 + eps * abs(expected)
    elif isinstance(expected, dict) and "dirpath" in expected:
        return  # a ModelCheckpoint's: paths of another folder
    elif isinstance(expected, dict) and isinstance(found, dict) and list(found) == list(expected):
        for key, value in expected.items():
            yield from unequal(found[key], value, eps, f"{where}/{key}")
        return
    elif isinstance(expected, list | tuple) and type(found) is type(expected):
        is_same = len(found) == len(expected)
        for number, (one, other) in enumerate(zip(found, expected, strict=False)):
            yield from unequal(one, other, eps, f"{where}/{number}")
    else:
        is_same = bool(found == expected)
    if not is_same:
        yield f"{where} is {found!r:.1000}, not {expected!r:.1000}"


def differences(
    ours: Any, theirs: Any, ulps: float = 0, dtype: torch.dtype | None = None
) -> Iterator[str]:
    """Say where a trace is not another.

    Args:
        ours: What is compared.
        theirs: What it must be.
        ulps: How far parameters, buffers and metrics may be off, in roundings of `dtype`.
        dtype: None is each tensor's own.
    """
    for mine, its in ((ours.params, theirs.params), (ours.metrics, theirs.metrics)):
        if list(mine) != list(its):
            yield f"has {list(mine)}, not {list(its)}"
            continue
        for name, target in its.items():
            value = mine[name]
            if (value.shape, value.dtype) != (target.shape, target.dtype):
                yield f"{name} is {value.dtype} {value.shape}, not {target.dtype} {target.shape}"
                continue
            narrow = dtype if dtype and dtype.itemsize < target.itemsize else None
            if (distance := distance_in_ulps(value, target, narrow)) > ulps:
                yield f"{name} is off by {distance:.3g} ulps"
    eps = max(1e-4, max(8, ulps) * torch.finfo(dtype).eps if dtype else 0.0)
    for what in ("losses", "notes", "saved"):
        mine, its = getattr(ours, what), getattr(theirs, what)
        if what != "saved" or (mine and its):
            yield from unequal(mine, its, eps, what)
    if ours.files != theirs.files:
        yield f"files are {ours.files}, not {theirs.files}"


def require_same(ours: Any, theirs: Any, **how: Any) -> None:
    """Fail unless a trace is another, as `differences` says."""
    found = list(differences(ours, theirs, **how))
    assert not found, "\n".join(found)
