"""Loading a checkpoint: the file is memory-mapped, and only what a rank copies is read.

A rank copies its own ranges of the whole tensors in the mapped file, so the file may have been
written by any number of ranks, at any stage, by DDP or by a single process.

Tensors of a mapped file are ordinary ones. The record behind a tensor's memory, and so its
checksums, is kept in a dictionary by storage, while the storage lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from lightning_zero.checkpoint.checksums import CheckedBytes, CheckedRange, check
from lightning_zero.checkpoint.dcp.content import checkpoint_of
from lightning_zero.checkpoint.dcp.directory import Directory, is_directory
from lightning_zero.checkpoint.file.format import (
    PROVENANCE,
    REST,
    TABLE,
    LaterFormat,
    check_version,
)
from lightning_zero.checkpoint.file.records import check_small_records, stored_records
from lightning_zero.checkpoint.unread import NeedsMapping, are_supported, unread
from lightning_zero.checkpoint.values.lazy_tensor import LazyTensor
from lightning_zero.comm import Control, Outcome
from lightning_zero.tensors import internals, named_tensors, tensors_in, uncollected, unwrapped

_COPY_BYTES = 8 * 2**20
_ARCHIVE = b"PK\3\4"
_LEGACY = torch.serialization.MAGIC_NUMBER.to_bytes(10, "little")
_INDEX_BYTES = 2**16  # hashed to identify a file that is not a zip archive

_records: WeakKeyDictionary[torch.UntypedStorage, CheckedBytes] = WeakKeyDictionary()


@uncollected()
def load(
    path: str,
    control: Control,
    *,
    weights_only: bool = True,
    verify: bool = False,
    maps: bool = True,
) -> Any:
    """Return a checkpoint's content with mapped tensors; all ranks call it together.

    Without ``maps`` tensors are read on use, which works for files larger than memory too.

    Weights and optimizer states are checked later, once each rank knows its parts and before it
    reads them. Everything else is checked here, with ``verify`` they too, each tensor on one rank.

    Raises:
        FileNotFoundError: On all ranks, if any rank cannot see the file.
        ValueError: The file is damaged, of a later version, not a checkpoint, differs between
            ranks, or holds more than tensors and plain values though ``weights_only``.
    """
    outcome, value, identity = Outcome(), None, ""
    with outcome.attempt():
        folder = local_directory(path)
        if folder is None:
            value, identity = _with_identity(path, weights_only=weights_only, maps=maps)
        else:
            directory = Directory.open(folder)
            # There may be very many, so the ranks share the work.
            for chunk in directory.chunks[control.rank :: control.world_size]:
                chunk.check()
            value, identity = content(directory, weights_only=weights_only), directory.identity
        here = value
        if isinstance(value, dict) and not verify:
            here = {key: item for key, item in value.items() if key not in _READ_LATER}
        ranges = [one for name, tensor in named_tensors(here) for one in ranges_of(name, tensor)]
        check(ranges[control.rank :: control.world_size])
    outcome.agree(control, f"Loading {path!r}")
    compare(path, _described(value, identity), control)
    return value


_READ_LATER = ("state_dict", "optimizer_states")
"""Keys whose tensors are checked once each rank knows its parts."""


def check_values(value: Any) -> None:
    """Read all tensors of a loaded checkpoint, and raise a ``ValueError`` if one is damaged."""
    check(one for name, tensor in named_tensors(value) for one in ranges_of(name, tensor))


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


def mapped(path: str, *, weights_only: bool = True) -> Any:
    """Return the content of a file by :func:`torch.save` or this package, mapped; no collective."""
    return _with_identity(path, weights_only=weights_only)[0]


def _with_identity(path: str, *, weights_only: bool, maps: bool = True) -> tuple[Any, str]:
    file_system, local = fsspec.core.url_to_fs(path)
    if isinstance(file_system, LocalFileSystem):
        if not os.path.exists(local):
            raise FileNotFoundError(f"Checkpoint file not found: {local}")
        return _mapped(Path(local), weights_only=weights_only, maps=maps)
    if not file_system.exists(local):
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    # A local copy, unlinked once it is mapped: only what is read takes memory.
    with tempfile.NamedTemporaryFile(prefix="checkpoint-") as copy:
        with file_system.open(local, "rb") as source:
            while chunk := source.read(_COPY_BYTES):
                copy.write(chunk)
        copy.flush()
        file = Path(copy.name)
        value, identity = _mapped(file, weights_only=weights_only)
        check_values(value)  # now, while the copy has a name
        _forget_records(value)
        return value, identity


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
    return _mapped(rest, weights_only=weights_only)[0] if rest.is_file() else {}


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


def _mapped(path: Path, *, weights_only: bool, maps: bool = True) -> tuple[Any, str]:
    """Return a file's content, mapped, and its identity."""
    if not path.is_dir() and not path.is_file():
        raise ValueError(f"{str(path)!r} is a device or a pipe; expected a file")
    if path.is_dir():
        raise ValueError(
            f"{str(path)!r} is a folder; expected a file. If DeepSpeed wrote it, convert it first:"
            " `lightning-zero convert FOLDER FILE.ckpt`"
        )
    # Files by torch before 1.6 are not zip archives and cannot be mapped.
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
                value = _mapped_archive(path, archive, weights_only=weights_only, maps=maps)
                return value, _identity_of_archive(path, archive)
        if begin.startswith(_ARCHIVE):
            raise ValueError("it is truncated")
        value = torch.load(path, map_location="cpu", weights_only=weights_only)
        return value, identity_of(path)
    except pickle.UnpicklingError as error:
        raise ValueError(_refusal(path, error)) from error
    except (FileNotFoundError, PermissionError, MemoryError, LaterFormat):
        raise
    except Exception as error:
        # A damaged pickle can fail in any way.
        raise unreadable(path, error) from error


