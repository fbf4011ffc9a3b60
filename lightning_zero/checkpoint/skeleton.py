"""A checkpoint as one pickle and the storages it refers to, in the format of ``torch.save``."""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections import Counter, OrderedDict
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.provenance import PROVENANCE
from lightning_zero.checkpoint.values import ShardedValue

Stored = ShardedValue | torch.UntypedStorage
Content = bytes | Tensor | ShardedValue
"""A record's content: bytes, a tensor of bytes ``[n]``, or a value spread over the ranks."""


@dataclass(frozen=True)
class Skeleton:
    """The pickle that ``torch.load`` reads, and the content of the records ``data/0``, ....

    Attributes:
        names: The name of each sharded storage, the same on every rank, by its number.
    """

    pickled: bytes
    storages: tuple[Stored, ...]
    names: dict[int, str]

    @classmethod
    def of(cls, value: Any) -> Skeleton:
        """Take ``value`` apart; the tensors in it stay where they are."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(value)
        return cls(file.getvalue(), tuple(pickler.storages), pickler.names)

    def sharded_values(self) -> dict[str, ShardedValue]:
        """Return the sharded values, by name."""
        found: dict[str, Any] = {name: self.storages[n] for n, name in self.names.items()}
        return found

    def records(self, provenance: bytes) -> list[tuple[str, Content]]:
        """Return names and contents of a file's records."""
        records: list[tuple[str, Content]] = [
            ("data.pkl", self.pickled),
            ("byteorder", sys.byteorder.encode()),
            ("version", b"3\n"),
            (PROVENANCE, provenance),
        ]
        for number, stored in enumerate(self.storages):
            content = stored if isinstance(stored, ShardedValue) else bytes_of(stored)
            records.append((f"data/{number}", content))
        return records

    def copied_to_host(self) -> Skeleton:
        """Return the same with host copies of this rank's values, which nothing else changes."""
        copies: list[Stored] = []
        for stored in self.storages:
            if isinstance(stored, ShardedValue):
                copies.append(stored.with_part(stored.part.to("cpu", copy=True)))
            else:
                copies.append(bytes_of(stored).to("cpu", copy=True).untyped_storage())
        return Skeleton(self.pickled, tuple(copies), self.names)


def size_of(content: Content) -> int:
    """Return the size of a record in bytes."""
    return content.whole_nbytes if isinstance(content, ShardedValue) else len(content)


def bytes_of(value: torch.UntypedStorage) -> Tensor:
    """Return the bytes ``[n]`` of a storage, sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value)


class _Storage:
    """A stand-in for the storage of a sharded value while it is pickled."""

    def __init__(self, value: ShardedValue) -> None:
        self.value = value


class _Pickler(pickle.Pickler):
    """A pickler like that of ``torch.save`` that collects storages instead of writing them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[Stored] = []
        self.names: dict[int, str] = {}
        self._numbers: dict[Any, int] = {}
        self._counts: Counter[str] = Counter()

    def persistent_id(self, obj: Any) -> tuple[str, Any, str, str, int] | None:
        if type(obj) in _PLAIN:  # most of what a pickle has
            return None
        if isinstance(obj, _Storage):
            value = obj.value
            number = self._number(id(value), value)
            if number not in self.names:
                # Modules of one checkpoint, or copies of earlier values, may have equal keys.
                count = self._counts[value.key]
                self._counts[value.key] += 1
                self.names[number] = f"{value.key} ({count + 1})" if count else value.key
            shape, _, dtype = value.facts
            kind = _storage_type(dtype) or torch.UntypedStorage
            size = prod(shape) * (dtype.itemsize if kind is torch.UntypedStorage else 1)
        elif isinstance(obj, torch.storage.TypedStorage):
            number = self._number(obj._untyped_storage._cdata, obj._untyped_storage)
            kind, size = _storage_type(obj.dtype), obj._size()  # type: ignore[no-untyped-call]
        elif isinstance(obj, torch.UntypedStorage):
            number, kind, size = self._number(obj._cdata, obj), torch.UntypedStorage, obj.nbytes()
        else:
            return None
        # A reader need not have the writers' devices.
        return ("storage", kind, str(number), "cpu", size)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, ShardedValue):
            return NotImplemented
        if (value := obj.settled()) is not obj:
            return value.__reduce_ex__(2)  # type: ignore[no-untyped-call]
        shape, stride, dtype = obj.facts
        args: Any = (_Storage(obj), 0, shape, stride, False, OrderedDict())
        if _storage_type(dtype) is None:
            return torch._utils._rebuild_tensor_v3, (*args, dtype)
        return torch._utils._rebuild_tensor_v2, args

    def _number(self, identity: Any, stored: Stored) -> int:
        if identity not in self._numbers:
            self._numbers[identity] = len(self.storages)
            self.storages.append(stored)
        return self._numbers[identity]


_PLAIN = {str, int, tuple, dict, float, bool, type(None), OrderedDict, torch.dtype, ShardedValue}


@functools.cache
def _storage_type(dtype: torch.dtype) -> Any:
    """Return the storage class that files name for a dtype; ``None`` for newer dtypes."""
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return getattr(torch, name) if name else None
