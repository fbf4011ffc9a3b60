"""Objects attached to the user's optimizer, and functions in place of its methods."""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

METHODS = ("train", "eval", "load_state_dict", "zero_grad", "state_dict", "__getstate__")
"""The methods of an optimizer that do more while an engine steps it."""


def bare(optimizer: Any) -> Optimizer:
    """Return the user's optimizer without Lightning's wrapper."""
    return getattr(optimizer, "_optimizer", optimizer)  # type: ignore[no-any-return]


def with_inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizer, and those that it wraps, which step all at once."""
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            yield from with_inner(value)


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


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a param group: all but its members and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two values, or containers of them, are equal and of the same dtypes."""
    (leaves, form), (others, other_form) = tree_flatten(one), tree_flatten(other)
    return form == other_form and all(map(_is_same, leaves, others))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return one is other or (type(one) is type(other) and bool(one == other))


# -- functions in place of methods -----------------------------------------------------------------


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


class Removable(Protocol):
    """Something installed on the optimizer or the module."""

    def remove(self) -> None:
        """Uninstall it."""


class Around:
    """A function that replaces a method of an optimizer until :meth:`remove`.

    It is called with the optimizer and the replaced method: one that the user has put on the
    object, or that of its class as it is then.
    """

    def __init__(
        self, holder: Optimizer, name: str, call: Callable[..., Any], optimizer: Optimizer
    ) -> None:
        self._holder, self._name, self._function = holder, name, call
        self._optimizer = optimizer
        self._own = {name: vars(holder)[name]} if name in vars(holder) else {}
        self._put: Announced | None = None
        if callable(getattr(type(holder), name, None)) or self._own:
            self._put = Announced.put(holder, name, self.call, holder)

    def call(self, who: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the function for ``who``, the optimizer or a wrapper with the same methods."""
        method = self._own.get(self._name) if who is self._holder else None
        method = method or _method_of(who, self._name)
        return self._function(self._optimizer, method, *args, **kwargs)

    def remove(self) -> None:
        """Restore the object's own method, unless the user has replaced it since."""
        if self._put is not None and vars(self._holder).get(self._name) is self._put:
            del vars(self._holder)[self._name]
            vars(self._holder).update(self._own)


def _method_of(who: Any, name: str) -> Callable[..., Any]:
    """Return the method that the class of ``who`` has now."""
    found = inspect.getattr_static(type(who), name)
    return found.__get__(who, type(who)) if hasattr(found, "__get__") else found  # type: ignore[no-any-return]


def follow(wrapper: Any, optimizer: Optimizer) -> None:
    """Make a wrapper that calls methods on itself, as Lightning's do, go by the optimizer's hooks.

    Also by those that the optimizer will have later.
    """
    for name in METHODS:
        if callable(getattr(type(wrapper), name, None)):
            Announced.put(wrapper, name, _call_through, weakref.ref(wrapper), optimizer, name)


def _call_through(
    wrapper: weakref.ref[Any], optimizer: Optimizer, name: str, *args: Any, **kwargs: Any
) -> Any:
    who, put = wrapper(), vars(optimizer).get(name)
    if isinstance(put, Announced):
        return put.func(who, *args, **kwargs)
    return _method_of(who, name)(*args, **kwargs)
