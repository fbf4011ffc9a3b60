"""How tensor parallelism cuts a parameter over the ranks of one group: pure arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_CUT = "lightning_zero_cut"
_ORIGINAL = "lightning_zero_original"


@dataclass(frozen=True)
class Cut:
    """The split of a parameter along one dimension over a tensor-parallel group.

    Ranks get consecutive ranges as in ``torch.chunk``, so the last ones may hold less. A packed
    weight (gate and up projection in one) is split block by block: each rank holds its range of
    every block.

    Attributes:
        dim: The dimension.
        rank: This rank's number in its tensor-parallel group.
        size: The number of ranks in the group.
        length: The whole parameter's size in that dimension.
        blocks: The number of blocks that are split one by one.
    """

    dim: int
    rank: int
    size: int
    length: int
    blocks: int = 1

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return the start and stop of what ``rank`` holds of each block."""
        found = []
        for first, last in _chunks(0, self.length, self.blocks):
            found.append(_chunks(first, last, self.size)[rank])
        return found

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole, given that of a part."""
        return tuple(self.length if dim == self.dim else n for dim, n in enumerate(shape))

    def part_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return the shape of what ``rank`` holds, given that of the whole or of a part."""
        length = sum(stop - start for start, stop in self.ranges(rank))
        return tuple(length if dim == self.dim else n for dim, n in enumerate(shape))

    def part_of(self, whole: Tensor, rank: int | None = None) -> Tensor:
        """Return what ``rank``, by default this one, holds of a whole tensor: a view, if it can."""
        ranges = self.ranges(self.rank if rank is None else rank)
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def whole_of(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor, given the parts of all ranks in their order."""
        if self.blocks == 1:
            return torch.cat([*parts], self.dim)
        split = [
            torch.split(part, [stop - start for start, stop in self.ranges(rank)], self.dim)
            for rank, part in enumerate(parts)
        ]
        return torch.cat([one for block in zip(*split, strict=True) for one in block], self.dim)


def _chunks(first: int, last: int, count: int) -> list[tuple[int, int]]:
    """Split a range as ``torch.chunk`` does, with empty ranges at the end."""
    step = -(-(last - first) // count)
    bounds = [min(first + step * number, last) for number in range(count + 1)]
    return [*itertools.pairwise(bounds)]


def cut_of(parameter: Any) -> Cut | None:
    """Return how a parameter is cut; ``None`` if every rank of its group has all of it."""
    return getattr(parameter, _CUT, None)


def whole_shape(parameter: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape, over all ranks that a parameter is cut over, of what has ``shape`` here."""
    cut = cut_of(parameter)
    return tuple(shape) if cut is None else cut.whole_shape(shape)


def set_cut(parameter: nn.Parameter, cut: Cut | None) -> None:
    """Note how a parameter is cut."""
    setattr(parameter, _CUT, cut)


def derived_class(cls: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    """Return a subclass of a module's class, with more members but under the same name."""
    own = {**members, _ORIGINAL: cls, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**own, "__qualname__": cls.__qualname__})


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's class, or the one from which :func:`derived_class` made it."""
    return getattr(type(module), _ORIGINAL, type(module))
