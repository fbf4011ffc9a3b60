"""Unnamed files for tensors that should not fill memory.

A file is memory-mapped: its tensor is read and written like any other, and the system moves pages
between memory and the disk. It vanishes with the last process that maps it, however that ends. Its
blocks are reserved when it is made, as a write to mapped memory without room on the disk would kill
the process.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.tensors.lasting import lasting_tensors


class Room(NamedTuple):
    """The bytes that a folder's files will take on its disk, and how many are free there."""

    disk: tuple[str, int]
    nbytes: int
    free: int


class Scratch:
    """A folder for the files of one rank.

    Args:
        folder: The folder, created by :meth:`promise` if it is missing.
    """

    def __init__(self, folder: str) -> None:
        self.folder = os.path.abspath(folder)
        self._promised = 0

    @property
    def is_memory(self) -> bool:
        """Return whether the folder's files are in memory, so that offload to it gains nothing."""
        device = os.stat(self.folder).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == number:
                return kind.split()[0] in ("tmpfs", "ramfs")
        return False

    def promise(self, nbytes: int) -> Room:
        """Count ``nbytes`` as taken until files use them; return what is taken so, and is free.

        Raises:
            OSError: The folder cannot be written to.
        """
        self._promised += nbytes
        if not hasattr(os, "posix_fallocate"):
            raise OSError("Offload to files needs Linux: this system cannot reserve space.")
        os.makedirs(self.folder, exist_ok=True)
        os.close(_unnamed(self.folder))
        free, disk = os.statvfs(self.folder), os.stat(self.folder).st_dev
        return Room((socket.gethostname(), disk), self._promised, free.f_bavail * free.f_frsize)

    def file(self, nbytes: int) -> int:
        """Open a new file of ``nbytes`` zero bytes with reserved room; return its descriptor."""
        file = _unnamed(self.folder)
        try:
            os.posix_fallocate(file, 0, nbytes)
        except OSError as error:
            os.close(file)
            raise OSError(
                error.errno,
                f"{error.strerror}: cannot reserve {nbytes:,} more bytes in"
                f" offload_path={self.folder!r}. Free disk space, or set offload_path to a folder"
                " on a larger disk.",
            ) from error
        self._promised = max(0, self._promised - nbytes)
        return file

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


def _unnamed(folder: str) -> int:
    """Open an unnamed file in ``folder``."""
    with tempfile.TemporaryFile(prefix="lightning_zero.", dir=folder) as file:
        return os.dup(file.fileno())
