"""Rulers for live bytes that cost more than the package's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero.memory import LiveBytes


class Resized(LiveBytes):
    """Asks every storage for its size after every operation, because something resizes them."""

    def count(self) -> int:
        held = (ref() for ref in tuple(self._live.values()))
        return sum(storage.nbytes() for storage in held if storage is not None)


class Watched(TorchDispatchMode):
    """Calls a function after every operation that computes anything."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not _is_view(func):
            self._look()
        return out


@functools.cache
def _is_view(func: Any) -> bool:
    """Return whether it shows the memory of an operand and changes none."""
    aliases = [each.alias_info for each in func._schema.arguments if each.alias_info is not None]
    return bool(aliases) and not any(each.is_write for each in aliases)
