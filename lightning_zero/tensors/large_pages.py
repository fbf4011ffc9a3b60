"""Huge pages, which the system maps in one go instead of 4 KiB by 4 KiB."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor

LARGE_BYTES = 4 * 2**20
"""Size from which huge pages are asked for: smaller memory would get one at most."""

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
_libc = ctypes.CDLL(None)


def ask_for_large_pages(tensor: Tensor) -> None:
    """Advise the system to use huge pages for host memory that is about to be filled.

    Faulting in small pages costs more CPU time than reading a file into them. A system without
    huge pages ignores the advice.
    """
    if _ADVICE is None or tensor.device.type != "cpu":
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if nbytes > 0:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), _ADVICE)
