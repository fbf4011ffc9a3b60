"""Writing at offsets of a file, large parts by direct I/O.

The time to write a new file is spent not on the disk but in the page cache in front of it: on a
fresh page and a copy for every 4 KiB, under one lock for all processes that write to the file. A
checkpoint is rarely read again soon, and its pages evict others. So large parts go straight to the
disk (``O_DIRECT``), from one aligned buffer. Their unaligned ends, small parts, and everything on a
file system without direct I/O go through the cache.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from lightning_zero.tensors import PAGE, StagingMemory

BUFFER_BYTES = 8 * 2**20
_LARGE = 2**18
"""Parts of at least this many bytes are written by direct I/O, which pays off for them."""


class Writer:
    """A writer of this process's parts of an existing file; a context manager.

    Other processes may write elsewhere in the file at the same time.
    """

    def __init__(
        self, path: Path | str, on_written: Callable[[int], object] = lambda nbytes: None
    ) -> None:
        self._on_written = on_written
        self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._direct = _open_directly(path)
        self._buffer: StagingMemory | None = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)
        self._give_up_direct()

    def write(self, place: int, content: Tensor | bytes) -> int:
        """Write bytes, or a tensor of bytes ``[n]`` on any device, at offset ``place``.

        Returns their CRC-32.
        """
        if isinstance(content, bytes):
            self._write_at(place, content)
            return zlib.crc32(content)
        checksum, start = 0, 0
        is_direct = len(content) >= _LARGE and self._direct is not None
        while start < len(content):
            ahead, left = -(place + start) % PAGE, len(content) - start
            if is_direct and not ahead and left >= PAGE:
                nbytes = min(left // PAGE * PAGE, BUFFER_BYTES)
                chunk = self._aligned(content[start : start + nbytes])
                self._write_directly(place + start, chunk)
            else:
                nbytes = ahead or min(left, BUFFER_BYTES) if is_direct else BUFFER_BYTES
                chunk = content[start : start + nbytes].to("cpu").numpy().data
                self._write_at(place + start, chunk)
            checksum = zlib.crc32(chunk, checksum)
            start += len(chunk)
            self._on_written(len(chunk))
        return checksum

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        os.fsync(self._file)

    def _aligned(self, content: Tensor) -> memoryview:
        if self._buffer is None:
            self._buffer = StagingMemory(BUFFER_BYTES)
        self._buffer.tensor[: len(content)].copy_(content)
        return self._buffer.part(0, len(content))

    def _write_directly(self, place: int, chunk: memoryview) -> None:
        written = 0
        try:
            written = os.pwrite(self._direct, chunk, place) if self._direct is not None else 0
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            self._give_up_direct()  # the disk has larger blocks, or direct I/O fails after all
        # The rest of a short write goes through the cache, which raises the reason.
        self._write_at(place + written, chunk[written:])

    def _write_at(self, place: int, content: bytes | memoryview) -> None:
        view = memoryview(content)
        while view:
            written = os.pwrite(self._file, view, place)
            view, place = view[written:], place + written

    def _give_up_direct(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


def _open_directly(path: Path | str) -> int | None:
    direct = getattr(os, "O_DIRECT", None)
    if direct is None:
        return None  # macOS
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | direct)
    except OSError:
        return None  # writes go through the cache
