"""Parts of mapped tensors that are copied to new memory as soon as they have been checked.

Optimizer states need new memory anyway. A part that is copied right after its check is still in the
cache, and the disk meanwhile reads what is checked next; if copying waited for the last check, the
disk would idle. Copies are kept by the tensor's storage, and used only when they are taken.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_zero.parameters import Piece
from lightning_zero.tensors import internals


class _Place(NamedTuple):
    start: int
    numel: int
    dtype: torch.dtype


_kept: WeakKeyDictionary[torch.UntypedStorage, dict[_Place, tuple[int, Tensor]]]
_kept = WeakKeyDictionary()


def can_be_kept(value: Any, piece: Any) -> bool:
    """Return whether ``piece`` is a contiguous range of ``value``, and both are on the host."""
    return (
        type(value) is Tensor
        and isinstance(piece, Piece)
        and value.shape == piece.range.slot.shape
        and value.stride() == piece.range.slot.stride
        and value.device == piece.device == torch.device("cpu")
    )


def keep_part(value: Tensor, piece: Any) -> None:
    """Keep a copy of the elements of ``piece`` in ``value``; :func:`can_be_kept` must hold."""
    part = piece.range.part_of(value)
    own = _kept.setdefault(value.untyped_storage(), {})
    own[_place_of(part)] = internals.version_of(value), part.clone()


def take_part(value: Any, piece: Piece) -> Tensor | None:
    """Remove and return the kept elements of ``piece``; ``None`` if ``value`` has changed since."""
    if not can_be_kept(value, piece):
        return None
    own = _kept.get(value.untyped_storage(), {})
    version, part = own.pop(_place_of(piece.range.part_of(value)), (-1, None))
    return part if version == internals.version_of(value) else None


def _place_of(part: Tensor) -> _Place:
    return _Place(int(part.storage_offset()), part.numel(), part.dtype)
