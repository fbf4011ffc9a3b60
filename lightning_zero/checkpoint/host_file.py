"""A temporary file that the ranks of one host share: a download, or tensors put together."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.atomic import this_host
from lightning_zero.checkpoint.reading import Reading
from lightning_zero.tensors import mapped_storage

_ALIGNMENT = 64

Kind = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""


@dataclass
class HostFile:
    """A temporary file of a host's ranks, of which this is number ``number`` of ``count``."""

    path: Path
    number: int
    count: int

    def reserve(self, nbytes: int) -> None:
        """Give the file its size, with room on the disk; called by one rank.

        Raises:
            OSError: The disk is full.
        """
        with self.path.open("r+b") as file:
            try:
                if hasattr(os, "posix_fallocate") and nbytes:
                    # Without room, a write to the mapped file would end the process.
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                else:
                    file.truncate(nbytes)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise OSError(
                    errno.ENOSPC,
                    f"{tempfile.gettempdir()!r} has no room for the {nbytes:,} bytes of tensors of"
                    " a directory. Set the environment variable TMPDIR to a folder that has",
                ) from error

    def tensors(self, kinds: list[Kind], *, is_shared: bool) -> list[Tensor]:
        """Return tensors that lie in the file one after another, mapped to memory.

        Changes reach the file and the other ranks if ``is_shared``, and only this process if not.
        """
        places, nbytes = _places(kinds)
        return mapped(self.path, nbytes, places, is_shared=is_shared)


def nbytes_of(kinds: list[Kind]) -> int:
    """Return the size of a file of these tensors."""
    return _places(kinds)[1]


Place = tuple[torch.dtype, tuple[int, ...], int, int]
"""A tensor's dtype and shape, and its first byte and the one after its last in a file."""


def _places(kinds: list[Kind]) -> tuple[list[Place], int]:
    places: list[Place] = []
    position = 0
    for dtype, shape in kinds:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        places.append((dtype, shape, position, position + nbytes))
        position = -(-(position + nbytes) // _ALIGNMENT) * _ALIGNMENT
    return places, position


def mapped(
    path: Path, nbytes: int, places: list[Place], *, is_shared: bool = False
) -> list[Tensor]:
    """Return tensors in a file of ``nbytes``, mapped to memory, each with its own storage."""
    if not nbytes:
        return [torch.empty(shape, dtype=dtype, device="cpu") for dtype, shape, _, _ in places]
    found = []
    whole = (
        torch.UntypedStorage.from_file(str(path), True, nbytes)
        if is_shared
        else mapped_storage(path)
    )
    for dtype, shape, start, stop in places:
        stride = torch.empty(shape, device="meta").stride()
        part: Any = whole[start:stop]
        if start % dtype.itemsize:  # a foreign file, in which it does not lie as the dtype needs
            part = part.clone()
        found.append(torch.empty(0, dtype=dtype, device="cpu").set_(part, 0, shape, stride))
    return found


@contextlib.contextmanager
def host_file(reading: Reading) -> Iterator[HostFile]:
    """Enter a context with a file that the ranks of this host share; a collective.

    The file loses its name at the end; what is mapped by then stays.
    """
    control, own = reading.control, None
    hosts = control.gather_objects(this_host())
    ranks = [rank for rank, host in enumerate(hosts) if host == hosts[control.rank]]
    with reading.together():
        if control.rank == ranks[0]:
            descriptor, own = tempfile.mkstemp(prefix="checkpoint-")
            os.close(descriptor)
    path: str = control.gather_objects(own)[ranks[0]]
    try:
        yield HostFile(Path(path), ranks.index(control.rank), len(ranks))
    finally:
        if own is not None:
            os.unlink(own)
