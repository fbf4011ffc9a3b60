"""State that an optimizer keeps outside of those of its members, such as step counts.

A step of all members changes it once. So when they are stepped batch by batch, each batch begins
with it as it was for the first one, and only what the last leaves is kept.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map

Entries = dict[Any, Any]


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


def name_of(number: int, key: Any) -> str:
    """Return how errors name an entry of dictionary ``number`` of :func:`shared_of`."""
    return ["its attribute", "its state"][number] + f" {key!r}" if number < 2 else f"option {key!r}"


class SharedState:
    """A copy of what an optimizer keeps outside of the states of its members."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._before = [_copied(entries) for entries in shared_of(optimizer)]

    def changed(self, optimizer: Optimizer) -> str:
        """Return the name of an entry that is different now, ``""`` if none is."""
        for number, (old, new) in enumerate(zip(self._before, shared_of(optimizer), strict=False)):
            for key in {**old, **new}:
                if key not in old or key not in new or not is_equal(old[key], new[key]):
                    return name_of(number, key)
        return ""

    @contextlib.contextmanager
    def lent_to(self, stand_in: Optimizer) -> Iterator[None]:
        """Enter a context in which ``stand_in`` has a copy of this, which is then thrown away."""
        there = shared_of(stand_in)
        _put(stand_in, [_copied(entries) for entries in self._before], there)
        try:
            yield
        finally:
            _put(stand_in, there, shared_of(stand_in))


def _put(optimizer: Optimizer, new: Sequence[Entries], old: Sequence[Entries]) -> None:
    places: list[MutableMapping[Any, Any]]
    places = [vars(optimizer), optimizer.state, *optimizer.param_groups]
    for place, entries, before in zip(places, new, old, strict=False):  # a group may be new
        for key in before.keys() - entries.keys():
            del place[key]
        place.update(entries)


def options_of(group: Mapping[str, Any]) -> Entries:
    """Return the options of a param group: all but its members and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _copied(entries: Entries) -> Entries:
    """Return entries with containers and tensors copied."""
    return {k: v if isinstance(v, _PLAIN) else tree_map(_own, v) for k, v in entries.items()}


_PLAIN = (bool, int, float, str, type(None))


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two values, or containers of them, are equal to the bit."""
    (leaves, form), (others, other_form) = tree_flatten(one), tree_flatten(other)
    return form == other_form and all(map(_is_same, leaves, others))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return one is other or (type(one) is type(other) and bool(one == other))


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
