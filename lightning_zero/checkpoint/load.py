"""Loading a checkpoint, whose tensors are mapped to memory: only what a rank copies is read.

A rank copies its own ranges of the whole tensors, so the file may have been written by any number
of ranks, at any stage, by DDP or by a single process. Before anything is modified, the ranks verify
the checksums of the file's records, each rank a share of them, and agree on the outcome.
"""

from __future__ import annotations

import itertools
import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.dcp import Directory, checkpoint_of, is_directory
from lightning_zero.checkpoint.files import (
    FORMAT,
    PROVENANCE,
    REST,
    DamageError,
    LaterFormat,
    Reading,
    naming,
)
from lightning_zero.checkpoint.safetensors import read_safetensors
from lightning_zero.checkpoint.state_dicts import load_module_state
from lightning_zero.comm import Control
from lightning_zero.engine import engines_of
from lightning_zero.tensors import internals, mapped_storage, uncollected

EXPECTED = (
    "a .ckpt or .pt file, a safetensors file or folder, or a directory of"
    " torch.distributed.checkpoint"
)
_ARCHIVE = b"PK\3\4"
_LEGACY = torch.serialization.MAGIC_NUMBER.to_bytes(10, "little")
_INDEX_BYTES = 2**16  # hashed to identify a file, at its beginning and at its end


@uncollected()
def load(
    path: str, control: Control, *, weights_only: bool = True, only_weights: bool = False
) -> Any:
    """Return a checkpoint's content; all ranks call it together.

    Of safetensors, that is a dictionary with the tensors under ``"state_dict"``.

    Args:
        path: A path or URL.
        control: All ranks that read it.
        weights_only: As for ``torch.load``: refuse other objects than tensors and plain values.
        only_weights: Read nothing else, where that can be left out.

    Raises:
        FileNotFoundError: On all ranks, if any rank cannot see the file.
        ValueError: The file is damaged, of a later version, not a checkpoint, differs between
            ranks, or holds more than tensors and plain values though ``weights_only``.
    """
    reading = Reading(path, control, weights_only)
    with reading.at_hand() as place:
        if is_directory(place):
            with reading.together():
                directory, rest = _open_directory(place, weights_only=weights_only)
            value: Any = checkpoint_of(directory, rest, reading, only_weights=only_weights)
        else:
            with reading.together():
                if are_safetensors(place) and place.exists():
                    value = {"state_dict": read_safetensors(place)}
                else:
                    share = control.rank, control.world_size
                    value = _read(place, path, share, weights_only=weights_only)
        held = value if isinstance(value, dict) else {}
        moment = f"epoch {held.get('epoch')}, step {held.get('global_step')}"
        reading.compare(f"{moment}, {_identity(place)}")
    return value


def read_weights(path: str, control: Control, *, weights_only: bool = True) -> dict[str, Any]:
    """Return the weights in a file or folder by name; all ranks call it together."""
    value = load(path, control, weights_only=weights_only, only_weights=True)
    weights = value.get("state_dict", value) if isinstance(value, dict) else None
    if not isinstance(weights, dict) or not any(
        isinstance(value, Tensor) for value in weights.values()
    ):
        raise ValueError(
            f"{path!r} holds no weights: expected a dictionary of tensors, or one under"
            " 'state_dict'"
        )
    return weights


