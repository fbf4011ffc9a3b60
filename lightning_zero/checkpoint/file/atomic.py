"""Atomic saves: a checkpoint is written under a temporary name, and then gets its own.

If a process dies in between, what had the final name stays whole. A temporary file or folder is
locked while its writer lives; one without a lock was left behind by a dead process, and the next
save removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_zero.checkpoint.file.format import TABLE

_SUFFIX = ".saving"
"""Suffix of unfinished files and folders."""

_ASIDE = ".aside"

_TEMPORARY = re.compile(rf"\.(?P<name>.+)\.[0-9a-f]{{8}}(?P<suffix>{_SUFFIX}|{_ASIDE})")


class Temporary:
    """A file or folder that is written under a temporary name and renamed once it is complete.

    It is locked until it is closed; see :func:`remove_leftovers`.

    Args:
        target: The final name.
        nbytes: The size of the file; ``None`` for a folder.
    """

    def __init__(self, target: Path, nbytes: int | None) -> None:
        self.target = target
        check_target(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        self.path, self.descriptor = self._locked(is_folder=nbytes is None)
        if nbytes is not None:
            try:
                os.truncate(self.descriptor, nbytes)
            except OSError:
                self.close()
                raise

    def _locked(self, *, is_folder: bool) -> tuple[Path, int]:
        while True:
            path = self.target.parent / f".{self.target.name}.{secrets.token_hex(4)}{_SUFFIX}"
            if is_folder:
                path.mkdir()
            flags = os.O_RDONLY if is_folder else os.O_WRONLY | os.O_CREAT | os.O_EXCL
            descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
            with contextlib.suppress(OSError):  # a file system without locks: its leftovers stay
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():
                return path, descriptor
            os.close(descriptor)  # another save took it for a leftover before it was locked

    def keep(self) -> None:
        """Sync it, and give it its final name; the files in a folder are synced already."""
        os.fsync(self.descriptor)
        put_in_place(self.path, self.target)

    def close(self) -> None:
        """Close it, and remove it unless it was kept."""
        if os.path.lexists(self.path):
            remove_all(self.path)
        os.close(self.descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files and folders of dead writers, whose locks are free."""
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match is None:
            continue
        if match["suffix"] == _ASIDE:
            _bring_back(path, folder / match["name"])
            continue
        with contextlib.suppress(OSError):
            mode = os.O_RDONLY if path.is_dir() else os.O_RDWR
            descriptor = os.open(path, mode | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_all(path)
            finally:
                os.close(descriptor)


def remove_all(path: Path) -> None:
    """Remove a file, a link, or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        os.unlink(path)


def check_target(target: Path) -> None:
    """Raise an ``OSError`` for a device, a pipe, or a non-empty folder that is no checkpoint."""
    if target.exists() and not target.is_dir() and not target.is_file():
        raise FileExistsError(f"{str(target)!r} is a device or a pipe; save under another name")
    is_folder = target.is_dir() and not target.is_symlink()
    if is_folder and any(target.iterdir()) and not (target / TABLE).is_file():
        raise IsADirectoryError(
            f"{str(target)!r} is a folder that holds something other than a checkpoint; save under"
            " another name"
        )


def put_in_place(temporary: Path, target: Path) -> None:
    """Give a file or folder its final name, and remove what had the name before."""
    check_target(target)
    is_folder = target.is_dir() and not target.is_symlink()
    if not is_folder and not temporary.is_dir():
        os.replace(temporary, target)
    elif not os.path.lexists(target):
        os.rename(temporary, target)
    else:
        _exchange(temporary, target)
        remove_all(temporary)
    _sync_folder(target.parent)


def _exchange(temporary: Path, target: Path) -> None:
    """Swap two names atomically, or, where the system cannot, by three renames."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if swap and not swap(here, os.fsencode(temporary), here, os.fsencode(target), exchange):
        return
    aside = temporary.with_suffix(_ASIDE)
    os.rename(target, aside)
    os.rename(temporary, target)
    os.rename(aside, temporary)


def _bring_back(aside: Path, target: Path) -> None:
    """Undo an exchange that a process left half done when it died."""
    with contextlib.suppress(OSError):
        if os.path.lexists(target):
            remove_all(aside)
        else:
            os.rename(aside, target)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def target_of(path: str) -> Path | str:
    """Return the local path if there is one, else the URL."""
    file_system, local = fsspec.core.url_to_fs(path)
    return Path(local) if isinstance(file_system, LocalFileSystem) else path


def remove(path: str) -> None:
    """Remove a checkpoint, file or folder, if it exists."""
    file_system, local = fsspec.core.url_to_fs(path)
    if file_system.exists(local):
        file_system.rm(local, recursive=True)
