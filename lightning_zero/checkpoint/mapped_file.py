"""Reading a checkpoint without reading it: the file is mapped, and only what is copied is read.

A rank copies its own ranges of the whole tensors that the mapped file shows, so the file may have
been written by any number of ranks, at any stage, by DDP or by a single process.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import pickle
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from lightning_zero.checkpoint.agreement import Outcome
from lightning_zero.checkpoint.content import checkpoint_of
from lightning_zero.checkpoint.directory import REST, TABLE, Directory, is_directory
from lightning_zero.checkpoint.provenance import FORMAT, PROVENANCE
from lightning_zero.comm import Comm

_COPY_BYTES = 8 * 2**20

_libc = ctypes.CDLL(None)
_WILL_NEED = 3  # MADV_WILLNEED, the same on Linux and macOS
_ADVISED_BYTES = 2**17  # what Linux reads for one advice, at least; of more it drops the rest


def load(path: str, comm: Comm, *, weights_only: bool = True) -> Any:
    """What a checkpoint file holds, its tensors mapped from the file; all ranks call it together.

    Args:
        path: A path or an ``fsspec`` URL.
        comm: The ranks.
        weights_only: Refuse to make anything but tensors and plain Python values.

    Raises:
        FileNotFoundError: On all ranks, if any rank cannot see the file.
        ValueError: The file is damaged, of a later version, no checkpoint, or holds other objects.
    """
    outcome, value = Outcome(), None
    with outcome.attempt():
        folder = local_directory(path)
        if folder is None:
            value = mapped(path, weights_only=weights_only)
        else:
            directory = opened(folder)
            # There may be very many, so the ranks share the work.
            for chunk in directory.chunks[comm.rank :: comm.world_size]:
                chunk.check()
            value = content(directory, weights_only=weights_only)
    outcome.agree(comm, f"Loading {path!r}")
    return value


def read_ahead(value: Tensor) -> None:
    """Let the system read what ``value`` shows of a mapped file at once, before it is copied.

    Page by page, as the copy comes to them, cold pages take several times as long.
    """
    if value.device.type != "cpu" or not value.numel() or not value.is_contiguous():
        return
    stop = value.data_ptr() + value.nbytes
    begin = value.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    # An advice: where the memory is no file's, the system says no or does nothing.
    for place in range(begin, stop, _ADVISED_BYTES):
        nbytes = min(stop - place, _ADVISED_BYTES)
        _libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(nbytes), _WILL_NEED)


def local_directory(path: str) -> Path | None:
    """``path`` as that of a directory of torch.distributed.checkpoint, if it is one."""
    file_system, local = fsspec.core.url_to_fs(path)
    if isinstance(file_system, LocalFileSystem):
        return Path(local) if is_directory(Path(local)) else None
    if file_system.exists(f"{local}/{TABLE}"):
        raise ValueError(f"{path!r} is a directory; copy it to a disk to read it")
    return None


def opened(folder: Path) -> Directory:
    """A directory, of which nothing but the table is read."""
    directory = Directory.open(folder)
    directory.check_version()
    return directory


def content(directory: Directory, *, weights_only: bool = True) -> dict[str, Any]:
    """A Trainer's checkpoint from a directory; its tensors are read when they are asked for."""
    beside = rest_of(directory, weights_only=weights_only)
    try:
        return checkpoint_of(directory, beside, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise ValueError(_refusal(directory.path, error)) from error


def mapped(path: str, *, weights_only: bool = True) -> Any:
    """The content of a file by :func:`torch.save` or :class:`Save`, for one process."""
    file_system, local = fsspec.core.url_to_fs(path)
    if isinstance(file_system, LocalFileSystem):
        if not os.path.exists(local):
            raise FileNotFoundError(f"there is no file {local!r}")
        return _mapped(Path(local), weights_only=weights_only)
    if not file_system.exists(local):
        raise FileNotFoundError(f"there is no file {path!r}")
    # A copy that has no name any more once it is mapped: memory is for what is read.
    with tempfile.NamedTemporaryFile(prefix="checkpoint-") as copy:
        with file_system.open(local, "rb") as source:
            while chunk := source.read(_COPY_BYTES):
                copy.write(chunk)
        copy.flush()
        return _mapped(Path(copy.name), weights_only=weights_only)


def rest_of(directory: Directory, *, weights_only: bool = True) -> Any:
    """What a directory holds beside its tensors; an empty table if no Trainer wrote it."""
    rest = directory.path / REST
    return _mapped(rest, weights_only=weights_only) if rest.is_file() else {}


def provenance(path: Path) -> dict[str, Any] | None:
    """Who wrote the file, if this package did."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(f"/{PROVENANCE}"):
                told = json.loads(archive.read(name))
                return told if isinstance(told, dict) else None
    return None


def _mapped(path: Path, *, weights_only: bool) -> Any:
    if path.is_dir():
        raise ValueError(
            f"{str(path)!r} is a folder; expected a file. If DeepSpeed wrote it, convert it first:"
            " `lightning-zero convert FOLDER FILE.ckpt`"
        )
    try:
        # Files of torch before 1.6 are no archives and cannot be mapped.
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            _check_version(path)
        elif _begins_like_an_archive(path):
            raise ValueError("its end is missing")
        return torch.load(path, map_location="cpu", mmap=is_archive, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise ValueError(_refusal(path, error)) from error
    except (FileNotFoundError, PermissionError, MemoryError):
        raise
    except Exception as error:
        # A damaged pickle can fail in any way.
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> ValueError:
    """What to tell of a file that cannot be read as a checkpoint."""
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return ValueError(
        f"{str(path)!r} cannot be read as a checkpoint; it is damaged or something else: {reason}"
    )


def _begins_like_an_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\3\4"


def _check_version(path: Path) -> None:
    told = provenance(path)
    if told is not None and int(told.get("format", 0)) > FORMAT:
        raise ValueError(
            f"it has format {told['format']} of a later lightning-zero, this one reads up to"
            f" {FORMAT}; update the package"
        )


def _refusal(path: Path, error: Exception) -> str:
    reason = str(error)
    if "GLOBAL" in reason or "weights_only" in reason.lower():
        kind = reason.split("Unsupported global: ")[-1] if "Unsupported global" in reason else ""
        what = kind.split(" was not")[0].strip() if kind else "objects of other classes"
        return (
            f"{str(path)!r} holds more than tensors and plain values: {what}. If you trust whoever"
            " wrote it, pass weights_only=False (--trust to `lightning-zero convert`); or allow the"
            " class with torch.serialization.add_safe_globals"
        )
    return f"{str(path)!r} cannot be read as a checkpoint; it is damaged: {reason.splitlines()[0]}"
