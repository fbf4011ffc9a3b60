"""Parts of mapped tensors that were copied to new memory as soon as they had been checked.

Optimizer states get new memory anyhow. Copied right behind the check, they come from the cache, and
while the disk reads what is checked next; copied later, when all is checked, the disk would wait.
Nothing is in use before: a part is kept beside the tensor, by storage, until somebody takes it.
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
    """Return whether the elements of ``piece`` lie in a row in ``value``, both on the host."""
    return (
        type(value) is Tensor
        and isinstance(piece, Piece)
        and value.shape == piece.parameter.shape
        and value.stride() == piece.range.slot.stride
        and value.device == piece.device == torch.device("cpu")
    )


def keep_part(value: Tensor, piece: Any) -> None:
    """Copy the elements of ``piece`` in ``value``, which can be kept, until they are taken."""
    part = piece.range.part_of(value)
    own = _kept.setdefault(value.untyped_storage(), {})
    own[_place_of(part)] = internals.version_of(value), part.clone()


def take_part(value: Any, piece: Piece) -> Tensor | None:
    """Return the kept elements of ``piece`` in ``value``, unless they have changed since."""
    if not can_be_kept(value, piece):
        return None
    own = _kept.get(value.untyped_storage(), {})
    version, part = own.pop(_place_of(piece.range.part_of(value)), (-1, None))
    return part if version == internals.version_of(value) else None


def _place_of(part: Tensor) -> _Place:
    return _Place(int(part.storage_offset()), part.numel(), part.dtype)
