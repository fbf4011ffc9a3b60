"""Functions in place of methods of the user's optimizer, and what else is known of its object."""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

METHODS = (
    *("train", "eval", "load_state_dict", "zero_grad", "state_dict", "__getstate__"),
    "register_step_pre_hook",
)
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


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a param group: all but its members and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


# -- functions in place of methods -----------------------------------------------------------------


class Announced(functools.partial[Any]):
    """A function that stands in the place of a method of a user's object until :meth:`remove`.

    Copies of the object have the method that was there: its own, or else that of its class.
    """

    @classmethod
    def put(cls, owner: Any, name: str, function: Callable[..., Any], *args: Any) -> Announced:
        """Put a function in the place of ``owner.name``."""
        made = cls(function, *args)
        made.place, made.before = (owner, name), vars(owner).get(name)
        setattr(owner, name, made)
        return made

    place: tuple[Any, str]
    before: Any

    @property
    def own(self) -> Any:
        """The method that the user has put on the object, if any."""
        return self.before.own if isinstance(self.before, Announced) else self.before

    def __reduce__(self) -> Any:
        if self.own is not None:
            return operator.getitem, ((self.own,), 0)
        # The copy of an owner is being made, and has no attributes yet that hide its methods.
        return getattr, self.place

    def remove(self) -> None:
        """Restore what was there, unless the user has replaced it since."""
        owner, name = self.place
        if vars(owner).get(name) is self:
            del vars(owner)[name]
            vars(owner).update({} if self.before is None else {name: self.before})


def put_around(
    holder: Optimizer, name: str, function: Callable[..., Any], optimizer: Optimizer
) -> Announced:
    """Put a function in the place of a method of an optimizer, or of one within it.

    It is called with the optimizer and the replaced method: one that the user has put on the
    object, or that of its class as it is then. A wrapper may call it for itself.
    """

    def call(who: Any, *args: Any, **kwargs: Any) -> Any:
        own = put.before if who is holder else None
        return function(optimizer, own or _method_of(who, name), *args, **kwargs)

    put = Announced.put(holder, name, call, holder)
    return put


def _method_of(who: Any, name: str) -> Callable[..., Any]:
    """Return the method that the class of ``who`` has now."""
    found = inspect.getattr_static(type(who), name)
    return found.__get__(who, type(who)) if hasattr(found, "__get__") else found  # type: ignore[no-any-return]


def follow(wrapper: Any, optimizer: Optimizer) -> None:
    """Make a wrapper that calls methods on itself, as Lightning's do, go by the optimizer's hooks.

    Also by those that the optimizer will have later.
    """
    who = weakref.ref(wrapper)

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        put = vars(optimizer).get(name)
        if isinstance(put, Announced):
            return put.func(who(), *args, **kwargs)
        return _method_of(who(), name)(*args, **kwargs)

    for name in METHODS:
        if callable(getattr(type(wrapper), name, None)):
            Announced.put(wrapper, name, call, name)
