"""A rank's shard of masters or gradients: a tensor, or one that lies in two memories."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Shard(Protocol):
    """A rank's shard; a tensor is one."""

    @property
    def nbytes(self) -> int:
        """The shard's size."""

    def __getitem__(self, in_shard: slice, /) -> Tensor:
        """Return the elements of a piece, as a view."""

    def copy_(self, source: Tensor, /) -> object:
        """Take the values of ``source``."""

    def mul_(self, factor: float, /) -> object:
        """Multiply all elements."""


class SplitShard:
    """A shard whose first elements rest on the host, and the others on the device.

    No piece lies in both. Either part may be empty.

    Attributes:
        away: The first elements.
        here: The others.
    """

    def __init__(self, away: Tensor, here: Tensor) -> None:
        self.away, self.here = away, here

    def __getitem__(self, in_shard: slice, /) -> Tensor:
        num_away = self.away.numel()
        if in_shard.stop <= num_away:
            return self.away[in_shard]
        return self.here[in_shard.start - num_away : in_shard.stop - num_away]

    @property
    def nbytes(self) -> int:
        """Bytes in both memories."""
        return self.away.nbytes + self.here.nbytes

    def copy_(self, source: Tensor, /) -> None:
        """Take the values of ``source``."""
        num_away = self.away.numel()
        self.away.copy_(source[:num_away])
        self.here.copy_(source[num_away:])

    def copy_to(self, out: Tensor) -> Tensor:
        """Write the values to ``out``."""
        num_away = self.away.numel()
        out[:num_away].copy_(self.away)
        out[num_away:].copy_(self.here)
        return out

    def mul_(self, factor: float, /) -> None:
        """Multiply all elements."""
        self.away.mul_(factor)
        self.here.mul_(factor)


def is_part(tensor: Tensor, shard: Shard) -> bool:
    """Return whether ``tensor`` is a view of ``shard``."""
    parts = (shard.away, shard.here) if isinstance(shard, SplitShard) else (shard,)
    return any(tensor._base is part for part in parts)


def while_viewed(shard: Shard) -> Callable[[], Shard | None]:
    """Return a function that returns a shard while each part that is not empty has living views.

    A view keeps its base tensor alive, but not a :class:`SplitShard`.
    """
    if isinstance(shard, Tensor):
        return weakref.ref(shard)
    assert isinstance(shard, SplitShard)
    return functools.partial(_living, _viewed(shard.away), _viewed(shard.here))


def _viewed(part: Tensor) -> Callable[[], Tensor | None]:
    return weakref.ref(part) if part.numel() else lambda: part


def _living(away: Callable[[], Tensor | None], here: Callable[[], Tensor | None]) -> Shard | None:
    parts = away(), here()
    return None if parts[0] is None or parts[1] is None else SplitShard(parts[0], parts[1])
