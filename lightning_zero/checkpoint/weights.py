"""Loading pretrained weights into a module, sharded or not, without a whole copy on any rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_zero.checkpoint.load import read_weights
from lightning_zero.checkpoint.module_state import load_module_state
from lightning_zero.comm import Control
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
        ValueError: The file is damaged, differs between ranks, or holds no weights.
    """
    engine = engine_of(module.parameters())
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
