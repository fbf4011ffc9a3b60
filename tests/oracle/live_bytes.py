"""Rulers for live bytes that cost more than the package's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_zero.memory.live_bytes import LiveBytes


class Resized(LiveBytes):
    """Asks every storage for its size after every operation, because something resizes them."""

    def count(self) -> int:
        held = (ref() for ref in tuple(self._live.values()))
        return sum(storage.nbytes() for storage in held if storage is not None)


class Watched(LiveBytes):
    """Calls a function after every operation."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__torch_dispatch__(*args, **kwargs)
        self._look()
        return out
