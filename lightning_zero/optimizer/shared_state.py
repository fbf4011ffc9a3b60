"""Objects that are attached to the user's optimizer, and what it keeps beside them."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

Entries = dict[Any, Any]


def bare(optimizer: Any) -> Optimizer:
    """Return the user's optimizer without Lightning's wrapper."""
    return getattr(optimizer, "_optimizer", optimizer)  # type: ignore[no-any-return]


def with_inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizer, and those that it wraps."""
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            yield from with_inner(value)


class Announced(functools.partial[Any]):
    """A function that stands in the place of a method of a user's object.

    Copies of the object have the method that was there: its own, or else that of its class.
    """

    @classmethod
    def put(cls, owner: Any, name: str, function: Callable[..., Any], *args: Any) -> Announced:
        """Put a function in the place of ``owner.name``."""
        made = cls(function, *args)
        before = vars(owner).get(name)
        made.place, made.own = (owner, name), before
        if isinstance(before, Announced):
            made.own = before.own
        setattr(owner, name, made)
        return made

    place: tuple[Any, str]
    own: Any

    def __reduce__(self) -> Any:
        if self.own is not None:
            return operator.getitem, ((self.own,), 0)
        # The copy of an owner is being made, and has no attributes yet that hide its methods.
        return getattr, self.place


class OfOptimizer:
    """An object that an engine has made for the user's optimizer, to which it may be attached.

    Copies of the optimizer lack it. Holds only a weak reference, so that the optimizer is freed
    without the garbage collector.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    def __reduce__(self) -> Any:
        return _nothing, ()

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer


def _nothing() -> None:
    """Return what a copy of an optimizer has in such a place."""


def shared_of(optimizer: Optimizer) -> list[Entries]:
    """Return an optimizer's own attributes, its states of non-members, and each group's options."""
    own = {
        key: value
        for key, value in vars(optimizer).items()
        if key not in ("state", "param_groups") and not isinstance(value, _OURS)
    }
    others = {k: v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
    return [own, others, *map(options_of, optimizer.param_groups)]


_OURS = (Announced, OfOptimizer)


def options_of(group: Mapping[str, Any]) -> Entries:
    """Return the options of a param group: all but its members and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two values, or containers of them, are equal to the bit."""
    (leaves, form), (others, other_form) = tree_flatten(one), tree_flatten(other)
    return form == other_form and all(map(_is_same, leaves, others))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return one is other or (type(one) is type(other) and bool(one == other))
