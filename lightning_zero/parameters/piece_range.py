"""The range of a parameter that a rank owns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lightning_zero.plan import Slot
from lightning_zero.tensors import PartlyRead


class PieceRange(NamedTuple):
    """A range of one parameter's elements, possibly empty.

    Attributes:
        slot: Where the parameter lies in its buffer.
        start: First element, counted in the parameter's memory order.
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

        They are a view if the elements of ``whole`` lie in the parameter's order. Of a tensor that
        is read on use, nothing else is read.
        """
        if isinstance(whole, PartlyRead):
            return whole.part(self.start, self.stop, self.slot.stride)
        if whole.stride() == self.slot.stride:
            # An empty range might start past the storage of a tensor without elements.
            start = self.start if self.stop > self.start else 0
            offset = int(whole.storage_offset()) + start
            return whole.as_strided((self.stop - self.start,), (1,), offset)
        return self.flat(whole)[self.start : self.stop]

    def flat(self, whole: Tensor) -> Tensor:
        """Return all elements of ``whole``, of the parameter's shape, in the parameter's order."""
        slot = self.slot
        if whole.stride() == slot.stride:
            return whole.as_strided((slot.numel,), (1,), whole.storage_offset())
        flat = whole.new_empty(slot.numel)
        flat.as_strided(slot.shape, slot.stride).copy_(whole)
        return flat
