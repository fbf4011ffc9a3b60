"""Reading ahead in mapped files, before their pages are touched one by one."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor

_libc = ctypes.CDLL(None)
_WILL_NEED = 3  # MADV_WILLNEED, the same on Linux and macOS
_ADVISED_BYTES = 2**17  # Linux reads at least this much per call, and drops the rest of larger ones
_PROBED_BYTES = 2**22


def read_ahead(value: Tensor) -> None:
    """Ask the system to read the part of a mapped file behind ``value`` before it is copied.

    Cold pages that the copy faults in one by one take several times as long. One page in each 4 MiB
    is probed; if it is resident, these 4 MiB are skipped.
    """
    if value.device.type != "cpu" or not value.numel() or not value.is_contiguous():
        return
    stop = value.data_ptr() + value.nbytes
    begin = value.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    for start in range(begin, stop, _PROBED_BYTES):
        end = min(stop, start + _PROBED_BYTES)
        if _is_resident((end - 1) // mmap.PAGESIZE * mmap.PAGESIZE):
            continue
        # Only advice: for memory that is not a file's, the system refuses or does nothing.
        for place in range(start, end, _ADVISED_BYTES):
            nbytes = min(end - place, _ADVISED_BYTES)
            _libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(nbytes), _WILL_NEED)


def _is_resident(page: int) -> bool:
    """Return whether the page at an address is in memory; ``False`` if that is unknown."""
    state = ctypes.c_ubyte()
    failed = _libc.mincore(ctypes.c_void_p(page), ctypes.c_size_t(1), ctypes.byref(state))
    return not failed and bool(state.value & 1)
