"""The share of a rank's shards that is offloaded, if it is not all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_zero.plan.layout import Layout


def cuts_of(layouts: Sequence[Layout], ratio: float, rank: int) -> list[int]:
    """Return how many elements of each of a rank's shards go, so that in all a share does.

    Of a shard the first elements go and the others stay. A piece is not cut, as an optimizer has
    one state for it, so a cut is at the nearest end of a piece. Shards of large pieces are cut
    first, and the others make up for what is too much or too little, each for its part::

        ratio 0.3   | go |  stay        | go      | stay     | stay      |
        shards      | unit 0            | unit 1             | embedding |
    """
    ends = [sorted(layout.ends(rank), reverse=True) for layout in layouts]
    largest = [max(b - a for b, a in pairwise(places)) for places in ends]
    found = [0] * len(layouts)
    rest = sum(layout.shard_numel for layout in layouts)
    to_go = ratio * rest
    for number in sorted(range(len(layouts)), key=largest.__getitem__, reverse=True):
        numel = layouts[number].shard_numel
        wanted = to_go * numel / max(1, rest)
        # Of two that are as near the later one: what is offloaded was too large for the device.
        found[number] = min(ends[number], key=lambda end: abs(end - wanted))
        to_go, rest = to_go - found[number], rest - numel
    return found
