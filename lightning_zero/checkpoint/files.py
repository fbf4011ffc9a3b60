"""Files of a save in progress, files that the ranks of a host read together, and their names.

If a process dies while it saves, what had the final name stays whole. The temporary name says which
process of which host writes; the next save of that host removes what a dead process left behind.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import pickle
import re
import secrets
import shutil
import socket
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from lightning_zero.comm import Control, Outcome
from lightning_zero.tensors import PAGE, StagingMemory, mapped_storage

TABLE = ".metadata"
"""The file that makes a folder a directory of torch.distributed.checkpoint."""

REST = "meta.pt"
"""The file of a directory with everything but tensors, named as by Lightning's strategies."""

PROVENANCE = "lightning_zero.json"
"""The record, or in a directory the file, that says who wrote a checkpoint."""

FORMAT = 1
"""Number of the format; it grows when older readers would not understand a new one."""

_TEMPORARY = re.compile(r"\..+\.(?P<host>[0-9a-f]{8})-(?P<process>\d+)-[0-9a-f]{8}\.saving")
_OWN = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp|meta\.pt|lightning_zero\.json")
"""The files of a directory that a save writes."""


@dataclass(frozen=True)
class Provenance:
    """The origin of a checkpoint; stage 0 stands for a conversion."""

    stage: int
    world_size: int
    precision: str
    format: int = FORMAT

    def encoded(self) -> bytes:
        """Return the content of the record."""
        return json.dumps(asdict(self)).encode()


def provenance(place: Path) -> dict[str, Any] | None:
    """Return the record of a file's or directory's origin, if this package wrote it.

    Raises:
        ValueError: A later version did.
    """
    content = None
    if place.is_dir():
        content = file.read_bytes() if (file := place / PROVENANCE).is_file() else None
    elif zipfile.is_zipfile(place):
        with zipfile.ZipFile(place) as archive:
            names = [name for name in archive.namelist() if name.endswith(f"/{PROVENANCE}")]
            content = archive.read(names[0]) if names else None
    record = None if content is None else json.loads(content)
    if not isinstance(record, dict):
        return None
    if int(record.get("format", 0)) > FORMAT:
        raise ValueError(
            f"{str(place)!r} has format {record['format']} of a later lightning-zero, but this"
            f" version reads only formats up to {FORMAT}. Update the package"
        )
    return record


# -- temporary and final names ---------------------------------------------------------------------


@contextlib.contextmanager
def temporary(target: Path, *, is_folder: bool = False) -> Iterator[Path]:
    """Enter a context with a new file or folder beside ``target``.

    It is removed at the end unless :func:`put_in_place` has kept it.
    """
    _check_target(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target.parent)
    writer = f"{this_host()}-{os.getpid()}-{secrets.token_hex(4)}"
    path = target.with_name(f".{target.name}.{writer}.saving")
    if is_folder:
        path.mkdir()
    else:
        path.touch(exist_ok=False)
    try:
        yield path
    finally:
        if os.path.lexists(path):
            _remove_own(path)


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
                _remove_own(path)
        except PermissionError:  # it lives
            pass


def _check_target(target: Path) -> None:
    """Raise an ``OSError`` for a device, a pipe, or a folder with files that no save wrote."""
    if target.exists() and not target.is_dir() and not target.is_file():
        raise FileExistsError(f"{str(target)!r} is a device or a pipe; save under another name")
    if target.is_dir() and not target.is_symlink():
        held = sorted(os.listdir(target))
        foreign = [name for name in held if TABLE not in held or not _OWN.fullmatch(name)]
        if foreign:
            raise IsADirectoryError(
                f"{str(target)!r} is a folder that holds something other than a checkpoint"
                f" ({foreign[0]!r}); save under another name"
            )


def put_in_place(path: Path, target: Path) -> None:
    """Give a synced file or folder its final name, and remove the checkpoint that had it before."""
    _check_target(target)
    is_folder = target.is_dir() and not target.is_symlink()
    if os.path.lexists(target) and (is_folder or path.is_dir()):
        # If this process dies in between, ``ckpt_path="last"`` and loading find this name.
        name = f"{target.stem}.aside-{secrets.token_hex(4)}{target.suffix}"
        os.rename(target, target.with_name(name))
    os.replace(path, target)
    for aside in _aside(target):
        _remove_own(aside)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(target: Path) -> list[Path]:
    """Return the names to which :func:`put_in_place` has moved what was at ``target``."""
    name = re.compile(rf"{re.escape(target.stem)}\.aside-[0-9a-f]{{8}}{re.escape(target.suffix)}")
    found = target.parent.iterdir() if target.parent.is_dir() else ()
    return [path for path in found if name.fullmatch(path.name)]


def existing(path: Path) -> Path:
    """Return ``path``, or the name to which a save that died while replacing it has moved it."""
    return path if os.path.lexists(path) else next(iter(_aside(path)), path)


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


# -- writing ---------------------------------------------------------------------------------------

BUFFER_BYTES = 8 * 2**20
_LARGE = 2**18


