"""Loading a checkpoint, whose tensors are mapped to memory: only what a rank copies is read.

A rank copies its own ranges of the whole tensors, so the file may have been written by any number
of ranks, at any stage, by DDP or by a single process. Before anything is modified, the ranks verify
the checksums of the file's records, each rank a share of them, and agree on the outcome.
"""

from __future__ import annotations

import itertools
import os
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_zero.checkpoint.archive import damaged_records, has_checksums, read_archive
from lightning_zero.checkpoint.dcp import Directory, is_directory, read_directory
from lightning_zero.checkpoint.files import REST, Reading, naming
from lightning_zero.checkpoint.safetensors import read_safetensors
from lightning_zero.checkpoint.state_dicts import load_module_state
from lightning_zero.comm import Control
from lightning_zero.engine import differences, engines_of
from lightning_zero.tensors import uncollected

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
            value: Any = read_directory(place, reading, only_weights=only_weights)
        else:
            with reading.together():
                if are_safetensors(place) and place.exists():
                    value = {"state_dict": read_safetensors(place)}
                else:
                    require_checkpoint(place, path)
                    share = control.rank, control.world_size
                    value = read_archive(place, path, share, weights_only=weights_only)
        held = value if isinstance(value, dict) else {}
        moment = f"epoch {held.get('epoch')}, step {held.get('global_step')}"
        identities = control.gather_objects([f"{moment}, {_identity(place)}"])
    if found := differences(identities):
        raise ValueError(
            f"Loading {path!r} failed: the ranks see different checkpoints. {'; '.join(found)}."
            " Copy one of them to every host, or load from a disk that all ranks share."
        )
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


def read_file(path: Path) -> Any:
    """Return a file's content; its tensors are not verified."""
    require_checkpoint(path, str(path))
    with naming(str(path)):
        return read_archive(path, str(path), None, weights_only=True)


def require_checkpoint(place: Path, path: str) -> None:
    """Raise an error that says what is at ``place``, named ``path``, if that is no checkpoint.

    A file is not read.
    """
    if not place.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    if place.is_dir() and not is_directory(place) and not are_safetensors(place):
        if any(any(place.glob(pattern)) for pattern in ("*_states.pt", "*/*_states.pt")):
            raise ValueError(
                f"{path!r} is a checkpoint by DeepSpeed. Convert its weights with DeepSpeed's own"
                f" script, `python {path}/zero_to_fp32.py {path} weights --safe_serialization`,"
                ' and load them with `lightning_zero.load_weights(module, "weights")`'
            )
        raise ValueError(
            f"{path!r} is not a checkpoint. Expected a .ckpt or .pt file, a safetensors file or"
            " folder, or a directory of torch.distributed.checkpoint."
        )
    if not place.is_dir() and not place.is_file():
        raise ValueError(f"{path!r} is a device or a pipe; expected a file")


def damage(place: Path) -> list[str]:
    """Return a line for each record of a file or directory that does not match its checksum.

    Raises:
        ValueError: There are no checksums.
    """
    archives: Iterable[tuple[str, Any]] = [("", place)]
    if is_directory(place):
        rest = [(f"{REST}: ", place / REST)] if (place / REST).is_file() else []
        archives = itertools.chain(rest, Directory.open(place).archives())
    found, is_verified = [], False
    for label, source in archives:
        if not zipfile.is_zipfile(source):
            if label:
                found.append(f"{label}it is damaged: not an archive of torch.save")
            continue
        with zipfile.ZipFile(source) as archive:
            is_verified |= has_checksums(archive)
            damaged = damaged_records(archive)
            found += [f"{label}{name} is damaged: {reason}" for name, reason in damaged]
    if not is_verified and not found:
        raise ValueError(
            f"{str(place)!r} has no checksums: not of torch.save, or left out by its writer."
        )
    return found


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
