"""Tensors whose values lie in a file, and of which a part can be read without the rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

SECTOR = 512
"""The alignment of direct I/O in bytes, in the file and in memory."""


class PartlyRead(Tensor):
    """A tensor that is read only as far as it is used; its parts are read on use, too.

    Attributes:
        is_checked: Whether its values are known to be intact.
    """

    is_checked: bool

    @abstractmethod
    def laid_out(self, stride: Sequence[int]) -> PartlyRead:
        """Return the same tensor with its elements in another memory order."""

    @abstractmethod
    def part(self, start: int, stop: int, stride: Sequence[int]) -> Tensor:
        """Return elements ``[start, stop)``, ``[n]``, in the order of a tensor of this stride."""

    @abstractmethod
    def narrowed(self, dim: int, start: int, length: int) -> Tensor:
        """Return what :meth:`torch.Tensor.narrow` does, but not as a view."""

    @abstractmethod
    def check(self) -> None:
        """Raise a ``ValueError`` if the values are damaged, unless they were checked already."""

    @abstractmethod
    def read_to(self, out: Tensor, start: int) -> None:
        """Read elements from ``start`` on into ``out``, ``[n]``, which may have another dtype.

        They are counted in memory order.

        Raises:
            ValueError: What is read is damaged.
        """

    @abstractmethod
    def offset(self, dtype: torch.dtype) -> int | None:
        """Return the file offset of its elements if they are contiguous and have ``dtype``."""
