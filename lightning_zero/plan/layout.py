"""The place of every parameter in its flat buffer: pure arithmetic, without memory or ranks.

Nouns:

* **slot**: one parameter's name, shape, stride and offset.
* **layout**: the slots of one buffer, padded so that every rank's shard is equal.
* **shard**: a rank's contiguous, equal part of a buffer.
* **piece**: the part of one parameter that falls in a shard; 1-D, possibly empty.

Three parameters over two ranks (``.`` is padding to the alignment or to equal shards)::

    slots   | weight             | bias . | scale ...........|
    shards  | rank 0                 | rank 1                |
    pieces  | weight[0:n]            | weight[n:] bias scale |

A shard boundary may fall anywhere, even inside a row: element-wise optimizers do not care, and
equal shards make every collective a single call without a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm, prod
from typing import NamedTuple

from torch import Tensor

ALIGNMENT = 64
"""Alignment of slots and shards in elements: 256 bytes in fp32, like a fresh tensor."""


class Slot(NamedTuple):
    """One parameter's place in a buffer; ``stride`` keeps its memory format (channels last)."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the last element in the buffer."""
        return self.offset + self.numel


class PieceRange(NamedTuple):
    """The range of a parameter's elements that a rank owns, possibly empty.

    Elements are counted in memory order.

    Attributes:
        slot: Where the parameter lies in its buffer.
        start: First element.
        stop: One past the last element.
        in_shard: The same range, counted in elements of the rank's shard.
    """

    slot: Slot
    start: int
    stop: int
    in_shard: slice

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return self.stop - self.start

    def part_of(self, whole: Tensor) -> Tensor:
        """Return the elements ``[n]`` of ``whole``, of the parameter's shape, in this range.

        They are a view if the elements of ``whole`` lie in the parameter's order.
        """
        return self.flat(whole)[self.start : self.stop]

    def flat(self, whole: Tensor) -> Tensor:
        """Return all elements of ``whole``, of the parameter's shape, in the parameter's order."""
        slot = self.slot
        if whole.stride() == slot.stride:
            return whole.as_strided((slot.numel,), (1,), whole.storage_offset())
        flat = whole.new_empty(slot.numel)
        flat.as_strided(slot.shape, slot.stride).copy_(whole)
        return flat


@dataclass(frozen=True)
class Layout:
    """The slots of one flat buffer that is sharded over ``world_size`` ranks.

    With hybrid sharding these are the ranks of one copy.
    """

    slots: tuple[Slot, ...]
    numel: int
    world_size: int

    @classmethod
    def build(
        cls,
        parameters: Iterable[tuple[str, tuple[int, ...], tuple[int, ...]]],
        world_size: int,
        num_copies: int = 1,
    ) -> Layout:
        """Pack ``(name, shape, stride)`` back to back, aligned and padded to equal shards.

        Shards are divisible by ``num_copies``: that many ranks hold each, and share its reduction.
        """
        slots: list[Slot] = []
        offset = 0
        for name, shape, stride in parameters:
            slots.append(Slot(name, shape, stride, offset))
            offset = _round_up(offset + prod(shape), ALIGNMENT)
        multiple = lcm(ALIGNMENT, num_copies) * world_size
        return cls(tuple(slots), _round_up(offset, multiple), world_size)

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, padding included."""
        return self.numel // self.world_size

    @functools.cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The ranges of the buffer that no slot covers."""
        edges = [0, *(edge for slot in self.slots for edge in (slot.offset, slot.stop)), self.numel]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return tuple((start, stop) for start, stop in pairs if start < stop)

    def shard(self, rank: int) -> tuple[int, int]:
        """Return the first and one-past-last element of a rank's shard in the buffer."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def pieces(self, rank: int) -> list[PieceRange]:
        """Return the range of each slot that ``rank`` owns."""
        first, last = self.shard(rank)
        found = []
        for slot in self.slots:
            start, stop = max(slot.offset, first), min(slot.stop, last)
            if start < stop:
                in_shard = slice(start - first, stop - first)
                found.append(PieceRange(slot, start - slot.offset, stop - slot.offset, in_shard))
            else:
                found.append(PieceRange(slot, 0, 0, slice(0, 0)))
        return found


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
