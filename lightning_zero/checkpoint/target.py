"""Where a checkpoint is written: under a temporary name, and then under its own.

Whoever dies in between leaves what stood under the final name whole. A temporary file or folder is
locked while its writer lives; one that nobody locks was left behind by a dead process, and the next
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

from lightning_zero.checkpoint.directory import TABLE

_SUFFIX = ".saving"
"""How the names of unfinished files and folders end."""

_ASIDE = ".aside"

_TEMPORARY = re.compile(rf"\.(?P<name>.+)\.[0-9a-f]{{8}}(?P<suffix>{_SUFFIX}|{_ASIDE})")


class TemporaryFile:
    """A file that is written under a temporary name and renamed when it is whole."""

    def __init__(self, target: Path) -> None:
        self.target = target
        check_target(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        self.path, self.descriptor = self._create()

    def _create(self) -> tuple[Path, int]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        while True:
            path = self.target.parent / f".{self.target.name}.{secrets.token_hex(4)}{_SUFFIX}"
            descriptor = os.open(path, flags, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass  # somebody took it for a leftover before it was locked
            except OSError:
                return path, descriptor  # a file system without locks: its leftovers stay
            if path.exists():
                return path, descriptor
            os.close(descriptor)

    def reserve(self, nbytes: int) -> None:
        """Give the file its size."""
        os.truncate(self.descriptor, nbytes)

    def keep(self) -> None:
        """Give the file its final name; its content is synced already."""
        put_in_place(self.path, self.target)

    def close(self) -> None:
        """Let go of the file, and remove it unless it was kept."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        os.close(self.descriptor)


class TemporaryFolder:
    """A folder that is written under a temporary name and renamed when it is whole.

    While it lives it is locked, as temporary files are; see :func:`remove_leftovers`.

    Raises:
        ValueError: The target is a URL.
    """

    def __init__(self, path: str) -> None:
        target = target_of(path)
        if not isinstance(target, Path):
            raise ValueError(
                "checkpoint='dcp' needs a disk that all ranks share, not a URL; checkpoint='file'"
                " writes to any other place too"
            )
        self.target = target
        check_target(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        self.path, self._descriptor = self._create()

    def _create(self) -> tuple[Path, int]:
        while True:
            path = self.target.parent / f".{self.target.name}.{secrets.token_hex(4)}{_SUFFIX}"
            path.mkdir()
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # a file system without locks: its leftovers stay
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():
                return path, descriptor
            os.close(descriptor)  # somebody took it for a leftover before it was locked

    def keep(self) -> None:
        """Give the folder its final name; its files are synced already."""
        os.fsync(self._descriptor)
        put_in_place(self.path, self.target)

    def close(self) -> None:
        """Let go of the folder, and remove it unless it was kept."""
        if self.path.exists():
            remove_all(self.path)
        os.close(self._descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files and folders whose writers are dead: nobody holds their locks."""
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
    """Remove a file, a link, or a folder with what is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        os.unlink(path)


def check_target(target: Path) -> None:
    """Raise an ``IsADirectoryError`` if the name is that of a folder that is no checkpoint."""
    is_folder = target.is_dir() and not target.is_symlink()
    if is_folder and any(target.iterdir()) and not (target / TABLE).is_file():
        raise IsADirectoryError(
            f"{str(target)!r} is a folder with other things than a checkpoint; save under another"
            " name"
        )


def put_in_place(temporary: Path, target: Path) -> None:
    """Give a file or folder its final name; what had the name before goes."""
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
    """Swap two names at once; where the system cannot, one after the other."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if swap and not swap(here, os.fsencode(temporary), here, os.fsencode(target), exchange):
        return
    aside = temporary.with_suffix(_ASIDE)
    os.rename(target, aside)
    os.rename(temporary, target)
    os.rename(aside, temporary)


def _bring_back(aside: Path, target: Path) -> None:
    """Undo half an exchange, in the middle of which a process died."""
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
    """A local path where there is one, else the URL."""
    file_system, local = fsspec.core.url_to_fs(path)
    return Path(local) if isinstance(file_system, LocalFileSystem) else path


def remove(path: str) -> None:
    """Remove a checkpoint, file or folder, if it exists."""
    file_system, local = fsspec.core.url_to_fs(path)
    if file_system.exists(local):
        file_system.rm(local, recursive=True)
