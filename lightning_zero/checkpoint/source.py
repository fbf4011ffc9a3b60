"""Where a parameter's values lie in a checkpoint, for weights that are read on every use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.checksums import check
from lightning_zero.checkpoint.unread import SMALL_BYTES
from lightning_zero.checkpoint.values.chunk import InOneRow
from lightning_zero.checkpoint.values.lazy_tensor import LazyTensor
from lightning_zero.tensors import lasting_tensors


class Source:
    """A whole parameter in a file, any range of which can be read; call :meth:`check` first.

    Args:
        name: For errors.
        value: The stored tensor, which must not change.

    Attributes:
        is_checked: Whether the values have been checked.
    """

    def __init__(self, name: str, value: Tensor) -> None:
        self._name = name
        self._value = value
        self._row = value.row if isinstance(value, LazyTensor) else None
        self.is_checked = False

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""
        return self._value.shape

    @classmethod
    def of(cls, name: str, value: Any) -> Source | None:
        """Return the source of a loaded value; ``None`` if it takes memory, or was changed."""
        if isinstance(value, LazyTensor):
            return cls(name, value) if value.value is None else None
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_meta:
            return None
        if value.numel() * value.element_size() > SMALL_BYTES:
            return None
        with lasting_tensors():
            return cls(name, value.to("cpu", copy=True))

    def lay_out(self, stride: Sequence[int]) -> None:
        """Count elements in the memory order of a tensor of this ``stride`` from now on."""
        if isinstance(self._value, LazyTensor):
            self._value = self._value.laid_out(stride)
            self._row = self._value.row if isinstance(self._value, LazyTensor) else None
        else:
            with lasting_tensors():
                ordered = torch.empty_strided(
                    self._value.shape, tuple(stride), dtype=self._value.dtype
                )
                self._value = ordered.copy_(self._value)

    def expect_passes(self) -> None:
        """Note that this process, and no other on this host, reads the values repeatedly."""
        for chunk in self._value.chunks if isinstance(self._value, LazyTensor) else ():
            if isinstance(chunk, InOneRow) and chunk.content.kept is not None:
                chunk.content.kept.expect_passes()

    def offset(self, dtype: torch.dtype) -> int | None:
        """Return where the elements lie contiguously in a file, if they do and have ``dtype``."""
        row = self._row
        return row.offset(0) if row is not None and row.dtype is dtype else None

    def check(self) -> None:
        """Raise a ``ValueError`` if the values are damaged; only the first call reads them."""
        if not self.is_checked and isinstance(self._value, LazyTensor):
            check(self._value.ranges(self._name, 0, self._value.numel()))
        self.is_checked = True

    def read(self, start: int, out: Tensor, dtype: torch.dtype) -> None:
        """Read elements from ``start`` on into ``out``, ``[n]``, cast to ``dtype`` on the way."""
        if self._row is not None and self._row.dtype is out.dtype:
            self._row.read_row(start, out)
            return
        if not isinstance(self._value, LazyTensor):
            part = self._value.as_strided((out.numel(),), (1,), start)
        elif dtype in (self._value.dtype, out.dtype):
            self._value.read_to(out, start)
            return
        else:
            part = self._value.part(start, start + out.numel())
        out.copy_(part.to(dtype))
