"""Methods of objects that are not ours, replaced for the duration of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_zero.optimizer import Announced


class Replacements:
    """Methods that replace those of other objects until :meth:`remove`."""

    def __init__(self) -> None:
        self._places: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any], *args: Any) -> None:
        """Replace ``owner.name`` by ``around(owner.name, *args, ...)``."""
        # The object itself may already have one, which hides that of its class.
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