def _mapped_archive(path: Path, archive: zipfile.ZipFile, *, weights_only: bool, maps: bool) -> Any:
    check_version(path, _provenance_in(archive))
    # Before unpickling: a damaged pickle may ask for any class.
    check_small_records(archive)
    if not maps and are_supported():
        with contextlib.suppress(NeedsMapping):
            return unread(path, archive, weights_only=weights_only)
    try:
        return _mapped_storages(path, archive, weights_only=weights_only)
    except RuntimeError as error:
        if "unable to mmap" not in str(error):
            raise
        # The file is larger than memory, or than what a limit leaves of it.
        if not are_supported():
            raise MemoryError(
                f"{path} is too large to be mapped here, and torch {torch.__version__} cannot"
                " leave its tensors in the file, as 2.13 and newer do. Update torch, or load it"
                " on a machine with more memory."
            ) from error
        try:
            return unread(path, archive, weights_only=weights_only)
        except NeedsMapping as what:
            raise MemoryError(
                f"{path} is too large to be mapped here, and holds {what}, which cannot be left"
                " in the file. Load it on a machine with more memory and save it again."
            ) from error


def _mapped_storages(path: Path, archive: zipfile.ZipFile, *, weights_only: bool) -> Any:
    storages: list[torch.UntypedStorage] = []

    def on_host(storage: Any, device: str) -> Any:
        storages.append(storage)
        return storage

    try:
        value = torch.load(path, map_location=on_host, mmap=True, weights_only=weights_only)
    except RuntimeError as error:
        if "_rebuild_wrapper_subclass" not in str(error):
            raise
        # Torch asks a function for storages only, not for tensors that wrap others.
        value = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        found = [each for tensor in tensors_in(value) for each in unwrapped(tensor)]
        storages = [each.untyped_storage() for each in found if internals.has_storage(each)]
    _note_records(path, archive, storages)
    return value


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


# -- checksums -------------------------------------------------------------------------------------


def _note_records(
    path: Path, archive: zipfile.ZipFile, storages: Iterable[torch.UntypedStorage]
) -> None:
    """Note which record of a mapped file is behind each of its ``storages``."""
    records = stored_records(path, archive)
    by_place = {record.offset: record for record in records if record.nbytes}
    shown = {storage.data_ptr(): storage for storage in storages if storage.nbytes()}
    # torch does not tell where the file is mapped, but only one address fits all storages.
    for offset in sorted(by_place):
        base = min(shown, default=0) - offset
        if shown and all(place - base in by_place for place in shown):
            for place, storage in shown.items():
                _records[storage] = by_place[place - base]
            return


def ranges_of(
    name: str, value: Tensor, start: int = 0, stop: int | None = None
) -> Iterator[CheckedRange]:
    """Yield the bytes of files from which elements ``[start, stop)`` of a tensor are read.

    Elements are counted in the tensor's memory order. ``name`` is for errors.
    """
    if isinstance(value, LazyTensor):
        yield from value.ranges(name, start, value.numel() if stop is None else stop)
    elif value.layout == torch.strided and not value.is_meta and value.numel():
        record = _records.get(value.untyped_storage())
        if record is not None:
            span = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
            last = span + 1 if stop is None else stop
            begin = int(value.storage_offset())
            size = value.element_size()
            mapped = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
            yield CheckedRange(name, record, (begin + start) * size, (begin + last) * size, mapped)


def _forget_records(value: Any) -> None:
    """Forget the records behind the tensors in ``value``."""
    for tensor in tensors_in(value):
        _records.pop(tensor.untyped_storage(), None)
