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
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from lightning_zero.checkpoint.checksums import PartChecksums, PartSummer
from lightning_zero.checkpoint.values.places import BUFFER_BYTES
from lightning_zero.checkpoint.word_sums import BLOCK_BYTES
from lightning_zero.tensors import PAGE, StagingMemory

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

    def write(self, place: int, content: Tensor | bytes, start: int = 0) -> PartChecksums:
        """Write bytes, or a tensor of bytes ``[n]`` on any device, at offset ``place``.

        Returns their checksums; ``start`` is where the content begins in its record.
        """
        if len(content) < BLOCK_BYTES and isinstance(content, Tensor):
            chunk = _in_memory(content)
            write_at(self._file, place, chunk)
            self._on_written(len(chunk))
            return PartChecksums.of_short(start, chunk)
        summer = PartSummer(start)
        if isinstance(content, bytes):
            write_at(self._file, place, content)
            summer.add(content)
            return summer.checksums
        start = 0
        is_large = len(content) >= _LARGE
        while start < len(content):
            left = len(content) - start
            ahead = -(place + start) % PAGE
            if not is_large or self._direct is None:
                chunk = _in_memory(content[start : start + BUFFER_BYTES])
                write_at(self._file, place + start, chunk)
            elif ahead or left < PAGE:
                chunk = _in_memory(content[start : start + (ahead or left)])
                write_at(self._file, place + start, chunk)
            else:
                nbytes = min(left // PAGE * PAGE, BUFFER_BYTES)
                chunk = self._aligned(content[start : start + nbytes])
                self._write_directly(place + start, chunk)
            summer.add(chunk)
            start += len(chunk)
            self._on_written(len(chunk))
        return summer.checksums

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
        write_at(self._file, place + written, chunk[written:])

    def _give_up_direct(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


def write_at(descriptor: int, place: int, content: bytes | memoryview) -> None:
    """Write all of ``content`` at offset ``place`` of a file."""
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, place)
        view, place = view[written:], place + written


def _in_memory(content: Tensor) -> memoryview:
    return content.to("cpu").numpy().data


def _open_directly(path: Path | str) -> int | None:
    direct = getattr(os, "O_DIRECT", None)
    if direct is None:
        return None  # macOS
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | direct)
    except OSError:
        return None  # writes go through the cache
