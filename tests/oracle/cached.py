"""The share of a file that the system's cache has, by the system's own word."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy

_libc = ctypes.CDLL(None)


def forget(path: Path) -> None:
    """Let the system drop what it keeps of a file in memory."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def cached_share(path: Path) -> float:
    """Return the share of a file's pages that are in memory."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        array = numpy.frombuffer(mapped, numpy.uint8)
        place = ctypes.c_void_p(array.ctypes.data)
        assert not _libc.mincore(place, ctypes.c_size_t(size), ctypes.byref(pages))
        del array
        return sum(page & 1 for page in pages) / len(pages)


def are_forgettable(path: Path) -> bool:
    """Return whether the system drops a file when asked, and reads it past its cache."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    forget(path)
    return cached_share(path) == 0
