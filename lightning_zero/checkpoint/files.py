"""Temporary files and folders: of a save in progress, and one that the ranks of a host share.

If a process dies while it saves, what had the final name stays whole. The temporary name says which
process of which host writes; the next save of that host removes what a dead process left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from lightning_zero.checkpoint.reading import Reading
from lightning_zero.tensors import mapped_storage

TABLE = ".metadata"
"""The file that makes a folder a directory of torch.distributed.checkpoint."""

REST = "meta.pt"
"""The file of a directory with everything but tensors, named as by Lightning's strategies."""

_TEMPORARY = re.compile(r"\..+\.(?P<host>[0-9a-f]{8})-(?P<process>\d+)-[0-9a-f]{8}\.saving")
_OWN = re.compile(r"\.metadata|__\d+_\d+\.distcp|meta\.pt|lightning_zero\.json")
"""The files of a directory that a save writes."""


class Temporary:
    """A file or folder that is written under a temporary name and renamed once it is complete.

    Args:
        target: The final name.
        nbytes: The size of the file; ``None`` for a folder.
    """

    def __init__(self, target: Path, nbytes: int | None) -> None:
        self.target = target
        _check_target(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target.parent)
        writer = f"{this_host()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.path = target.parent / f".{target.name}.{writer}.saving"
        if nbytes is None:
            self.path.mkdir()
            return
        with self.path.open("xb") as file:
            try:
                file.truncate(nbytes)
            except OSError:
                self.close()
                raise

    def keep(self) -> None:
        """Give it its final name; the content is synced already."""
        put_in_place(self.path, self.target)

    def close(self) -> None:
        """Remove it unless it was kept."""
        if os.path.lexists(self.path):
            _remove_all(self.path)


def this_host() -> str:
    """Return eight digits that distinguish hosts, and containers with a PID namespace."""
    facts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not Linux
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        facts.append(os.readlink("/proc/self/ns/pid"))
    return f"{zlib.crc32(repr(facts).encode()):08x}"


def _remove_leftovers(folder: Path) -> None:
    """Remove temporary files and folders of this host's dead processes."""
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or match["host"] != this_host():
            continue
        try:
            os.kill(int(match["process"]), 0)
        except ProcessLookupError:
            with contextlib.suppress(OSError):
                _remove_all(path)
        except PermissionError:  # it lives
            pass


def _remove_all(path: Path) -> None:
    """Remove a file, a link, or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _check_target(target: Path) -> None:
    """Raise an ``OSError`` for a device, a pipe, or a folder with files that no save wrote."""
    if target.exists() and not target.is_dir() and not target.is_file():
        raise FileExistsError(f"{str(target)!r} is a device or a pipe; save under another name")
    if target.is_dir() and not target.is_symlink():
        held = sorted(os.listdir(target))
        foreign = next((name for name in held if not _OWN.fullmatch(name)), None)
        if held and TABLE not in held:
            foreign = held[0]
        if foreign is not None:
            raise IsADirectoryError(
                f"{str(target)!r} is a folder that holds something other than a checkpoint"
                f" ({foreign!r}); save under another name"
            )


def put_in_place(temporary: Path, target: Path) -> None:
    """Give a file or folder its final name, and remove the checkpoint that had it before."""
    _check_target(target)
    is_folder = target.is_dir() and not target.is_symlink()
    if os.path.lexists(target) and (is_folder or temporary.is_dir()):
        # If this process dies in between, ``ckpt_path="last"`` and loading find this name.
        name = f"{target.stem}.aside-{secrets.token_hex(4)}{target.suffix}"
        os.rename(target, target.with_name(name))
    os.replace(temporary, target)
    for aside in _aside(target):
        _remove_own(aside)
    _sync_folder(target.parent)


def _aside(target: Path) -> list[Path]:
    """Return the names to which :func:`put_in_place` has moved what was at ``target``."""
    name = re.compile(rf"{re.escape(target.stem)}\.aside-[0-9a-f]{{8}}{re.escape(target.suffix)}")
    found = target.parent.iterdir() if target.parent.is_dir() else ()
    return [path for path in found if name.fullmatch(path.name)]


def existing(path: Path) -> Path:
    """Return ``path``, or the name to which a save that died while replacing it has moved it."""
    return path if os.path.lexists(path) else next(iter(_aside(path)), path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def local_path(path: str) -> Path | None:
    """Return the local path of an ``fsspec`` URL; ``None`` if it has none."""
    file_system, local = fsspec.core.url_to_fs(path)
    return Path(local) if isinstance(file_system, LocalFileSystem) else None


def remove(path: str) -> None:
    """Remove a checkpoint, file or folder, if it exists; foreign files in a folder stay."""
    if (local := local_path(path)) is not None:
        if os.path.lexists(local):
            _remove_own(local)
        return
    file_system, place = fsspec.core.url_to_fs(path)
    if file_system.exists(place):
        file_system.rm(place)


def _remove_own(path: Path) -> None:
    """Remove a checkpoint, and of a folder only what a save has written."""
    if not path.is_dir() or path.is_symlink():
        os.unlink(path)
        return
    for file in path.iterdir():
        if _OWN.fullmatch(file.name):
            os.unlink(file)
    if not any(path.iterdir()):
        path.rmdir()


# -- a file of a host's ranks ----------------------------------------------------------------------

_ALIGNMENT = 64

Kind = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""

Place = tuple[torch.dtype, tuple[int, ...], int, int]
"""A tensor's dtype and shape, and its first byte and the one after its last in a file."""


@dataclass
class HostFile:
    """A temporary file of a host's ranks, of which this is number ``number`` of ``count``."""

    path: Path
    number: int
    count: int

    def reserve(self, nbytes: int) -> None:
        """Give the file its size, with room on the disk; called by one rank."""
        with self.path.open("r+b") as file:
            file.truncate(nbytes)
            if hasattr(os, "posix_fallocate") and nbytes:
                # Without room, a write to the mapped file would end the process.
                try:
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                except OSError as error:
                    raise OSError(
                        error.errno,
                        f"{error.strerror} for {nbytes:,} bytes in {str(self.path)!r}."
                        " Set the environment variable TMPDIR to a folder that has it",
                    ) from error


def places_of(kinds: Iterable[Kind]) -> tuple[list[Place], int]:
    """Return where tensors lie in a file one after another, and its size."""
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
    """Return tensors in a file of ``nbytes``, mapped to memory, each with its own storage.

    Changes reach the file and the other ranks if ``is_shared``, and only this process if not.
    """
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

    The file is unlinked at the end; mappings stay valid.
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
