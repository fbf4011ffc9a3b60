"""Files that are read part by part, some of them repeatedly.

Reads go through the page cache, where other ranks and later passes find the content. But a file
that does not fit there keeps evicting the parts that are needed next, so that each pass reads all
of it from the disk and pays for the cache's pages on top. So parts that the cache has lost since
they were last read are read with direct I/O (``O_DIRECT``), and what fits stays cached. Direct I/O
takes whole sectors of the file and of memory: it goes straight to memory that is aligned as the
file is, and to other memory through a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections import deque
from pathlib import Path

from torch import Tensor

from lightning_zero.tensors import PAGE, SECTOR, StagingMemory, in_pages

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p

_BLOCK_BYTES = 4 * 2**20
_MEMORY_BYTES = _BLOCK_BYTES + 2**21
"""A block plus the rest of its pages, in huge pages, as requests to small ones are split up."""

_MOST_FREE = 2
"""The number of buffers for direct I/O that are kept; each thread uses one at a time."""


class OpenFile:
    """A file that stays open while this object lives, even if it is renamed or removed."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._again: _ReadAgain | None = None

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def expect_passes(self) -> None:
        """Note that this process, and no other on this host, reads the file repeatedly."""
        if self._again is None and hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):  # a file system without direct I/O
                self._again = _ReadAgain(self.descriptor)

    def will_read(self, offset: int, nbytes: int) -> None:
        """Ask the system to start reading, if it can be asked."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def read_once(self, memory: memoryview, offset: int) -> None:
        """Fill ``memory`` from ``offset`` of the file on, as no part of a pass.

        Raises:
            OSError: The file is too short, or the disk failed.
        """
        _fill(self.descriptor, memory, offset)

    def read(self, out: Tensor, offset: int) -> None:
        """Fill ``out``, bytes ``[n]``, as :meth:`read_once`, in a pass if there are several."""
        if self._again is None or not self._again.read(out, offset):
            _fill(self.descriptor, memory_of(out), offset)


def memory_of(out: Tensor) -> memoryview:
    """Return the memory of bytes ``[n]``."""
    # Not through numpy: torch no longer frees a storage that was made into an array.
    return memoryview((ctypes.c_ubyte * out.numel()).from_address(out.data_ptr())).cast("B")


def _fill(descriptor: int, memory: memoryview, offset: int, least: int | None = None) -> None:
    """Fill ``memory`` from ``offset`` of a file, which may end after ``least`` bytes."""
    done, least = 0, len(memory) if least is None else least
    while done < least:
        count = os.preadv(descriptor, [memory[done:]], offset + done)
        if not count:
            raise OSError(errno.EIO, f"the file ends before byte {offset + least}")
        done += count


class _ReadAgain:
    """Repeated reads of a file, by direct I/O where the page cache has lost it.

    Raises:
        OSError: The file does not support direct I/O, or cannot be mapped.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._nbytes = os.fstat(descriptor).st_size
        self._were_read = bytearray(-(-self._nbytes // _BLOCK_BYTES))
        self._free: deque[StagingMemory] = deque(maxlen=_MOST_FREE)
        # By the descriptor, since the file may have lost its name.
        path = f"/proc/self/fd/{descriptor}"
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        self._takes_sectors = self._try_sector()
        # Only to ask which pages are cached. Shared, since a private mapping counts as memory.
        self._address = _libc.mmap(
            None,
            ctypes.c_size_t(self._nbytes),
            mmap.PROT_READ,
            mmap.MAP_SHARED,
            descriptor,
            ctypes.c_long(0),
        )
        if self._address == ctypes.c_void_p(-1).value:
            del self._address
            raise OSError(ctypes.get_errno(), "mmap")

    def __del__(self) -> None:
        if hasattr(self, "_address"):
            _libc.munmap(ctypes.c_void_p(self._address), ctypes.c_size_t(self._nbytes))
        if hasattr(self, "_file"):
            os.close(self._file)

    def read(self, out: Tensor, offset: int) -> bool:
        """Fill ``out`` by direct I/O if these bytes were read before and the cache has lost them.

        Returns whether ``out`` was filled.
        """
        stop = offset + len(out)
        blocks = slice(offset // _BLOCK_BYTES, -(-stop // _BLOCK_BYTES))
        was_read = all(self._were_read[blocks])
        self._were_read[blocks] = bytes([1]) * len(self._were_read[blocks])
        if not was_read or self._are_cached(offset, stop):
            return False
        lies_alike = (out.data_ptr() - offset) % SECTOR == 0
        try:
            if self._takes_sectors and lies_alike:
                self._read_sectors(memory_of(out), offset)
            else:
                self._read_and_copy(out, offset)
        except OSError:  # a read through the cache may succeed, or raises there
            return False
        return True

    def _read_sectors(self, memory: memoryview, offset: int) -> None:
        """Fill ``memory``; sectors that are only partly in it are read through the cache."""
        stop = offset + len(memory)
        first, last = -(-offset // SECTOR) * SECTOR, stop // SECTOR * SECTOR
        if first >= last:
            first = last = stop
        _fill(self._descriptor, memory[: first - offset], offset)
        _fill(self._file, memory[first - offset : last - offset], first)
        _fill(self._descriptor, memory[last - offset :], last)

    def _read_and_copy(self, out: Tensor, offset: int) -> None:
        """Fill ``out`` through a buffer of whole pages."""
        stop = offset + len(out)
        try:
            memory = self._free.pop()
        except IndexError:  # none yet, or other threads use them all
            memory = StagingMemory(_MEMORY_BYTES)
        for start in range(offset, stop, _BLOCK_BYTES):
            end, begin = min(stop, start + _BLOCK_BYTES), start // PAGE * PAGE
            _fill(self._file, memory.part(0, in_pages(end - begin)), begin, least=end - begin)
            place, source = out.data_ptr() + start - offset, memory.tensor.data_ptr()
            ctypes.memmove(place, source + start - begin, end - start)
        self._free.append(memory)

    def _try_sector(self) -> bool:
        """Return whether direct I/O takes single sectors; some disks take whole pages only."""
        memory = StagingMemory(PAGE)
        try:
            _fill(self._file, memory.part(SECTOR, SECTOR), SECTOR)
        except OSError:
            return False
        return True

    def _are_cached(self, start: int, stop: int) -> bool:
        """Return whether bytes ``[start, stop)`` are all cached; ``True`` if that is unknown."""
        begin = start // mmap.PAGESIZE * mmap.PAGESIZE
        pages = (ctypes.c_ubyte * (-(-(stop - begin) // mmap.PAGESIZE)))()
        place = ctypes.c_void_p(self._address + begin)
        if _libc.mincore(place, ctypes.c_size_t(stop - begin), ctypes.byref(pages)):
            return True
        return all(page & 1 for page in pages)
