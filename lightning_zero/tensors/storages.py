"""Storages that are counted while they are alive."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class Storages:
    """A set of storages, each counted until it is freed or removed."""

    def __init__(self) -> None:
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """The total size of the storages now."""
        held = (ref() for ref in tuple(self._held.values()))
        return sum(storage.nbytes() for storage in held if storage is not None)

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._held:
            self._held[key] = weakref.ref(storage, lambda _: self._held.pop(key, None))

    def remove(self, tensor: Tensor) -> None:
        """Stop counting the storage of a tensor."""
        self._held.pop(tensor.untyped_storage()._cdata, None)
