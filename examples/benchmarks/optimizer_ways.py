"""Verifies the table of optimizer classes in ``lightning_zero/optimizer/known.py``.

    python examples/benchmarks/optimizer_ways.py [package.Class ...]

Every class of the table whose package is installed is stepped twice from the same values, with each
of its boolean options. In the second run the gradients of some parameters, or of some elements, are
replaced: by zeros, by huge numbers, by none. If the class steps by parameter, no bit of the other
parameters may change; if by element, no bit of the other elements, also when each parameter is a
flat part of what it was, and when two objects step half of the parameters each, as in batches.
Prints what disagrees, and classes that could step in a finer way.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.optimizer import Way
from lightning_zero.optimizer.known import TABLE, known_way

STEPS = 12
SHAPES: list[tuple[int, ...]] = [(6, 4), (5,), (3, 5), (4,), (2, 3, 2, 2), (160, 144)]
NOT_ALGORITHMS = ("maximize", "capturable", "differentiable", "foreach", "fused")
"""Options that choose an implementation or the sign."""


def classes() -> Iterator[tuple[str, type[Optimizer], Way]]:
    """Yield the classes of the table that are installed, with their names and ways."""
    rows = ((p, w, name) for p, ways in TABLE.items() for w in ways for name in ways[w].split())
    for package, way, name in rows:
        if importlib.util.find_spec(package.split(".")[0]) is None:
            continue
        cls = getattr(importlib.import_module(package), name, None)
        if cls is not None:
            yield f"{package}.{name}", cls, way


def options_of(cls: type[Optimizer]) -> Iterator[dict[str, Any]]:
    """Yield no options, then each boolean option of a class with the other value."""
    yield {}
    for one in inspect.signature(cls).parameters.values():
        if isinstance(one.default, bool) and one.name not in NOT_ALGORITHMS:
            yield {one.name: not one.default}


def make(cls: Any, params: list[Parameter], options: dict[str, Any]) -> Optimizer | None:
    """Return an optimizer, ``None`` if the class refuses all arguments that are tried."""
    for groups in (params, [{"params": params, "use_muon": True}]):
        for rate in ({}, {"lr": 0.01}):
            try:
                return cls(groups, **rate, **options)  # type: ignore[no-any-return]
            except Exception:
                continue
    return None


Change = Callable[[int, int, Tensor], Tensor | None]
"""Returns the gradient for a step and a parameter, given the usual one."""


def run(
    cls: Any,
    options: dict[str, Any],
    change: Change,
    *,
    is_flat: bool = False,
    halves: bool = False,
) -> list[Tensor] | None:
    """Return the parameters after all steps; ``None`` if the class cannot step them."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)  # whatever the optimizer draws
    shapes = [shape for shape in SHAPES if len(shape) == 2] if is_only_matrices(cls) else SHAPES
    wholes = [torch.randn(shape) for shape in shapes]
    cut = (lambda one: one.reshape(-1)[: one.numel() * 2 // 3].clone()) if is_flat else torch.clone
    params = [Parameter(cut(one)) for one in wholes]
    parts = [params[::2], params[1::2]] if halves else [params]
    optimizers = [make(cls, part, options) for part in parts]
    for step in range(STEPS):
        for number, p in enumerate(params):
            p.grad = change(step, number, cut(torch.randn(shapes[number], generator=generator)))
        for optimizer in optimizers:
            if optimizer is None:
                return None
            getattr(optimizer, "train", lambda: None)()
            try:
                takes = "closure" in inspect.signature(type(optimizer).step).parameters
                optimizer.step(lambda: torch.ones(())) if takes else optimizer.step()
            except Exception:
                return None
    return [p.detach() for p in params]


def is_only_matrices(cls: Any) -> bool:
    """Return whether a class refuses all but matrices."""
    return any(name in cls.__name__ for name in ("Muon", "AdaGO", "SpectralSphere"))


def changes() -> Iterator[tuple[Change, Change]]:
    """Yield changes of the gradients of every second parameter, and of every second element."""

    def unchanged(step: int, number: int, grad: Tensor) -> Tensor | None:
        return grad

    for factor in (0.0, 1e4, None):

        def of_parameters(
            step: int, number: int, grad: Tensor, factor: float | None = factor
        ) -> Tensor | None:
            if number % 2 == 0 or step % 3 == 0:
                return grad
            return None if factor is None else grad * factor

        def of_elements(
            step: int, number: int, grad: Tensor, factor: float | None = factor
        ) -> Tensor | None:
            grad.view(-1)[1::2] *= -3.0 if factor is None else factor
            return grad

        yield of_parameters, of_elements


def finest_way(cls: Any, options: dict[str, Any]) -> Way | None:
    """Return the finest way that no experiment contradicts; ``None`` if none could be made."""
    way, usual = Way.BY_ELEMENT, lambda step, number, grad: grad
    truth = run(cls, options, usual)
    if truth is None:
        return None
    for of_parameters, of_elements in changes():
        other, elements = run(cls, options, of_parameters), run(cls, options, of_elements)
        if other is None or not all(map(torch.equal, other[::2], truth[::2])):
            return Way.ALL_AT_ONCE
        if elements is None or any(
            not torch.equal(a.view(-1)[::2], b.view(-1)[::2])
            for a, b in zip(elements, truth, strict=True)
        ):
            way = Way.BY_PARAMETER
    flat, halves = run(cls, options, usual, is_flat=True), run(cls, options, usual, halves=True)
    if halves is None or not all(map(torch.equal, halves, truth)):
        return Way.ALL_AT_ONCE
    if flat is None or any(
        not torch.equal(part, one.reshape(-1)[: len(part)])
        for part, one in zip(flat, truth, strict=True)
    ):
        way = Way.BY_PARAMETER
    return way


def disagreements(name: str, cls: Any, way: Way) -> Iterator[str]:
    """Yield where the table names a finer way for a class than experiments allow."""
    for options in options_of(cls):
        torch.manual_seed(0)
        optimizer = make(cls, [Parameter(torch.randn(6, 4)), Parameter(torch.randn(3, 5))], options)
        found = finest_way(cls, options) if optimizer is not None else None
        if optimizer is None or found is None:
            continue
        stepped, order = known_way(optimizer), list(Way)
        assert stepped is not None
        if order.index(stepped) < order.index(found):
            yield f"{name} {options or ''}: the table says {stepped.value}, but it is {found.value}"
        if order.index(stepped) > order.index(found) and not options:
            yield f"({name} seems to step {found.value}; the table says {stepped.value})"


def main() -> None:
    """Print what disagrees with the table."""
    warnings.filterwarnings("ignore")
    for name, cls, way in classes():
        if len(sys.argv) == 1 or name in sys.argv[1:]:
            for line in disagreements(name, cls, way):
                print(line, flush=True)


if __name__ == "__main__":
    main()
