"""Loading a checkpoint: its large tensors stay in the file, and only what a rank copies is read.

A rank reads its own ranges of the whole tensors, so the file may have been written by any number of
ranks, at any stage, by DDP or by a single process. What is read is checked on the way.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

from lightning_zero.checkpoint.dcp.content import checkpoint_of
from lightning_zero.checkpoint.dcp.directory import Directory, is_directory
from lightning_zero.checkpoint.file.format import (
    PROVENANCE,
    REST,
    TABLE,
    LaterFormat,
    check_version,
)
from lightning_zero.checkpoint.file.records import StoredRecords, check_small_records
from lightning_zero.checkpoint.stored_bytes import DamageError
from lightning_zero.checkpoint.unread import MustBeReadError, unread
from lightning_zero.checkpoint.values.lazy_tensor import LazyTensor
from lightning_zero.comm import Control, agreed
from lightning_zero.tensors import internals, tensors_in, uncollected

_COPY_BYTES = 8 * 2**20
_ARCHIVE = b"PK\3\4"
_LEGACY = torch.serialization.MAGIC_NUMBER.to_bytes(10, "little")
_INDEX_BYTES = 2**16  # hashed to identify a file that is not a zip archive


@uncollected()
def load(path: str, control: Control, *, weights_only: bool = True, verify: bool = False) -> Any:
    """Return a checkpoint's content with its large tensors unread; all ranks call it together.

    Weights and optimizer states are checked when each rank reads its parts. Everything else is
    checked here, with ``verify`` they too, each large tensor on one rank.

    Raises:
        FileNotFoundError: On all ranks, if any rank cannot see the file.
        ValueError: The file is damaged, of a later version, not a checkpoint, differs between
            ranks, or holds more than tensors and plain values though ``weights_only``.
    """
    with agreed(control, f"Loading {path!r}"):
        folder = local_directory(path)
        if folder is None:
            value, identity = _with_identity(path, weights_only=weights_only)
        else:
            directory = Directory.open(folder)
            # There may be very many, so the ranks share the work.
            for chunk in directory.chunks[control.rank :: control.world_size]:
                assert chunk.place
            value, identity = content(directory, weights_only=weights_only), directory.identity
        here = value
        if isinstance(value, dict) and not verify:
            here = {key: item for key, item in value.items() if key not in _READ_LATER}
        lazy = [value for value in tensors_in(here) if isinstance(value, LazyTensor)]
        for tensor in lazy[control.rank :: control.world_size]:
            tensor.check()
    compare(path, _described(value, identity), control)
    return value


_READ_LATER = ("state_dict", "optimizer_states")
"""Keys whose tensors are checked when each rank reads its parts."""


def check_values(value: Any) -> None:
    """Read all tensors of a loaded checkpoint, and raise a ``ValueError`` if one is damaged."""
    for tensor in tensors_in(value):
        if isinstance(tensor, LazyTensor):
            tensor.check()


def _described(value: Any, identity: str) -> str:
    """Return what ranks compare: epoch and step, which users know, and the content's identity."""
    held = value if isinstance(value, dict) else {}
    return f"epoch {held.get('epoch')}, step {held.get('global_step')}, {identity}"


def compare(path: str, mine: str, control: Control) -> None:
    """Raise a ``ValueError`` on all ranks unless all read the same checkpoint."""
    found: dict[str, list[str]] = {}
    for rank, (its_path, its) in enumerate(control.gather_objects((path, mine))):
        found.setdefault(its, []).append(f"rank {rank} ({its_path!r})")
    if len(found) > 1:
        several = "; ".join(f"{', '.join(ranks)}: {its}" for its, ranks in found.items())
        raise ValueError(
            f"Loading {path!r} failed: the ranks see different checkpoints. {several}. Copy one of"
            " them to every host, or load from a disk that all ranks share."
        )


def local_directory(path: str) -> Path | None:
    """Return ``path`` if it is a local directory of torch.distributed.checkpoint."""
    file_system, local = fsspec.core.url_to_fs(path)
    if isinstance(file_system, LocalFileSystem):
        return Path(local) if is_directory(Path(local)) else None
    if file_system.exists(f"{local}/{TABLE}"):
        raise ValueError(f"{path!r} is a directory. Copy it to a local disk to load it")
    return None


