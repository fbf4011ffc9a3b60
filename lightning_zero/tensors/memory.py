"""Chunk sizes, huge pages and memory-mapped files."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

_ON_CPU = 2**16
_ON_DEVICE = 2**24


def numel_at_a_time(device: torch.device) -> int:
    """Return how many elements of a large tensor a sequence of operations takes at a time.

    On a CPU they fit in a core's cache; on a device there are enough of them to keep it busy.
    """
    return _ON_CPU if device.type == "cpu" else _ON_DEVICE


LARGE_BYTES = 4 * 2**20
"""Size from which huge pages are asked for: smaller memory would get one at most."""

_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # not in Python's mmap before 3.13
_POPULATE_WRITE = 23  # of Linux 5.14 and newer; not in Python's mmap
_libc = ctypes.CDLL(None)


def private_map(nbytes: int) -> mmap.mmap:
    """Return zeros in memory of whole pages, huge if possible, that child processes do not inherit.

    Torch's allocator returns memory 64 bytes off a page. Being private, it counts towards the
    process's limits.
    """
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # What a request or a device writes to inherited pages during a fork is lost on older kernels.
    # Small instead of huge pages cost a third of the requests' time.
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        with contextlib.suppress(AttributeError, OSError):  # not every system has both
            memory.madvise(getattr(mmap, advice))
    return memory


def mapped_storage(path: Path | str) -> torch.UntypedStorage:
    """Return the bytes of a file, mapped to memory; changes stay in this process.

    Torch's own mapping reserves memory for changes of the whole file, which the system refuses if
    the file is larger than its memory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        flags, access = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        memory = mmap.mmap(descriptor, 0, flags=flags, prot=access)
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def ask_for_large_pages(tensor: Tensor) -> None:
    """Advise the system to use huge pages for host memory that is about to be filled.

    Faulting in small pages costs more CPU time than reading a file into them. A system without
    huge pages ignores the advice.
    """
    if _HUGE is not None and tensor.device.type == "cpu":
        _advise(tensor, _HUGE)


def fault_in(tensors: Sequence[Tensor]) -> None:
    """Fault in the pages of host memory that is about to be written.

    After writeback of a mapped file, the first write to each page would stall the thread. Resident
    pages cost nothing, and a system without this advice does nothing.
    """
    for tensor in tensors:
        if sys.platform == "linux" and tensor.device.type == "cpu":
            _advise(tensor, _POPULATE_WRITE)


def _advise(tensor: Tensor, advice: int) -> None:
    """Give advice on the whole pages of a tensor."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if nbytes > 0:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), advice)
