"""Host memory that is lent out, and reused once nothing refers to it any more."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_zero.tensors.lasting import lasting_tensors

SECTOR = 512
"""The alignment of direct I/O in bytes, in the file and in memory."""


class LentMemory:
    """Host memory that is lent out, and reused once nothing refers to it any more.

    New memory is expensive: allocating it takes the system longer than reading a file of its size,
    and pinning it longer still. A view or an array of lent memory keeps it from being reused.

    Args:
        most: How many free blocks to keep, the most recently freed ones; all if omitted.
    """

    def __init__(self, *, most: int | None = None) -> None:
        self._free: deque[Tensor] = deque(maxlen=most)

    @property
    def nbytes(self) -> int:
        """Bytes of the free blocks."""
        return sum(memory.nbytes for memory in self._free.copy())

    def lend(
        self,
        numel: int,
        dtype: torch.dtype,
        make: Callable[[int, torch.dtype], Tensor],
        *,
        behind_sector: int | None = None,
    ) -> Tensor:
        """Return memory of exactly this size, newly made by ``make`` if none is free.

        Its content is undefined. With ``behind_sector`` its address is that many bytes past a
        multiple of :data:`SECTOR`.
        """
        nbytes = numel * dtype.itemsize
        with lasting_tensors():
            if not nbytes:
                return torch.empty(numel, dtype=dtype, device="cpu")
            nbytes += 0 if behind_sector is None else SECTOR
            memory = self._taken(nbytes)
            if memory is None:
                memory = make(nbytes, torch.uint8)
            # Held by every storage on this memory and by nothing else, so it dies with the last.
            lent = memory.numpy().data
            weakref.finalize(lent, self._free.append, memory).atexit = False
            shift = 0 if behind_sector is None else behind_sector - memory.data_ptr()
            return torch.frombuffer(lent, dtype=dtype, count=numel, offset=shift % SECTOR)

    def _taken(self, nbytes: int) -> Tensor | None:
        # No lock: a finalizer that runs in this thread would wait for it forever. Each call on the
        # deque is atomic, and between calls other threads may append and take.
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
        """Drop the free blocks, and keep none from now on."""
        self._free = deque(maxlen=0)
