"""Memory that is counted for as long as somebody holds it."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class Storages:
    """Storages that are counted until nobody holds them."""

    def __init__(self) -> None:
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Their bytes now."""
        held = (ref() for ref in tuple(self._held.values()))
        return sum(storage.nbytes() for storage in held if storage is not None)

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._held:
            self._held[key] = weakref.ref(storage, lambda _: self._held.pop(key, None))

    def remove(self, tensor: Tensor) -> None:
        """Count the storage of a tensor no more."""
        self._held.pop(tensor.untyped_storage()._cdata, None)