def load_weights(module: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> Any:
    """Load a module's weights from a file; all ranks that share the module call it together.

    Each rank reads only its own part of a sharded module. Call it in
    ``on_fit_start`` or a later hook, when the module is sharded, even if it was built on the meta
    device; or before the Trainer runs, on an ordinary module.

    Args:
        module: The module, or a submodule, whose ``state_dict`` names the file uses.
        path: A ``.ckpt`` or ``.pt`` file (its ``"state_dict"``, or the file itself), a safetensors
            file, a folder of safetensors files with an index, as Hugging Face writes it, or a
            directory of torch.distributed.checkpoint.
        strict: Whether missing and unexpected names are errors.

    Returns:
        What ``load_state_dict`` returns: the missing and the unexpected names.

    Raises:
        FileNotFoundError: The file is missing on some rank.
        RuntimeError: Names or shapes do not fit. All are listed, and nothing was loaded.
        ValueError: The file is damaged, differs between ranks, or holds no weights.
    """
    engine = next((engine for engine, _ in engines_of(module.parameters())), None)
    is_meta = any(p.is_meta for p in [*module.parameters(), *module.buffers()])
    if engine is None and is_meta:
        raise RuntimeError(
            f"{type(module).__name__} is on the meta device and not sharded yet, so it cannot take"
            " weights. Call load_weights in `on_fit_start`, or materialize the module first."
        )
    control = Control(alone=True) if engine is None else engine.comm.control
    weights = read_weights(os.fspath(path), control)
    try:
        return load_module_state(module, engine, _with_ties(module, weights), strict=strict)
    except RuntimeError as error:
        raise RuntimeError(f"{os.fspath(path)!r} does not fit the module. {error}") from error


def _with_ties(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``weights`` with tied parameters, which a file may hold once, under all names."""
    complete = dict(weights)
    known: dict[int, list[str]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        known.setdefault(id(value), []).append(name)
    for names in known.values():
        held = next((weights[name] for name in names if name in weights), None)
        if held is not None:
            complete.update({name: held for name in names if name not in weights})
    return complete


def are_safetensors(place: Path) -> bool:
    """Return whether ``place`` is a safetensors file, or a folder of them."""
    return place.suffix == ".safetensors" or (place.is_dir() and any(place.glob("*.safetensors")))


def _open_directory(place: Path, *, weights_only: bool) -> tuple[Directory, Any]:
    """Return a directory, and what it holds besides tensors."""
    provenance(place)
    if (place / PROVENANCE).is_file() and not (place / REST).is_file():
        raise FileNotFoundError(f"the file {REST!r} of {str(place)!r} is missing")
    return Directory.open(place), rest_of(place, weights_only=weights_only)


def rest_of(place: Path, *, weights_only: bool = True) -> Any:
    """Return what a directory holds besides tensors; ``{}`` if no Trainer wrote it."""
    rest = place / REST
    return _read(rest, str(rest), weights_only=weights_only) if rest.is_file() else {}


# -- one file --------------------------------------------------------------------------------------


def read_file(path: Path) -> Any:
    """Return a file's content; its tensors are not verified."""
    with naming(str(path)):
        return _read(path, str(path), None, weights_only=True)


Share = tuple[int, int] | None
"""The number of a rank, which verifies a share of a file's storages, and the number of ranks."""


def _read(place: Path, path: str, share: Share = (0, 1), *, weights_only: bool) -> Any:
    """Return a file's content after verifying a ``share`` of its storages, and all else."""
    require_checkpoint(place, path)
    if zipfile.is_zipfile(place):
        provenance(place)
        with zipfile.ZipFile(place) as archive:
            # Before unpickling: a damaged pickle may ask for any class.
            for name, reason in _damaged_records(archive, share):
                raise DamageError(
                    f"{path!r} is damaged: {name!r} does not match its checksum ({reason}). Load"
                    " another checkpoint or another copy of this one"
                )
            infos = archive.infolist()
            is_mapped = all(info.compress_type == zipfile.ZIP_STORED for info in infos)
        with internals.mapping_files_by(mapped_storage):
            return internals.load_to_host(place, weights_only=weights_only, mmap=is_mapped)
    # Files by torch before 1.6 are not zip archives; they are read as a whole.
    begin = _begin_of(place, 64)
    if begin.startswith(_ARCHIVE):
        raise ValueError(f"{path!r} is damaged or not a checkpoint: it is truncated")
    if _LEGACY not in begin:
        raise ValueError(
            f"{path!r} is not a checkpoint: it does not start like a file written by torch.save"
        )
    return internals.load_to_host(place, weights_only=weights_only)


def require_checkpoint(place: Path, path: str) -> None:
    """Raise an error that says what is at ``place``, named ``path``, if that is no checkpoint.

    A file is not read.
    """
    if not place.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    if place.is_dir() and not is_directory(place) and not are_safetensors(place):
        _refuse_deepspeed(place)
        raise ValueError(f"{path!r} is not a checkpoint. Expected {EXPECTED}.")
    if not place.is_dir() and not place.is_file():
        raise ValueError(f"{path!r} is a device or a pipe; expected a file")


def _refuse_deepspeed(folder: Path) -> None:
    """Raise a ``ValueError`` that says how to take weights from a folder if DeepSpeed wrote it."""
    if any(any(folder.glob(pattern)) for pattern in ("*_states.pt", "*/*_states.pt")):
        raise ValueError(
            f"{str(folder)!r} is a checkpoint by DeepSpeed. Convert its weights with DeepSpeed's"
            f" own script, `python {folder}/zero_to_fp32.py {folder} weights --safe_serialization`,"
            ' and load them with `lightning_zero.load_weights(module, "weights")`'
        )


def damage(place: Path) -> list[str]:
    """Return a line for each record of a file or directory that does not match its checksum.

    Raises:
        ValueError: There are no checksums.
    """
    archives: Iterable[tuple[str, Any]] = [("", place)]
    if is_directory(place):
        rest = [(f"{REST}: ", place / REST)] if (place / REST).is_file() else []
        archives = itertools.chain(rest, Directory.open(place).archives())
    found, has_checksums = [], False
    for label, source in archives:
        if not zipfile.is_zipfile(source):
            if label:
                found.append(f"{label}it is damaged: not an archive of torch.save")
            continue
        with zipfile.ZipFile(source) as archive:
            has_checksums |= _has_checksums(archive)
            damaged = _damaged_records(archive)
            found += [f"{label}{name} is damaged: {reason}" for name, reason in damaged]
    if not has_checksums and not found:
        raise ValueError(
            f"{str(place)!r} has no checksums: not of torch.save, or left out by its writer."
        )
    return found


def _damaged_records(archive: zipfile.ZipFile, share: Share = (0, 1)) -> Iterator[tuple[str, str]]:
    """Yield name and reason of damaged records: of all but storages, and of a share of those."""
    if not _has_checksums(archive):
        return
    infos = archive.infolist()
    storages = sorted(
        (info for info in infos if "/data/" in info.filename), key=lambda info: -info.file_size
    )
    others = [info for info in infos if "/data/" not in info.filename]
    mine = storages[share[0] :: share[1]] if share is not None else []
    for info in (*others, *mine):
        try:
            with archive.open(info) as record:
                while record.read(2**20):
                    pass
        except Exception as error:  # a damaged archive can fail in any way
            yield info.filename.partition("/")[2], str(error)


def _has_checksums(archive: zipfile.ZipFile) -> bool:
    """Return whether the writer stored checksums, which torch can be told to omit."""
    return any(info.CRC for info in archive.infolist())


def provenance(place: Path) -> dict[str, Any] | None:
    """Return the record of a file's or directory's origin, if this package wrote it.

    Raises:
        LaterFormat: A later version did.
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
        raise LaterFormat(
            f"{str(place)!r} has format {record['format']} of a later lightning-zero, but this"
            f" version reads only formats up to {FORMAT}. Update the package"
        )
    return record


def _begin_of(place: Path, nbytes: int) -> bytes:
    with place.open("rb") as file:
        return file.read(nbytes)


def _identity(place: Path) -> str:
    """Return a fingerprint of a file or folder: its bytes, and a checksum of what changes with it.

    The index of a zip is at its end, that of other formats at the beginning.
    """
    pattern = "*" if is_directory(place) else "*.safetensors"
    files = [place] if place.is_file() else sorted(place.glob(pattern))
    sizes = [file.stat().st_size for file in files]
    index: list[Any] = [sizes, [file.name for file in files if file != place]]
    for file, size in zip(files, sizes, strict=True):
        if file.suffix != ".distcp" and file.is_file():
            with file.open("rb") as content:
                index.append(content.read(_INDEX_BYTES))
                content.seek(max(0, size - _INDEX_BYTES))
                index.append(content.read())
    return f"{sum(sizes)} bytes, checksum {zlib.crc32(repr(index).encode()):08x}"
