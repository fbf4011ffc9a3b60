"""Where a rank's shards are cut if only a share of them is offloaded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_zero.plan.layout import Layout


def cuts_of(layouts: Sequence[Layout], ratio: float, rank: int) -> list[int]:
    """Return how many elements of each of a rank's shards to offload, ``ratio`` of all in total.

    The first elements of a shard go, the others stay. A piece is never split, since an optimizer
    keeps one state for it: cuts are at the nearest boundary between pieces. Shards with large
    pieces are cut first, and the others make up for the error in proportion to their sizes::

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
        # Of two equally near ends the later: what is offloaded was too large for the device.
        found[number] = min(ends[number], key=lambda end: abs(end - wanted))
        to_go, rest = to_go - found[number], rest - numel
    return found
