"""Methods of objects that are not ours, replaced for the duration of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_zero.optimizer import Announced


class Replacements:
    """Methods that replace those of other objects until :meth:`remove`."""

    def __init__(self) -> None:
        self._places: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Replace ``owner.name`` by ``function`` and return the method that was there."""
        inner: Callable[..., Any] = getattr(owner, name)
        # The object itself may already have one, which hides that of its class.
        self._places.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, function)
        return inner

    def wrap(self, owner: Any, name: str, around: Callable[..., Any], *args: Any) -> None:
        """Replace ``owner.name`` by ``around(owner.name, *args, ...)``."""
        self._places.append((owner, name, vars(owner).get(name)))
        Announced.put(owner, name, around, getattr(owner, name), *args)

    def remove(self) -> None:
        """Restore the methods of all objects."""
        for owner, name, before in reversed(self._places):
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._places = []
