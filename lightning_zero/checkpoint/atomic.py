"""Atomic saves: a checkpoint is written under a temporary name, and then gets its own.

If a process dies in between, what had the final name stays whole. The temporary name says which
process of which host writes; the next save of that host removes what a dead process left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import socket
import zlib
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

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
        check_target(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
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
            remove_all(self.path)


def this_host() -> str:
    """Return eight letters that tell apart hosts, and containers with processes of their own."""
    facts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not Linux
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        facts.append(os.readlink("/proc/self/ns/pid"))
    return f"{zlib.crc32(repr(facts).encode()):08x}"


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files and folders of this host's dead processes."""
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or match["host"] != this_host():
            continue
        try:
            os.kill(int(match["process"]), 0)
        except ProcessLookupError:
            with contextlib.suppress(OSError):
                remove_all(path)
        except PermissionError:  # it lives
            pass


def remove_all(path: Path) -> None:
    """Remove a file, a link, or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        os.unlink(path)


def check_target(target: Path) -> None:
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
    check_target(target)
    is_folder = target.is_dir() and not target.is_symlink()
    if not is_folder and not temporary.is_dir():
        os.replace(temporary, target)
    elif not os.path.lexists(target):
        os.rename(temporary, target)
    else:
        _exchange(temporary, target)
        _remove_own(temporary)
    for aside in _aside(target):
        _remove_own(aside)
    _sync_folder(target.parent)


def _exchange(temporary: Path, target: Path) -> None:
    """Swap two names atomically, or, where the system cannot, by three renames."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if swap and not swap(here, os.fsencode(temporary), here, os.fsencode(target), exchange):
        return
    # If this process dies in between, ``ckpt_path="last"`` and loading find this name.
    aside = target.with_name(f"{target.stem}.aside-{secrets.token_hex(4)}{target.suffix}")
    os.rename(target, aside)
    os.rename(temporary, target)
    os.rename(aside, temporary)


def _aside(target: Path) -> list[Path]:
    """Return the names that :func:`_exchange` has left beside ``target``."""
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
