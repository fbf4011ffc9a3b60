"""Cuts of a rank's shards: whole pieces, of each as near to the ratio as they allow."""

from itertools import pairwise

import pytest

from lightning_zero.plan.cuts import Cuts
from lightning_zero.plan.layout import Layout

UNITS = [[300, 20, 700, 5], [64, 64, 64, 64], [5000], [100] * 9]


def layouts(world: int) -> list[Layout]:
    return [
        Layout.build([(f"p{n}", (size,), (1,)) for n, size in enumerate(sizes)], world)
        for sizes in UNITS * 5
    ]


@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.5, 0.9, 1.0])
def test_a_share_of_all_shards_goes(ratio: float) -> None:
    for world in (1, 2, 3):
        for rank in range(world):
            cuts, goes, of, largest = Cuts(ratio, rank), 0, 0, 0
            for layout in layouts(world):
                cut = cuts.of(layout, trainable=True)
                assert 0 <= cut <= layout.shard_numel
                for index in range(len(layout.slots)):
                    start, stop = layout.piece_in_shard(index, rank)
                    assert start >= cut or stop <= cut
                goes, of = goes + cut, of + layout.shard_numel
                largest = max(largest, *(b - a for a, b in pairwise(sorted(layout.ends(rank)))))
                assert ratio < 1 or cut == layout.shard_numel
                assert abs(goes - ratio * of) <= largest / 2 + 1e-6


def test_frozen_parameters_are_counted_apart() -> None:
    cuts = Cuts(0.5, 0)
    large = Layout.build([("large", (640,), (1,))], 1)
    small = Layout.build([("small", (64,), (1,))], 1)
    found = [cuts.of(one, trainable=one is small) for one in (large, small, large, small)]
    assert found == [640, 64, 0, 0]
