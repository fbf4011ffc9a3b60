"""The share of a rank's shards that is offloaded, if it is not all of them."""

from __future__ import annotations

from lightning_zero.plan.layout import Layout


class Cuts:
    """Cuts the shards of a rank, one after the other, so that in all a share is offloaded.

    Of a shard the first elements go and the others stay. A piece is not cut, as an optimizer has
    one state for it, so a cut is at the nearest end of a piece, and the shards behind make up for
    what is too much or too little. Trainable and frozen ones are counted apart::

        ratio 0.3   | go |  stay        | go    | stay     | stay      | go ...
        shards      | unit 0            | unit 1           | unit 2    | unit 3

    Args:
        ratio: The share.
        rank: Whose shards.
    """

    def __init__(self, ratio: float, rank: int) -> None:
        self._ratio = ratio
        self._rank = rank
        # Elements that are still to go, by whether they are trainable.
        self._owed = {True: 0.0, False: 0.0}

    def of(self, layout: Layout, *, trainable: bool) -> int:
        """Return how many elements of the next shard go."""
        wanted = self._owed[trainable] + self._ratio * layout.shard_numel
        # Of two that are as near the later one: what is offloaded was too large for the device.
        ends = sorted(layout.ends(self._rank), reverse=True)
        found = min(ends, key=lambda end: abs(end - wanted))
        self._owed[trainable] = wanted - found
        return found