class Writer(contextlib.AbstractContextManager["Writer"]):
    """A writer of this process's parts of an existing file, in which others may write elsewhere.

    The time to write a new file is spent in the page cache: on a fresh page and a copy for every
    4 KiB, under one lock for all processes that write to the file. A checkpoint is rarely read
    again soon. So the whole pages of large parts go straight to the disk (``O_DIRECT``).
    """

    def __init__(self, path: Path) -> None:
        self._file = self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError, AttributeError):  # not on every file system and system
            self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
        self._buffer = StagingMemory(BUFFER_BYTES)

    def __exit__(self, *error: object) -> None:
        for file in {self._file, self._direct}:
            os.close(file)

    def write(self, place: int, content: Tensor) -> int:
        """Write bytes ``[n]``, from any device, at offset ``place``; return their CRC-32."""
        nbytes, checksum = content.numel(), 0
        stop = place + nbytes
        pages = -(-place // PAGE) * PAGE, stop // PAGE * PAGE if nbytes >= _LARGE else 0
        edges = sorted({place, *range(*pages, BUFFER_BYTES), max(place, pages[1]), stop})
        for start, end in itertools.pairwise(edges):
            chunk = self._buffer.part(0, end - start)
            self._buffer.tensor[: end - start].copy_(content[start - place : end - place])
            checksum = zlib.crc32(chunk, checksum)
            self._write(start, chunk)
        return checksum

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        os.fsync(self._file)

    def _write(self, place: int, chunk: memoryview) -> None:
        is_direct = place % PAGE == len(chunk) % PAGE == 0
        while chunk:
            written = 0
            try:
                written = os.pwrite(self._direct if is_direct else self._file, chunk, place)
            except OSError as error:
                # The disk has larger blocks, or direct I/O fails after all.
                if not is_direct or error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
            # The rest of a short write goes through the cache, which raises the reason.
            chunk, place, is_direct = chunk[written:], place + written, False


# -- reading together ------------------------------------------------------------------------------

_ALIGNMENT = 64

Kind = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""

Place = tuple[torch.dtype, tuple[int, ...], int, int]
"""A tensor's dtype and shape, and its first byte and the one after its last in a file."""


def places_of(kinds: Iterable[Kind]) -> tuple[list[Place], int]:
    """Return where tensors lie in a file one after another, and its size."""
    places: list[Place] = []
    position = 0
    for dtype, shape in kinds:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        places.append((dtype, shape, position, position + nbytes))
        position = -(-(position + nbytes) // _ALIGNMENT) * _ALIGNMENT
    return places, position


def mapped(path: Path, places: list[Place], *, is_shared: bool = False) -> list[Tensor]:
    """Return tensors in a file, mapped to memory, each with its own storage.

    Changes reach the file and the other ranks if ``is_shared``, and only this process if not.
    """
    if not (nbytes := path.stat().st_size):
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


@dataclass(frozen=True)
class Reading:
    """A checkpoint that all ranks read together."""

    path: str
    control: Control
    weights_only: bool

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Enter a context that all ranks leave with an error, which names the file, if any does."""
        outcome = Outcome()
        with outcome.attempt(), naming(self.path):
            yield
        try:
            outcome.agree(self.control, "Loading")
            return
        except Exception as error:
            own = outcome.error
            if own is None or str(error) != f"Loading failed: {own}":
                raise
        # All ranks have failed alike, so this rank's own error says it, with one traceback.
        raise own from own.__cause__

    @contextlib.contextmanager
    def host_file(self, nbytes: int = 0) -> Iterator[tuple[Path, int, int]]:
        """Enter a context with a temporary file that the ranks of this host share; a collective.

        Yields its path, this rank's number among them, and how many they are. The file is unlinked
        at the end; mappings stay valid.
        """
        hosts, own = self.control.gather_objects(this_host()), None
        ranks = [rank for rank, host in enumerate(hosts) if host == hosts[self.control.rank]]
        with contextlib.ExitStack() as stack:
            with self.together():
                if self.control.rank == ranks[0]:
                    file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="checkpoint-"))
                    own = file.name
                    _reserve(own, nbytes)
            path = self.control.gather_objects(own)[ranks[0]]
            yield Path(path), ranks.index(self.control.rank), len(ranks)

    @contextlib.contextmanager
    def at_hand(self) -> Iterator[Path]:
        """Enter a context with a local path; a URL is downloaded once per host. A collective."""
        if (local := local_path(self.path)) is not None:
            yield existing(local)
            return
        with self.host_file() as (path, number, _):
            with self.together():
                if not number:
                    _download(self.path, path)
            yield path


def _reserve(path: str, nbytes: int) -> None:
    """Give a file its size and room on the disk: a write to memory without would be fatal."""
    with open(path, "r+b") as file:
        file.truncate(nbytes)
        if hasattr(os, "posix_fallocate") and nbytes:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"{error.strerror} for {nbytes:,} bytes in {path!r}. Set the environment"
                    " variable TMPDIR to a folder that has it",
                ) from error


def _download(path: str, target: Path) -> None:
    file_system, local = fsspec.core.url_to_fs(path)
    if file_system.exists(f"{local}/{TABLE}"):
        raise ValueError(f"{path!r} is a directory. Copy it to a local disk to load it")
    if not file_system.exists(local):
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    with file_system.open(local, "rb") as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy, 2**24)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Enter a context in which any error that damage can cause becomes one that names the file."""
    try:
        yield
    except (FileNotFoundError, PermissionError, MemoryError):
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        if repr(path) in reason:
            raise
        said = f"is damaged or not a checkpoint: {reason.splitlines()[0]}"
        if isinstance(error, pickle.UnpicklingError) and re.search("GLOBAL|weights_only", reason):
            found = re.search(r"GLOBAL \S+", reason)
            said = (
                "holds more than tensors and plain values:"
                f" {found[0] if found else 'objects of other classes'}. If you trust its source,"
                " pass weights_only=False (--trust to `lightning-zero convert`), or allow the class"
                " with torch.serialization.add_safe_globals"
            )
        raise ValueError(f"{path!r} {said}") from error
