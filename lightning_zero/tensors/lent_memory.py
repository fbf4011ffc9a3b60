"""Memory of the host that is lent, and lent again when nothing refers to it any more."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_zero.tensors.lasting import lasting_tensors


class LentMemory:
    """Memory of the host that is lent, and lent again when nothing refers to it any more.

    New memory costs: the system takes more time for it than to read a file of its size, and to pin
    it more still. Whoever keeps a view, or an array of it, keeps what it shows.

    Args:
        of_many_sizes: Whether memory of all sizes is kept for later, or of the last size only.
    """

    def __init__(self, *, of_many_sizes: bool) -> None:
        self._of_many_sizes = of_many_sizes
        self._free: dict[int, list[Tensor]] | None = {}

    @property
    def nbytes(self) -> int:
        """Bytes that nobody has."""
        return sum(nbytes * len(free) for nbytes, free in (self._free or {}).items())

    def lend(
        self, numel: int, dtype: torch.dtype, make: Callable[[int, torch.dtype], Tensor]
    ) -> Tensor:
        """Return memory of just this size, which ``make`` makes if none is free.

        Its content is undefined.
        """
        nbytes, free = numel * dtype.itemsize, self._free or {}
        with lasting_tensors():
            if not nbytes:
                return torch.empty(numel, dtype=dtype, device="cpu")
            if not free.get(nbytes) and not self._of_many_sizes:
                free.clear()
            memory = free[nbytes].pop() if free.get(nbytes) else make(nbytes, torch.uint8)
            # Every storage that lies there holds this, and nothing else does.
            lent = memory.numpy().data
            weakref.finalize(lent, self._take_back, memory).atexit = False
            return torch.frombuffer(lent, dtype=dtype)

    def _take_back(self, memory: Tensor) -> None:
        if self._free is not None:
            self._free.setdefault(memory.numel(), []).append(memory)

    def close(self) -> None:
        """Take nothing back any more."""
        self._free = None
