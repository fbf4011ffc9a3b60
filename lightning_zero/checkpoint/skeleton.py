"""A checkpoint as one pickle and the storages it refers to, in the format of ``torch.save``."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.spread import Spread

Stored = Spread | torch.UntypedStorage


@dataclass(frozen=True)
class Skeleton:
    """What ``torch.load`` unpickles, without the values of tensors.

    Attributes:
        pickled: The ``data.pkl`` of the file.
        storages: What the records ``data/0``, ``data/1``, ... hold.
    """

    pickled: bytes
    storages: tuple[Stored, ...]

    @classmethod
    def of(cls, value: Any) -> Skeleton:
        """The skeleton of ``value``; the tensors in it stay where they are."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(value)
        return cls(file.getvalue(), tuple(pickler.storages))

    def spreads(self) -> dict[str, Spread]:
        """The spread tensors, by key."""
        return {stored.key: stored for stored in self.storages if isinstance(stored, Spread)}

    def copied_to_host(self) -> Skeleton:
        """The same with copies of this rank's values, which nobody changes any more."""
        copies: list[Stored] = []
        for stored in self.storages:
            if isinstance(stored, Spread):
                copies.append(stored.with_part(stored.part.to("cpu", copy=True)))
            else:
                copies.append(bytes_of(stored).to("cpu", copy=True).untyped_storage())
        return Skeleton(self.pickled, tuple(copies))


def size_of(stored: Stored) -> int:
    """Bytes of a record."""
    return stored.whole_nbytes if isinstance(stored, Spread) else stored.nbytes()


def bytes_of(value: Tensor | torch.UntypedStorage) -> Tensor:
    """The bytes ``[n]`` of a contiguous tensor or a storage, sharing its memory."""
    if isinstance(value, Tensor):
        return value.detach().reshape(-1).view(torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value)


class _Place:
    """Stands for the storage of a spread tensor while it is pickled."""

    def __init__(self, spread: Spread) -> None:
        self.spread = spread


class _Pickler(pickle.Pickler):
    """Pickles as ``torch.save`` does, and takes note of every storage instead of writing it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[Stored] = []
        self._numbers: dict[Any, int] = {}

    def persistent_id(self, obj: Any) -> tuple[str, Any, str, str, int] | None:
        if isinstance(obj, _Place):
            spread = obj.spread
            number = self._number(spread.key, spread)
            kind = _storage_type(spread.dtype) or torch.UntypedStorage
            size = prod(spread.shape)
            size *= spread.dtype.itemsize if kind is torch.UntypedStorage else 1
        elif isinstance(obj, torch.storage.TypedStorage):
            number = self._number(obj._untyped_storage._cdata, obj._untyped_storage)
            kind, size = _storage_type(obj.dtype), obj._size()  # type: ignore[no-untyped-call]
        elif isinstance(obj, torch.UntypedStorage):
            number, kind, size = self._number(obj._cdata, obj), torch.UntypedStorage, obj.nbytes()
        else:
            return None
        # Whoever reads the file need not have the devices of those who wrote it.
        return ("storage", kind, str(number), "cpu", size)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Spread):
            return NotImplemented
        args: Any = (_Place(obj), 0, tuple(obj.shape), obj.stride(), False, OrderedDict())
        if _storage_type(obj.dtype) is None:
            return torch._utils._rebuild_tensor_v3, (*args, obj.dtype)
        return torch._utils._rebuild_tensor_v2, args

    def _number(self, identity: Any, stored: Stored) -> int:
        if identity not in self._numbers:
            self._numbers[identity] = len(self.storages)
            self.storages.append(stored)
        return self._numbers[identity]


def _storage_type(dtype: torch.dtype) -> Any:
    """The class that files name for a dtype; ``None`` for those that torch added later."""
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return getattr(torch, name) if name else None
