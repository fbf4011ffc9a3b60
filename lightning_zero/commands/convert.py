"""``lightning-zero convert``: checkpoints between formats, tensor by tensor."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from lightning_zero.checkpoint import (
    Directory,
    DirectorySave,
    FileSave,
    LazyTensor,
    Provenance,
    ShardedValue,
    check_values,
    content,
    in_memory,
    is_directory,
    read_file,
    read_safetensors,
    read_weights,
    write_safetensors,
)
from lightning_zero.comm import Control, default_world_size
from lightning_zero.commands.option import option
from lightning_zero.memory import parse_bytes

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]

_PLAIN = (".ckpt", ".pt", ".pth", ".bin")
_DIRECTORY = ".dcp"


def add_convert_command(commands: Any) -> None:
    """Add ``convert`` to a command line's subparsers."""
    parser = commands.add_parser(
        "convert",
        help="convert a checkpoint to another format",
        description="Convert between checkpoint files (.ckpt, .pt), directories of"
        " torch.distributed.checkpoint and safetensors. The suffix of DST determines its format:"
        " .ckpt, .pt, .dcp (a directory), .safetensors, or none of these for a folder of"
        " safetensors files.",
    )
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("target", type=Path, metavar="DST")
    parser.add_argument("--weights-only", action="store_true", help="keep only the weights")
    parser.add_argument(
        "--dtype", type=option(_dtype), help="cast floating-point weights, e.g. bfloat16"
    )
    parser.add_argument(
        "--max-shard-size",
        dest="max_shard_bytes",
        metavar="SIZE",
        type=option(parse_bytes),
        default=parse_bytes("5GB"),
        help="maximum size of one file in a safetensors folder (default: 5GB)",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="also unpickle objects of other classes in SRC, which can run its writer's code",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(arguments).items() if name != "run"}
    convert(**given, shows_progress=True)
    return 0


def convert(
    source: Path,
    target: Path,
    *,
    weights_only: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    shows_progress: bool = False,
    trust: bool = False,
) -> None:
    """Write the content of ``source`` to ``target``, whose name determines the format.

    Arguments are those of the command. Safetensors files hold only weights, and optimizer states
    are never cast.
    """
    _check_alone()
    holds_more = target.suffix in (*_PLAIN, _DIRECTORY) and not weights_only
    weights, rest = _read(source, holds_more, trust=trust)
    shapes: Shapes = {
        name: (_target_dtype(value.dtype, dtype), tuple(value.shape))
        for name, value in weights.items()
        if isinstance(value, Tensor)
    }
    total = sum(kind.itemsize * prod(shape) for kind, shape in shapes.values())
    with tqdm(total=total, unit="B", unit_scale=True, disable=not shows_progress) as bar:
        if target.suffix in (*_PLAIN, _DIRECTORY):
            _write_plain(target, weights, shapes, rest, bar.update)
        else:

            def read(name: str) -> Tensor:
                bar.update(shapes[name][0].itemsize * prod(shapes[name][1]))
                return in_memory(weights[name]).to(shapes[name][0])

            is_file = target.suffix == ".safetensors"
            write_safetensors(target, shapes, read, max_bytes=None if is_file else max_shard_bytes)
    _verify(target, shapes, weights_only=not trust)


def _check_alone() -> None:
    """Raise if writing a file would wait for other ranks."""
    num_ranks = default_world_size()
    if num_ranks > 1:
        raise RuntimeError(
            f"convert must run in a single process, but this process is one of {num_ranks} ranks."
            " Call it before the Trainer runs, or use the command `lightning-zero convert`."
        )


def _read(source: Path, holds_more: bool, *, trust: bool) -> tuple[Mapping[str, Any], Any]:
    """Return the weights and, if ``holds_more``, all content, after a check of the checksums."""
    weights = read_weights(source, weights_only=not trust)
    rest = _rest(source, weights_only=not trust) if holds_more else None
    # Read and verify everything first: damaged data must not get new, valid checksums.
    check_values(weights if rest is None else rest)
    return weights, rest


def _write_plain(
    target: Path,
    weights: Mapping[str, Any],
    shapes: Shapes,
    rest: Any,
    on_written: Callable[[int], object],
) -> None:
    """Write a checkpoint; ``rest`` supplies its other content if it is one of a Trainer."""
    values = {
        name: ShardedValue.of_whole(value, shapes[name][0]) if name in shapes else value
        for name, value in weights.items()
    }
    is_of_trainer = isinstance(rest, dict) and "state_dict" in rest
    checkpoint = {**rest, "state_dict": values} if is_of_trainer else {"state_dict": values}
    control = Control()
    provenance = Provenance(stage=0, world_size=1, precision="")
    kind = DirectorySave if target.suffix == _DIRECTORY else FileSave
    # Tensors in files are read one by one, as they are written.
    checkpoint = tree_map_only(LazyTensor, ShardedValue.of_whole, checkpoint)
    kind(checkpoint, str(target), control, provenance, on_written).run()


def _rest(source: Path, *, weights_only: bool) -> Any:
    """Read all content of the source; ``None`` if its format holds only weights."""
    if is_directory(source):
        return content(Directory.open(source), weights_only=weights_only)
    return read_file(str(source), weights_only=weights_only) if source.suffix in _PLAIN else None


def _verify(target: Path, shapes: Shapes, *, weights_only: bool) -> None:
    """Raise unless ``target`` holds tensors of these shapes and dtypes, and no others."""
    if target.suffix in (*_PLAIN, _DIRECTORY):
        written = read_weights(target, weights_only=weights_only)
    else:
        written = read_safetensors(target)
    found = {
        name: (value.dtype, tuple(value.shape))
        for name, value in written.items()
        if isinstance(value, Tensor)
    }
    for name in {**shapes, **found}:
        if shapes.get(name) != found.get(name):
            raise ValueError(
                f"{str(target)!r} was not written correctly: expected {name!r} to be"
                f" {shapes.get(name)}, got {found.get(name)}."
            )


def _target_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"Expected a floating-point dtype such as 'bfloat16', got {name!r}.")
    return dtype
