"""``lightning-zero convert`` and ``inspect``: checkpoints between formats, and what they hold."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from lightning_zero.checkpoint import (
    Directory,
    DirectorySave,
    FileSave,
    Provenance,
    ShardedValue,
    are_safetensors,
    damage,
    is_directory,
    load,
    provenance,
    read_file,
    read_safetensors,
    read_weights,
    with_integer_ids,
    write_safetensors,
)
from lightning_zero.comm import Control
from lightning_zero.memory import format_bytes, parse_bytes
from lightning_zero.plan import as_dtype

_NAME_COLUMNS = 50
"""Longer names have a line of their own, so that lines fit 100 columns."""
_PLAIN = (".ckpt", ".pt", ".pth", ".bin")
_DIRECTORY, _FILE = ".dcp", ".safetensors"


def run_convert(arguments: argparse.Namespace) -> int:
    """Convert as ``arguments`` ask for; return the exit code."""
    written = convert(
        arguments.source,
        arguments.target,
        weights_only=arguments.weights_only,
        dtype=as_dtype(arguments.dtype, "--dtype"),
        max_shard_bytes=parse_bytes(arguments.max_shard_size),
        trust=arguments.trust,
    )
    print(f"Wrote {written} of weights to {arguments.target}.")
    return 0


def convert(
    source: Path,
    target: Path | str,
    *,
    weights_only: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    trust: bool = False,
) -> str:
    """Write the content of ``source`` to ``target``; return the bytes of its weights, in words.

    The suffix of ``target`` determines the format; a folder may end in a slash instead.

    Arguments are those of the command. Safetensors files hold only weights, and optimizer states
    are never cast.
    """
    is_folder = str(target).endswith("/") or Path(target).is_dir()
    target = Path(target)
    if target.suffix not in (*_PLAIN, _DIRECTORY, _FILE, "") and not is_folder:
        raise ValueError(
            f"Expected a name that ends in {', '.join((*_PLAIN, _DIRECTORY, _FILE))}, or in a slash"
            f" for a folder, for example weights.safetensors, got {str(target)!r}."
        )
    control, is_plain = Control(alone=True), target.suffix in (*_PLAIN, _DIRECTORY)
    # Everything is read and verified first: damaged data must not get new, valid checksums.
    checkpoint: Any = None
    if is_plain and not weights_only:
        checkpoint = load(str(source), control, weights_only=not trust)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        weights = read_weights(str(source), control, weights_only=not trust)
        checkpoint = {"state_dict": weights}
    cast = {
        name: _cast(name, one, dtype, control) for name, one in checkpoint["state_dict"].items()
    }
    tensors = {name: value for name, value in cast.items() if isinstance(value, Tensor)}
    if is_plain:
        _write(target, {**checkpoint, "state_dict": cast}, control)
    else:
        is_file = target.suffix == _FILE and not is_folder
        write_safetensors(target, tensors, max_bytes=None if is_file else max_shard_bytes)
    return format_bytes(sum(value.nbytes for value in tensors.values()))


def _cast(name: str, value: Any, dtype: torch.dtype | None, control: Control) -> Any:
    """Return a value that is cast as it is written."""
    is_cast = isinstance(value, Tensor) and value.is_floating_point() and dtype is not None
    if not is_cast or value.dtype is dtype:
        return value
    dense = value.contiguous()
    return ShardedValue.of(name, dense.view(-1), 0, dense.shape, dense.stride(), control, dtype)


def _write(target: Path, checkpoint: Any, control: Control) -> None:
    provenance = Provenance(stage=0, world_size=1, precision="")
    if target.suffix == _DIRECTORY:
        DirectorySave(checkpoint, str(target), control, provenance).run()
        return
    if "optimizer_states" in checkpoint:
        states = [with_integer_ids(state) for state in checkpoint["optimizer_states"]]
        checkpoint = {**checkpoint, "optimizer_states": states}
    FileSave(checkpoint, str(target), control, provenance).run()


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print what a checkpoint holds; return the exit code."""
    try:
        print("\n".join(describe(arguments.file)))
    except ValueError:
        if not arguments.verify:
            raise
    if not arguments.verify:
        return 0
    found = damage(arguments.file)
    print("\n".join(found) or "All checksums match.")
    return 1 if found else 0


def describe(path: Path) -> Iterator[str]:
    """Yield the lines that ``inspect`` prints."""
    rows: list[tuple[str, Any, tuple[int, ...], int, Any]] = []  # with bytes and identity
    value: Any = {}
    if is_directory(path):
        directory = Directory.open(path)
        value = directory.rest()
        for where, name in directory.names.items():
            if name in directory.kinds:
                dtype, shape = directory.kinds[name]
                nbytes = prod(shape) * dtype.itemsize
                rows.append(("/".join(map(str, where)), dtype, shape, nbytes, directory.key(name)))
    elif are_safetensors(path):
        value = read_safetensors(path)
    else:
        value = read_file(path)
    for keys, tensor in tree_flatten_with_path(value)[0]:
        if not isinstance(tensor, Tensor):
            continue
        name = "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)
        identity = tensor.untyped_storage().data_ptr()
        rows.append((name, tensor.dtype, tuple(tensor.shape), tensor.nbytes, identity))
    total = sum({identity: nbytes for *_, nbytes, identity in rows}.values())
    yield f"{path}: {len(rows)} tensors, {total:,} bytes"
    if isinstance(value, dict) and "epoch" in value and "global_step" in value:
        yield f"epoch {value['epoch']}, step {value['global_step']}"
    written_by = provenance(path)
    if written_by is not None and written_by.get("stage") == 0:
        yield "written by `lightning-zero convert`"
    elif written_by is not None:
        yield (
            f"written by ZeRO stage {written_by.get('stage')}"
            f" on {written_by.get('world_size')} ranks,"
            f" precision {written_by.get('precision')}"
        )
    width = min(_NAME_COLUMNS, max((len(name) for name, *_ in rows), default=0))
    for name, dtype, shape, nbytes, _ in rows:
        kind = str(dtype).removeprefix("torch.")
        figures = f"  {kind:<9} {nbytes:>15,}  {shape}"
        if len(name) > width:
            yield f"  {name}"
            name = ""
        yield f"  {name:<{width}}{figures}"
