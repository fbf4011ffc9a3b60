"""Layouts, exhaustively: slots, shards and pieces cover a buffer once and nothing twice."""

from itertools import product

import pytest

from lightning_zero.plan import ALIGNMENT, Layout


def build(*sizes: int, world: int) -> Layout:
    return Layout.build([(f"p{size}", (size,), (1,)) for size in sizes], world)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_slots_gaps_and_pieces_cover_the_buffer_once(world: int) -> None:
    for sizes in product([0, 1, 63, 64, 65, 200], repeat=3):
        layout = build(*sizes, world=world)
        spans = [*((slot.offset, slot.stop) for slot in layout.slots), *layout.gaps]
        taken = sorted(index for start, stop in spans for index in range(start, stop))
        assert len(taken) == len(set(taken))
        assert all(slot.offset % ALIGNMENT == 0 for slot in layout.slots)
        assert layout.numel % (ALIGNMENT * world) == 0
        assert layout.numel < sum(sizes) + ALIGNMENT * (len(sizes) + world)
        for index, slot in enumerate(layout.slots):
            elements = []
            for rank in range(world):
                _, start, stop, in_shard = layout.pieces(rank)[index]
                first, last = layout.shard(rank)
                is_inside = first <= slot.offset + start < slot.offset + stop <= last
                assert start == stop == 0 or is_inside
                shift = slot.offset - first if stop else 0
                assert in_shard == slice(start + shift, stop + shift)
                elements += range(start, stop)
            assert elements == list(range(slot.numel))


def test_nothing_makes_an_empty_buffer() -> None:
    assert (build(world=3).numel, build(world=3).gaps) == (0, ())
    empty = build(0, world=3)
    assert (empty.numel, empty.pieces(2)) == (0, [(*empty.slots, 0, 0, slice(0, 0))])
