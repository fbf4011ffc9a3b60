"""Reading a mapped file before its pages are asked for one by one."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor

_libc = ctypes.CDLL(None)
_WILL_NEED = 3  # MADV_WILLNEED, the same on Linux and macOS
_ADVISED_BYTES = 2**17  # what Linux reads for one advice, at least; of more it drops the rest
_PROBED_BYTES = 2**22


def read_ahead(value: Tensor) -> None:
    """Let the system read what ``value`` shows of a mapped file at once, before it is copied.

    Page by page, as the copy comes to them, cold pages take several times as long. Of what is in
    memory already one page in 4 MiB is looked at, and nothing is asked.
    """
    if value.device.type != "cpu" or not value.numel() or not value.is_contiguous():
        return
    stop = value.data_ptr() + value.nbytes
    begin = value.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    for start in range(begin, stop, _PROBED_BYTES):
        end = min(stop, start + _PROBED_BYTES)
        if _is_resident((end - 1) // mmap.PAGESIZE * mmap.PAGESIZE):
            continue
        # An advice: where the memory is no file's, the system says no or does nothing.
        for place in range(start, end, _ADVISED_BYTES):
            nbytes = min(end - place, _ADVISED_BYTES)
            _libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(nbytes), _WILL_NEED)


def _is_resident(page: int) -> bool:
    """Return whether the page at an address is in memory; ``False`` if the system will not say."""
    state = ctypes.c_ubyte()
    failed = _libc.mincore(ctypes.c_void_p(page), ctypes.c_size_t(1), ctypes.byref(state))
    return not failed and bool(state.value & 1)
