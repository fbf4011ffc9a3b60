"""Layouts, exhaustively: slots, shards and pieces cover a buffer once and nothing twice."""

from itertools import product

import pytest

from lightning_zero.plan import ALIGNMENT, Layout

SIZES = [0, 1, 2, 63, 64, 65, 200]


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * size)
    return tuple(stride) if shape else ()


def build(shapes: list[tuple[int, ...]], world: int) -> Layout:
    named = [(f"p{number}", shape, contiguous(shape)) for number, shape in enumerate(shapes)]
    return Layout.build(named, world)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_slots_gaps_and_pieces_cover_the_buffer_once(world: int) -> None:
    for sizes in product(SIZES, repeat=3):
        layout = build([(size,) for size in sizes], world)
        taken = [0] * layout.numel
        for slot in layout.slots:
            assert slot.offset % ALIGNMENT == 0
            for index in range(slot.offset, slot.stop):
                taken[index] += 1
        for start, stop in layout.gaps:
            for index in range(start, stop):
                taken[index] += 1
        assert set(taken) <= {1}
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


def test_a_slot_keeps_what_its_parameter_was() -> None:
    layout = Layout.build([("conv", (5, 3, 3, 3), (27, 1, 9, 3)), ("gain", (), ())], 2)
    conv, gain = layout.slots
    assert (conv.name, conv.shape, conv.stride) == ("conv", (5, 3, 3, 3), (27, 1, 9, 3))
    assert (conv.numel, conv.offset, conv.stop) == (135, 0, 135)
    assert (gain.numel, gain.offset) == (1, 192)


def test_nothing_makes_an_empty_buffer() -> None:
    layout = Layout.build([], 3)
    assert (layout.numel, layout.shard_numel, layout.gaps) == (0, 0, ())
    empty = build([(0, 6)], 3)
    assert (empty.numel, empty.pieces(2)) == (0, [(*empty.slots, 0, 0, slice(0, 0))])