def content(directory: Directory, *, weights_only: bool = True) -> dict[str, Any]:
    """Return a Trainer's checkpoint from a directory; its tensors are read on use."""
    beside = rest_of(directory, weights_only=weights_only)
    try:
        return checkpoint_of(directory, beside, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise ValueError(_refusal(directory.path, error)) from error


def read_file(path: str, *, weights_only: bool = True) -> Any:
    """Return the content of a file by :func:`torch.save` or this package; no collective.

    Its large tensors are read on use.
    """
    return _with_identity(path, weights_only=weights_only)[0]


def _with_identity(path: str, *, weights_only: bool) -> tuple[Any, str]:
    file_system, local = fsspec.core.url_to_fs(path)
    if isinstance(file_system, LocalFileSystem):
        if not os.path.exists(local):
            raise FileNotFoundError(f"Checkpoint file not found: {local}")
        return _read(Path(local), weights_only=weights_only)
    if not file_system.exists(local):
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    # A local copy, unlinked once it is open: only what is read takes memory.
    with tempfile.NamedTemporaryFile(prefix="checkpoint-") as copy:
        with file_system.open(local, "rb") as source:
            while chunk := source.read(_COPY_BYTES):
                copy.write(chunk)
        copy.flush()
        return _read(Path(copy.name), weights_only=weights_only)


def identity_of(path: Path) -> str:
    """Return a fingerprint of a file or folder: its size and the checksum of its index."""
    if is_directory(path):
        return Directory.open(path).identity
    if path.is_dir():
        return ", ".join(identity_of(file) for file in sorted(path.glob("*.safetensors")))
    if not zipfile.is_zipfile(path):
        return _identity(path, _begin_of(path, _INDEX_BYTES))
    with zipfile.ZipFile(path) as archive:
        return _identity_of_archive(path, archive)


def _identity_of_archive(path: Path, archive: zipfile.ZipFile) -> str:
    index = [(info.filename, info.file_size, info.CRC) for info in archive.infolist()]
    return _identity(path, repr(index).encode())


def _identity(path: Path, index: bytes) -> str:
    return f"{path.stat().st_size} bytes, checksum {zlib.crc32(index):08x}"


def rest_of(directory: Directory, *, weights_only: bool = True) -> Any:
    """Return what a directory holds besides tensors; ``{}`` if no Trainer wrote it."""
    rest = directory.path / REST
    return _read(rest, weights_only=weights_only)[0] if rest.is_file() else {}


def provenance(path: Path) -> dict[str, Any] | None:
    """Return the record of the file's origin, if this package wrote it."""
    with zipfile.ZipFile(path) as archive:
        return _provenance_in(archive)


def _provenance_in(archive: zipfile.ZipFile) -> dict[str, Any] | None:
    for name in archive.namelist():
        if name.endswith(f"/{PROVENANCE}"):
            record = json.loads(archive.read(name))
            return record if isinstance(record, dict) else None
    return None


def _read(path: Path, *, weights_only: bool) -> tuple[Any, str]:
    """Return a file's content, with its large tensors unread, and its identity."""
    if not path.is_dir() and not path.is_file():
        raise ValueError(f"{str(path)!r} is a device or a pipe; expected a file")
    if path.is_dir():
        refuse_deepspeed(path)
        raise ValueError(f"{str(path)!r} is a folder; expected a file")
    # Files by torch before 1.6 are not zip archives and are read at once.
    is_archive = zipfile.is_zipfile(path)
    begin = b"" if is_archive else _begin_of(path, 64)
    if not is_archive and not begin.startswith(_ARCHIVE) and _LEGACY not in begin:
        raise ValueError(
            f"{str(path)!r} is not a checkpoint: it does not start like a file written by"
            " torch.save"
        )
    try:
        if is_archive:
            # Opened once: an archive of very many records takes long to open.
            with zipfile.ZipFile(path) as archive:
                value = _read_archive(path, archive, weights_only=weights_only)
                return value, _identity_of_archive(path, archive)
        if begin.startswith(_ARCHIVE):
            raise ValueError("it is truncated")
        value = internals.load_to_host(path, weights_only=weights_only)
        return value, identity_of(path)
    except pickle.UnpicklingError as error:
        raise ValueError(_refusal(path, error)) from error
    except (FileNotFoundError, PermissionError, MemoryError, LaterFormat, DamageError):
        raise
    except Exception as error:
        # A damaged pickle can fail in any way.
        raise unreadable(path, error) from error


def refuse_deepspeed(folder: Path) -> None:
    """Raise a ``ValueError`` that says how to take weights from a folder if DeepSpeed wrote it."""
    if any(any(folder.glob(pattern)) for pattern in ("*_states.pt", "*/*_states.pt")):
        raise ValueError(
            f"{str(folder)!r} is a checkpoint by DeepSpeed. Convert its weights with DeepSpeed's"
            f" own script, `python {folder}/zero_to_fp32.py {folder} weights --safe_serialization`,"
            ' and load them with `lightning_zero.load_weights(module, "weights")`'
        )


def _read_archive(path: Path, archive: zipfile.ZipFile, *, weights_only: bool) -> Any:
    check_version(path, _provenance_in(archive))
    # Before unpickling: a damaged pickle may ask for any class.
    check_small_records(archive)
    try:
        return unread(path, archive, weights_only=weights_only)
    except MustBeReadError:
        for record in StoredRecords(path, archive):
            record.check("a tensor", 0, record.nbytes)
        return internals.load_to_host(path, weights_only=weights_only)


def unreadable(path: Path, error: Exception) -> ValueError:
    """Return the error for a file that cannot be read as a checkpoint."""
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return ValueError(f"{str(path)!r} is damaged or not a checkpoint: {reason}")


def _begin_of(path: Path, nbytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(nbytes)


def _refusal(path: Path, error: Exception) -> str:
    reason = str(error)
    if "GLOBAL" in reason or "weights_only" in reason.lower():
        kind = reason.split("Unsupported global: ")[-1] if "Unsupported global" in reason else ""
        what = kind.split(" was not")[0].strip() if kind else "objects of other classes"
        return (
            f"{str(path)!r} holds more than tensors and plain values: {what}. If you trust its"
            " source, pass weights_only=False (--trust to `lightning-zero convert`), or allow the"
            " class with torch.serialization.add_safe_globals"
        )
    return f"{str(path)!r} is damaged or not a checkpoint: {reason.splitlines()[0]}"
