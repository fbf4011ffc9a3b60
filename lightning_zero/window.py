"""Memory that every rank on a host can read, so that data need not travel through sockets.

A **window** is a tensor of this rank's that its peers have mapped too. Where all ranks share a host
and run on CPUs, masters and reduce buffers live in windows: a gather is then one copy out of the
peers' masters, and a reduction one sum over the peers' buffers. Nothing is sent but tokens of a few
bytes.

Windows are anonymous files of the kernel (``memfd_create``), which vanish with the last process
that maps them, whatever it dies of. Peers open them through the owner's entry in ``/proc``.
"""

from __future__ import annotations

import os
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.buffer import lasting_tensors

_serials = count()


class Address(NamedTuple):
    """Where a window of another process is found on this host."""

    process: int
    file: int
    numel: int
    serial: int


class Window:
    """``numel`` elements of this process's memory that others may map.

    Attributes:
        tensor: The memory, 1-D, zeros at first.
        readers: One number per rank, ``[world_size]``, that readers write and the owner reads.
        address: What others need to :func:`map_window` it.
    """

    def __init__(self, numel: int, dtype: torch.dtype, world_size: int) -> None:
        self._file = os.memfd_create("lightning_zero")
        os.ftruncate(self._file, _num_bytes(numel, dtype, world_size))
        self.address = Address(os.getpid(), self._file, numel, next(_serials))
        self.tensor, self.readers = map_window(self.address, dtype, world_size)

    def __del__(self) -> None:
        # Peers that map it keep their mapping; new ones can no longer open it.
        os.close(self._file)


def map_window(address: Address, dtype: torch.dtype, world_size: int) -> tuple[Tensor, Tensor]:
    """A window's memory and its readers' numbers, shared with its owner.

    Raises:
        RuntimeError: The owner is on another host, or its memory may not be opened from here.
    """
    path = f"/proc/{address.process}/fd/{address.file}"
    if not os.path.exists(path):
        raise RuntimeError(f"No window at {path}: its owner runs on another host, or has ended.")
    size = _num_bytes(address.numel, dtype, world_size)
    with lasting_tensors():
        memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        readers = memory[size - 8 * world_size :].view(torch.int64)
        return memory[: address.numel * dtype.itemsize].view(dtype), readers


def _num_bytes(numel: int, dtype: torch.dtype, world_size: int) -> int:
    # Layouts are aligned, so the numbers behind the data are too.
    return numel * dtype.itemsize + 8 * world_size


def are_supported() -> bool:
    """Whether this system has windows at all."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
