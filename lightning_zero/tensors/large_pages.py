"""Large pages of memory, which the system takes in one go instead of 4 KiB by 4 KiB."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor

LARGE_BYTES = 4 * 2**20
"""What is smaller would have one page at most."""

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
_libc = ctypes.CDLL(None)


def ask_for_large_pages(tensor: Tensor) -> None:
    """Let the system use large pages for memory of the host that is to be filled.

    To take it in small ones costs more processor time than to read a file to it. It is only asked:
    one that has none goes on as before.
    """
    if _ADVICE is None or tensor.device.type != "cpu":
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if nbytes > 0:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), _ADVICE)
