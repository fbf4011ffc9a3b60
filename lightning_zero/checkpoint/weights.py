"""Loading pretrained weights into a module, sharded or not, without a whole copy on any rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_zero.checkpoint.dcp.content import weights_of
from lightning_zero.checkpoint.dcp.directory import Directory, is_directory
from lightning_zero.checkpoint.load import compare, identity_of, read_file, refuse_deepspeed
from lightning_zero.checkpoint.module_state import load_module_state
from lightning_zero.checkpoint.safetensors import read_safetensors
from lightning_zero.comm import Control, agreed
from lightning_zero.engine import engine_of


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
        ValueError: The file is damaged, differs between ranks, or holds no weights. If damage shows
            only while it is read, a sharded module neither trains, predicts nor is saved until
            other weights are loaded.
    """
    engine = engine_of(module.parameters())
    is_meta = any(p.is_meta for p in [*module.parameters(), *module.buffers()])
    if engine is None and is_meta:
        raise RuntimeError(
            f"{type(module).__name__} is on the meta device and not sharded yet, so it cannot take"
            " weights. Call load_weights in `on_fit_start`, or materialize the module first."
        )
    control = Control(alone=True) if engine is None else engine.comm.control
    weights = _read_together(os.fspath(path), control, read_weights)
    try:
        return load_module_state(module, engine, _with_ties(module, weights), strict=strict)
    except RuntimeError as error:
        raise RuntimeError(f"{os.fspath(path)!r} does not fit the module. {error}") from error


def are_bare_weights(path: str) -> bool:
    """Return whether ``path`` is a safetensors file, or a folder of them."""
    place = Path(path)
    return place.suffix == ".safetensors" or (place.is_dir() and any(place.glob("*.safetensors")))


def load_bare_weights(path: str, control: Control) -> dict[str, Tensor]:
    """Return the tensors of safetensors files, read on use; all ranks call it together."""
    return _read_together(path, control, lambda path: read_safetensors(Path(path)))


def _read_together(
    path: str, control: Control, read: Callable[[str], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Return what ``read`` does, unless it fails on any rank or ranks see different files."""
    with agreed(control, f"Loading {path!r}"):
        weights = read(path)
        identity = identity_of(Path(path)) if Path(path).exists() else ""
    compare(path, identity, control)
    return weights


def read_weights(path: str | os.PathLike[str], *, weights_only: bool = True) -> dict[str, Tensor]:
    """Return the weights in a file or folder by name, read on use."""
    place = Path(path)
    if is_directory(place):
        return weights_of(Directory.open(place), weights_only=weights_only)
    if place.suffix == ".safetensors" or place.is_dir():
        if not place.exists():
            raise FileNotFoundError(f"File not found: {str(place)!r}")
        if place.is_dir():
            refuse_deepspeed(place)
        return read_safetensors(place)
    found = read_file(os.fspath(path), weights_only=weights_only)
    weights = found.get("state_dict", found) if isinstance(found, dict) else None
    if not isinstance(weights, dict) or not any(isinstance(v, Tensor) for v in weights.values()):
        raise ValueError(
            f"{os.fspath(path)!r} holds no weights: expected a dictionary of tensors, or one"
            " under 'state_dict'"
        )
    return weights


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
