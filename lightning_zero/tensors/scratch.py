"""Unnamed files for tensors that should not fill memory.

A file is memory-mapped: its tensor is read and written like any other, and the system moves pages
between memory and the disk. It vanishes with the last process that maps it, however that ends. Its
blocks are reserved when it is made, as a write to mapped memory without room on the disk would kill
the process.

A :class:`StagedFile` is also read and written in large requests by direct I/O (``O_DIRECT``). Where
the file system refuses that, or the mapping does not show what it writes, requests go through the
page cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_zero.tensors.contexts import lasting_tensors
from lightning_zero.tensors.transfers import PAGE, StagingMemory, in_pages


class Scratch:
    """A folder for the files of one rank, created with the first file if it is missing."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.abspath(folder)

    def file(self, nbytes: int) -> int:
        """Open a new file of ``nbytes`` zero bytes with reserved room; return its descriptor.

        Raises:
            OSError: There is no room, or the folder cannot be written to.
        """
        if not hasattr(os, "posix_fallocate"):
            raise OSError("Offload to files needs Linux: this system cannot reserve space.")
        try:
            os.makedirs(self.folder, exist_ok=True)
            with tempfile.TemporaryFile(prefix="lightning_zero.", dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                return os.dup(file.fileno())
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}: cannot reserve {nbytes:,} more bytes in"
                f" offload_path={self.folder!r}. Free disk space, or set offload_path to a folder"
                " on a larger disk.",
            ) from error

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return ``numel`` zeros in a new file."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        file = self.file(numel * dtype.itemsize)
        try:
            with lasting_tensors():
                return torch.from_file(
                    f"/proc/self/fd/{file}", shared=True, size=numel, dtype=dtype
                )
        finally:
            os.close(file)  # the mapping keeps it


class StagedFile:
    """A file of ``nbytes`` zeros, rounded up to whole pages.

    Attributes:
        mapped: Its bytes, memory-mapped.
    """

    def __init__(self, scratch: Scratch, nbytes: int) -> None:
        size = in_pages(nbytes)
        self._folder = scratch.folder
        self._file = scratch.file(size)
        path = f"/proc/self/fd/{self._file}"
        with lasting_tensors():
            self.mapped = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        with contextlib.suppress(OSError):  # the file system refuses it
            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT)
            if not self._shows_in_mapping():
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags)

    def __del__(self) -> None:
        # The mapping stays valid.
        if hasattr(self, "_file"):
            os.close(self._file)

    def read(self, start: int, out: memoryview) -> None:
        """Fill ``out`` from ``start`` on.

        Raises:
            OSError: The disk failed; the message names the folder.
        """
        self._all(os.preadv, start, out, "Reading")

    def write(self, start: int, source: memoryview) -> None:
        """Write ``source`` from ``start`` on.

        Raises:
            OSError: The disk failed; the message names the folder.
        """
        self._all(os.pwritev, start, source, "Writing")

    def _all(
        self,
        request: Callable[[int, list[memoryview], int], int],
        start: int,
        memory: memoryview,
        doing: str,
    ) -> None:
        done = 0
        try:
            while done < len(memory):
                count = request(self._file, [memory[done:]], start + done)
                if count <= 0:
                    raise OSError(errno.EIO, "Unexpected end of file")
                done += count
        except OSError as error:
            raise OSError(
                error.errno,
                f"{doing} {len(memory):,} bytes in {self._folder!r} failed: {error.strerror}",
            ) from error

    def _shows_in_mapping(self) -> bool:
        """Return whether requests and the mapping see each other's writes, as tried on a page.

        Systems do not promise it for direct I/O.
        """
        buffer = StagingMemory(PAGE)
        first, view = self.mapped[:PAGE], buffer.part(0, PAGE)
        try:
            first.fill_(1)
            self.read(0, view)
            is_read = bool(buffer.tensor.all())
            buffer.tensor.zero_()
            self.write(0, view)
            return is_read and not first.any()
        except OSError:  # it has larger blocks
            return False
        finally:
            first.zero_()
