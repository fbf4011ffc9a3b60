"""Memory of the host that is lent, and lent again when nothing refers to it any more."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_zero.tensors.lasting import lasting_tensors

SECTOR = 512
"""Bytes that requests past the system's cache are multiples of, in the file and in memory."""


class LentMemory:
    """Memory of the host that is lent, and lent again when nothing refers to it any more.

    New memory costs: the system takes more time for it than to read a file of its size, and to pin
    it more still. Whoever keeps a view, or an array of it, keeps what it shows.

    Args:
        most: How many of what nobody has are kept, the last ones; all if omitted.
    """

    def __init__(self, *, most: int | None = None) -> None:
        self._free: deque[Tensor] = deque(maxlen=most)

    @property
    def nbytes(self) -> int:
        """Bytes that nobody has."""
        return sum(memory.nbytes for memory in self._free.copy())

    def lend(
        self,
        numel: int,
        dtype: torch.dtype,
        make: Callable[[int, torch.dtype], Tensor],
        *,
        behind_sector: int | None = None,
    ) -> Tensor:
        """Return memory of just this size, which ``make`` makes if none is free.

        Its content is undefined. It lies where ``make`` puts it, or so many bytes behind a sector.
        """
        nbytes = numel * dtype.itemsize
        with lasting_tensors():
            if not nbytes:
                return torch.empty(numel, dtype=dtype, device="cpu")
            nbytes += 0 if behind_sector is None else SECTOR
            memory = self._taken(nbytes)
            if memory is None:
                memory = make(nbytes, torch.uint8)
            # Every storage that lies there holds this, and nothing else does.
            lent = memory.numpy().data
            weakref.finalize(lent, self._free.append, memory).atexit = False
            shift = 0 if behind_sector is None else behind_sector - memory.data_ptr()
            return torch.frombuffer(lent, dtype=dtype, count=numel, offset=shift % SECTOR)

    def _taken(self, nbytes: int) -> Tensor | None:
        # No lock, which a finalizer in this thread would wait for: each call is one step, between
        # which other threads may append, and take.
        taken = None
        with contextlib.suppress(IndexError):
            for _ in range(len(self._free)):
                memory = self._free.popleft()
                if taken is None and memory.nbytes == nbytes:
                    taken = memory
                else:
                    self._free.append(memory)
        return taken

    def close(self) -> None:
        """Keep nothing any more."""
        self._free = deque(maxlen=0)
