"""State dicts in a form of an optimizer's own, and whole parameters for those who make them.

A wrapper may return its own states beside the state dict of what it wraps. What lies where is known
to it alone, so the ranks' parts cannot be put together afterwards: it is asked while its states are
whole, or stand-ins of whole ones, and given whole ones to load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import nan
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.optimizer.owners import exchange, whole_step_of
from lightning_zero.optimizer.pieces import pieces_of
from lightning_zero.optimizer.twin import with_inner

_forms: WeakKeyDictionary[Optimizer, frozenset[str]] = WeakKeyDictionary()


def own_form_of(optimizer: Optimizer) -> frozenset[str] | None:
    """Return the names in the state dict of ``optimizer``; ``None`` if they are torch's own."""
    return _forms.get(optimizer)


def register_form(optimizer: Optimizer, form: frozenset[str]) -> None:
    """Note the names in an optimizer's state dict, for those who read it."""
    _forms[optimizer] = form


def form_of(twin: Optimizer) -> tuple[frozenset[str] | None, bool]:
    """Return the names in the state dict of a stepped copy, if they are not torch's own.

    Also whether the values in it are those of the states, and not made from them.
    """
    if type(twin).state_dict is Optimizer.state_dict:
        return None, True
    form = twin.state_dict()
    if "state" in form and "param_groups" in form:
        return None, True
    states = [tree_leaves(list(holder.state.values())) for holder in with_inner(twin)]
    known = {id(leaf) for each in states for leaf in each}
    shown = [leaf for leaf in tree_leaves(form) if isinstance(leaf, Tensor) and leaf.dim()]
    return frozenset(form), all(id(leaf) in known for leaf in shown)


@contextmanager
def whole_members(optimizer: Optimizer) -> Iterator[None]:
    """Enter a context in which param groups and states have whole parameters instead of pieces.

    They have no values. Those of steps by element are on the host, as are the states that such an
    optimizer loads for them.
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
