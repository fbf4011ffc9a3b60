"""Ranges of a flat buffer as boxes of an n-d tensor, and how boxes overlap: pure arithmetic.

A rank owns a range of a tensor's elements in memory order, which may begin and end anywhere. Other
formats know only boxes: an offset and a size in each dimension. A range consists of a few boxes:
elements ``[2, 10)`` of a 4 x 3 tensor are three::

    . . a
    b b b
    b b b
    c . .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """Elements ``[offset, offset + size)`` in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The indices of the box in the tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Return whether the box lies inside a tensor of ``shape``."""
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            o >= 0 and n >= 0 and o + n <= size
            for o, n, size in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection; ``None`` if it is empty."""
        starts = tuple(map(max, zip(self.offsets, other.offsets, strict=True)))
        stops = map(min, zip(self._stops, other._stops, strict=True))
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def seen_from(self, other: Box) -> Box:
        """Return the same box, with offsets from the first element of ``other``."""
        offsets = zip(self.offsets, other.offsets, strict=True)
        return Box(tuple(mine - its for mine, its in offsets), self.sizes)

    def permuted(self, order: Sequence[int]) -> Box:
        """Return the box with its dimensions in another order."""
        return Box(tuple(self.offsets[d] for d in order), tuple(self.sizes[d] for d in order))

    @property
    def _stops(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offsets, self.sizes, strict=True))


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the fewest boxes that make up elements ``[start, stop)`` of a tensor, in order.

    Elements are counted with the last dimension fastest; each box is a range of them.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(
        shape, first - 1, start - (first - 1) * row, row if first * row > start else 0
    )
    if first < last:
        rest = tuple(shape[1:])
        yield Box((first, *(0 for _ in rest)), (last - first, *rest))
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes(shape[1:], start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes))


def boxes_in_memory(
    shape: Sequence[int], stride: Sequence[int], start: int, stop: int
) -> Iterator[Box]:
    """Yield the boxes that make up elements ``[start, stop)`` of a tensor in memory order."""
    order = memory_order(shape, stride)
    for box in boxes([shape[dimension] for dimension in order], start, stop):
        yield box.permuted(inverse(order))


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions from the slowest to the fastest in memory."""
    # The stride of a dimension of size 1 says nothing.
    return tuple(sorted(range(len(shape)), key=lambda d: -stride[d] if shape[d] > 1 else -(2**62)))


def dense_stride(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the stride of a dense tensor whose dimensions have this order in memory."""
    stride, step = [0] * len(shape), 1
    for dimension in reversed(order):
        stride[dimension] = step
        step *= max(shape[dimension], 1)
    return tuple(stride)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether a tensor is dense, in any order of its dimensions."""
    dense = dense_stride(shape, memory_order(shape, stride))
    steps = zip(shape, stride, dense, strict=True)
    return all(size <= 1 or step == needed for size, step, needed in steps)


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Return the inverse of a permutation."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))
