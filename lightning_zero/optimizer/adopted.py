"""How the optimizers that engines have adopted are stepped, and the form of their state dicts.

A wrapper may return its own states beside the state dict of the optimizer that it wraps. Only the
wrapper knows such a form, so the ranks' parts cannot be put together afterwards. It is asked for
its state dict while its states are whole, or stand-ins of whole ones, and given whole ones to load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import nan
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.optimizer.owners import WholeStep, exchange
from lightning_zero.optimizer.pieces import pieces_of
from lightning_zero.optimizer.unit_step import UnitStep


class Adopted(NamedTuple):
    """How an optimizer is stepped, and the form of its state dict.

    Attributes:
        step: What steps it; ``None`` if it steps pieces, all in one call.
        form: The names in its state dict; ``None`` if they are torch's own.
    """

    step: WholeStep | UnitStep | None
    form: frozenset[str] | None


_NOT_ADOPTED = Adopted(None, None)
_adopted: WeakKeyDictionary[Optimizer, Adopted] = WeakKeyDictionary()


def note(optimizer: Optimizer, adopted: Adopted) -> None:
    """Note how an optimizer is stepped, for code that reads its state."""
    _adopted[optimizer] = adopted


def whole_step_of(optimizer: Optimizer) -> WholeStep | None:
    """Return what steps whole parameters of an optimizer; ``None`` if it steps pieces."""
    step = _adopted.get(optimizer, _NOT_ADOPTED).step
    return step if isinstance(step, WholeStep) else None


def unit_step_of(optimizer: Optimizer) -> UnitStep | None:
    """Return what steps an optimizer unit by unit; ``None`` if nothing does."""
    step = _adopted.get(optimizer, _NOT_ADOPTED).step
    return step if isinstance(step, UnitStep) else None


def are_torn(optimizers: Iterable[Optimizer]) -> bool:
    """Return whether a step of one of them ended half-way, on this rank."""
    steps = map(unit_step_of, optimizers)
    return any(step is not None and step.is_torn for step in steps)


def require_whole_steps(optimizers: Iterable[Optimizer]) -> None:
    """Raise a ``RuntimeError`` if a step of one of them ended half-way."""
    for optimizer in optimizers:
        step = unit_step_of(optimizer)
        if step is not None:
            step.check()


def own_form_of(optimizer: Optimizer) -> frozenset[str] | None:
    """Return the names in the state dict of ``optimizer``; ``None`` if they are torch's own."""
    return _adopted.get(optimizer, _NOT_ADOPTED).form


@contextmanager
def whole_members(optimizer: Optimizer) -> Iterator[None]:
    """Enter a context in which param groups and states have whole parameters instead of pieces.

    The whole parameters have no values. For an optimizer that steps pieces they are on the host, as
    are the states that it loads for them.
    """
    step = whole_step_of(optimizer)
    pieces = pieces_of(optimizer)
    wholes = [step.parameter_of(p) if step else _stand_in(p.range.slot.shape, p) for p in pieces]
    exchange(optimizer, {id(p): w for p, w in zip(pieces, wholes, strict=True)})
    try:
        yield
    finally:
        exchange(optimizer, {id(w): p for p, w in zip(pieces, wholes, strict=True)})


def _stand_in(shape: tuple[int, ...], like: Tensor) -> Parameter:
    one = torch.full((), nan, dtype=like.dtype, device="cpu")
    return Parameter(one.expand(shape), requires_grad=False)
