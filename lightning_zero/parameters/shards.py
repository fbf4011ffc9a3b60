"""A rank's shard of masters or gradients: a tensor, or one that lies in two memories."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor


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

    def while_viewed(self) -> Callable[[], SplitShard | None]:
        """Return a function that returns the shard while each non-empty part has living views.

        A view keeps its base tensor alive, but not this object.
        """
        away, here = _while_viewed(self.away), _while_viewed(self.here)

        def living() -> SplitShard | None:
            first, others = away(), here()
            return None if first is None or others is None else SplitShard(first, others)

        return living


Shard = Tensor | SplitShard
"""A rank's shard. Pieces are views of it: ``shard[in_shard]``."""


def is_part(tensor: Tensor, shard: Shard) -> bool:
    """Return whether ``tensor`` is a view of ``shard``."""
    parts = (shard.away, shard.here) if isinstance(shard, SplitShard) else (shard,)
    return any(tensor._base is part for part in parts)


def _while_viewed(part: Tensor) -> Callable[[], Tensor | None]:
    return weakref.ref(part) if part.numel() else lambda: part
