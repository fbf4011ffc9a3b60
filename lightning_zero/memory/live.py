"""Counts the bytes of every tensor that is alive, by watching each operation.

The count knows nothing of units or stages: it follows storages from the operation that makes them
to the moment when nobody holds them, resizing included. It counts fake tensors like real ones, so a
dry run and a real run are measured by the same ruler.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """A context that counts storages made within it, or named by ``follow``.

    Attributes:
        peak: The most bytes that were alive at once since the last :meth:`restart`.
    """

    def __init__(self, on_operation: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.peak = 0
        self._on_operation = on_operation
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._ignored: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were there before."""
        self._note(self._live, tensors)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of these tensors out of the count."""
        self._note(self._ignored, tensors)

    def restart(self) -> int:
        """Begin a new peak at what is alive now; returns the old peak."""
        before, self.peak = self.peak, self.count()
        return before

    def count(self) -> int:
        """Bytes alive now."""
        held = (ref() for ref in tuple(self._live.values()))
        return sum(storage.nbytes() for storage in held if storage is not None)

    def _note(
        self, into: dict[int, weakref.ref[torch.UntypedStorage]], tensors: Iterable[Any]
    ) -> None:
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._live or key in self._ignored:
                continue
            # The address is free for another storage as soon as this one dies.
            into[key] = weakref.ref(storage, lambda _, key=key: into.pop(key, None))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and _is_fake(args[0]):
            # A number read from a tensor without data (`.item()`, `if x.any()`) is taken as zero.
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        out = func(*args, **(kwargs or {}))
        self._note(self._live, tree_leaves(out))
        self.peak = max(self.peak, self.count())
        if self._on_operation is not None:
            self._on_operation()
        return out


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)
