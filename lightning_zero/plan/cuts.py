"""How tensor parallelism cuts a parameter over the ranks of one group: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.tensors import PartlyRead

_CUT = "lightning_zero_cut"
_ORIGINAL = "lightning_zero_original"


@dataclass(frozen=True)
class Cut:
    """A parameter's equal parts along one dimension, of which this rank has one.

    Attributes:
        dim: The dimension.
        rank: This rank's number in its tensor-parallel group.
        size: The number of ranks in the group.
    """

    dim: int
    rank: int
    size: int

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole, given that of a part."""
        return tuple(n * self.size if dim == self.dim else n for dim, n in enumerate(shape))

    def part_of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor: a view, or read on use as the whole is."""
        numel = whole.shape[self.dim] // self.size
        if isinstance(whole, PartlyRead):
            return whole.narrowed(self.dim, self.rank * numel, numel)
        return whole.narrow(self.dim, self.rank * numel, numel)

    def whole_of(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor, given the parts of all ranks in their order."""
        return torch.cat([*parts], self.dim)


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
