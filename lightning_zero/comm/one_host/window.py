"""Memory that every rank on a host can read, so that data need not pass through sockets.

A **window** is memory of this rank that its peers have mapped too. Where all ranks share a host and
run on CPUs, masters and reduce buffers live in windows: a gather is then one copy out of the peers'
masters, and a reduction one sum over the peers' buffers. Only tokens of a few bytes are sent.

Windows are anonymous kernel files (``memfd_create``) or, for offload, unnamed files on a disk. Both
vanish with the last process that maps them, however it ends. Peers open them through the owner's
entry in ``/proc``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.plan import Slot
from lightning_zero.tensors import Scratch, lasting_tensors

_NAME = "lightning_zero"
_serials = count()


class Address(NamedTuple):
    """A window's place on this host, with a serial number that makes it unique."""

    process: int
    file: int
    inode: int
    capacity: int
    serial: int


class Window:
    """Memory that its owner and others have mapped.

    Attributes:
        address: What others need to :meth:`open` it.
        readers: How many publications each rank has read, ``[world_size]``; in the window too.
        num_published: How often the owner has published its content.
        touched_bytes: End of the range that views have covered, in bytes.
        used_for: The slots that the owner filled last, and a view of each.
    """

    def __init__(self, address: Address, world_size: int, *, is_own: bool) -> None:
        path = f"/proc/{address.process}/fd/{address.file}"
        self._size = address.capacity + 8 * world_size
        if not _is_there(path, address.inode, self._size):
            raise RuntimeError(
                f"No shared-memory window at {path}: its owner is on another host or has exited."
            )
        self.address = address
        self.num_published = 0
        self.touched_bytes = 0
        self.used_for: tuple[Sequence[Slot], list[Tensor]] = ((), [])
        self._is_own = is_own
        with lasting_tensors():
            self._memory = torch.from_file(path, shared=True, size=self._size, dtype=torch.uint8)
            self.readers = self._memory[address.capacity :].view(torch.int64)
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    @classmethod
    def create(cls, capacity: int, world_size: int, scratch: Scratch | None = None) -> Window:
        """Make a window of ``capacity`` zero bytes (a multiple of 8), in memory or in a file."""
        size = capacity + 8 * world_size
        if scratch is None:
            file = os.memfd_create(_NAME)
            os.ftruncate(file, size)
        else:
            file = scratch.file(size)
        inode = os.fstat(file).st_ino
        address = Address(os.getpid(), file, inode, capacity, next(_serials))
        return cls(address, world_size, is_own=True)

    @classmethod
    def open(cls, address: Address, world_size: int) -> Window:
        """Map another process's window.

        Raises:
            DistError: The owner is on another host or has ended, or its memory may not be opened
                from here.
        """
        try:
            return cls(address, world_size, is_own=False)
        except (OSError, RuntimeError) as error:
            raise dist.DistError(str(error)) from error

    def __del__(self) -> None:
        # Peers that map it keep their mapping; new ones can no longer open it.
        if getattr(self, "_is_own", False):
            os.close(self.address.file)

    def view(self, numel: int, dtype: torch.dtype, *, start: int = 0) -> Tensor:
        """Return ``numel`` elements from ``start`` on; the same tensor for the same arguments."""
        view = self._views.get((start, numel, dtype))
        if view is None:
            first, stop = start * dtype.itemsize, (start + numel) * dtype.itemsize
            self.touched_bytes = max(self.touched_bytes, stop)
            with lasting_tensors():
                view = self._memory[first:stop].view(dtype)
            self._views[start, numel, dtype] = view
        return view

    def is_read_by_all(self, owner: int) -> bool:
        """Return whether every rank but ``owner`` has read all publications."""
        readers = self.readers.tolist()
        del readers[owner]
        return readers.count(self.num_published) == len(readers)


def _is_there(path: str, inode: int, size: int) -> bool:
    """Return whether this is the intended file: a process id of another host may match any here."""
    try:
        found = os.stat(path)
        return (found.st_ino, found.st_size) == (inode, size)
    except OSError:
        return False


def are_supported() -> bool:
    """Return whether this system supports windows."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
