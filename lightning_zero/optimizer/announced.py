"""Functions in place of methods of the user's optimizer and of Lightning's wrapper of it."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer

from lightning_zero.optimizer.shared_state import Announced

METHODS = ("train", "eval", "load_state_dict", "zero_grad", "state_dict", "__getstate__")
"""The methods of an optimizer that do more while it holds pieces."""


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
