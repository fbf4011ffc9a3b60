"""Cuts of a rank's shards: whole pieces, in all as near to the ratio as they allow."""

from itertools import pairwise

import pytest
from torch import nn

from lightning_zero.plan import Offload, Settings, specify_units, with_cuts
from lightning_zero.plan.layout import Layout
from lightning_zero.plan.unit_specs import cuts_of

UNITS = [[300, 20, 700, 5], [64, 64, 64, 64], [5000], [100] * 9]


@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_share_of_all_shards_goes(ratio: float, world: int) -> None:
    layouts = [
        Layout.build([(f"p{n}", (size,), (1,)) for n, size in enumerate(sizes)], world)
        for sizes in UNITS * 5
    ]
    of = sum(layout.shard_numel for layout in layouts)
    for rank in range(world):
        cuts = cuts_of(layouts, ratio, rank)
        largest = []
        for layout, cut in zip(layouts, cuts, strict=True):
            assert 0 <= cut <= layout.shard_numel
            for index in range(len(layout.slots)):
                start, stop = layout.piece_in_shard(index, rank)
                assert start >= cut or stop <= cut
            largest.append(max(b - a for a, b in pairwise(sorted(layout.ends(rank)))))
        # Those of large pieces are off by more, and the others make up for it.
        assert abs(sum(cuts) - ratio * of) <= min(largest) / 2 + 1e-6


def test_frozen_parameters_are_counted_apart() -> None:
    model = nn.Sequential(*[nn.Linear(64, width, bias=False) for width in (8, 4, 8, 4)])
    for layer in model[::2]:
        layer.weight.requires_grad_(False)
    settings = Settings(units=(nn.Linear,), offload=Offload("cpu", "cpu", 0.5))
    specs = specify_units(model, settings)
    for ratio, expected in ((0.5, [512, 256, 0, 0]), (1, [None] * 4)):
        found = with_cuts(specs, ratio, num_shards=1, num_copies=1, rank=0)
        assert [f.num_away for spec in found for f in spec.flat_parameters] == expected
