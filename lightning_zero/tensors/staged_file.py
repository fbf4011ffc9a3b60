"""An unnamed file that is read and written in large requests by direct I/O.

It is also memory-mapped, for code that looks at its tensors in between. Where the file system
refuses direct I/O (``O_DIRECT``), or the mapping does not show what it writes, requests go through
the page cache.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable

import torch

from lightning_zero.tensors.lasting import lasting_tensors
from lightning_zero.tensors.scratch import Scratch
from lightning_zero.tensors.staging import PAGE, StagingMemory, in_pages


class StagedFile:
    """A file of ``nbytes`` zeros, rounded up to whole pages.

    Attributes:
        mapped: Its bytes, memory-mapped.
        is_direct: Whether requests are direct I/O.
    """

    def __init__(self, scratch: Scratch, nbytes: int) -> None:
        size = in_pages(nbytes)
        self._folder = scratch.folder
        self._file = scratch.file(size)
        path = f"/proc/self/fd/{self._file}"
        with lasting_tensors():
            self.mapped = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        self.is_direct = self._set_direct(True)
        if self.is_direct and not self._shows_in_mapping():
            if not self._set_direct(False):
                raise OSError(
                    errno.ENOTSUP,
                    f"Files in {self._folder!r} only support direct I/O, which does not show in"
                    " their memory maps",
                )
            self.is_direct = False

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

    def _set_direct(self, value: bool) -> bool:
        """Turn direct I/O on or off; return whether that succeeded."""
        try:
            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            flags = flags | os.O_DIRECT if value else flags & ~os.O_DIRECT
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags)
        except OSError:
            return False
        return True

    def _shows_in_mapping(self) -> bool:
        """Return whether requests and the mapping see each other's writes, as tried on a page."""
        buffer = StagingMemory(PAGE)
        first, view = self.mapped[:PAGE], buffer.part(0, PAGE)
        try:
            for value in (1, 0):
                first.fill_(value + 2)
                self.read(0, view)
                seen = buffer.tensor.eq(value + 2).all()
                buffer.tensor.fill_(value)
                self.write(0, view)
                if not (seen and first.eq(value).all()):
                    return False
        except OSError:
            return False
        finally:
            first.zero_()
        return True
