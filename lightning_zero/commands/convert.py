"""``lightning-zero convert``: checkpoints between formats."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lightning_zero.checkpoint import (
    DirectorySave,
    FileSave,
    Provenance,
    ShardedValue,
    are_safetensors,
    load,
    read_weights,
    with_integer_ids,
    write_safetensors,
)
from lightning_zero.comm import Control, default_world_size
from lightning_zero.commands.option import option
from lightning_zero.memory import parse_bytes

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
    control, is_plain = Control(alone=True), target.suffix in (*_PLAIN, _DIRECTORY)
    # Everything is read and verified first: damaged data must not get new, valid checksums.
    checkpoint: Any = None
    if is_plain and not weights_only and not are_safetensors(source):
        checkpoint = load(str(source), control, weights_only=not trust)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        weights = read_weights(str(source), control, weights_only=not trust)
        checkpoint = {"state_dict": weights}
    weights = checkpoint["state_dict"]
    dtypes = {
        name: dtype if dtype is not None and value.is_floating_point() else value.dtype
        for name, value in weights.items()
        if isinstance(value, Tensor)
    }
    total = sum(weights[name].numel() * kind.itemsize for name, kind in dtypes.items())
    with tqdm(total=total, unit="B", unit_scale=True, disable=not shows_progress) as bar:
        if is_plain:
            cast = {name: _cast(name, value, dtypes.get(name)) for name, value in weights.items()}
            _write(target, {**checkpoint, "state_dict": cast}, control, bar.update)
            return

        def read(name: str) -> Tensor:
            bar.update(weights[name].numel() * dtypes[name].itemsize)
            return weights[name].to(dtypes[name])  # type: ignore[no-any-return]

        shapes = {name: (kind, tuple(weights[name].shape)) for name, kind in dtypes.items()}
        is_file = target.suffix == ".safetensors"
        write_safetensors(target, shapes, read, max_bytes=None if is_file else max_shard_bytes)


def _check_alone() -> None:
    """Raise if writing a file would wait for other ranks."""
    num_ranks = default_world_size()
    if num_ranks > 1:
        raise RuntimeError(
            f"convert must run in a single process, but this process is one of {num_ranks} ranks."
            " Call it before the Trainer runs, or use the command `lightning-zero convert`."
        )


def _cast(name: str, value: Any, dtype: torch.dtype | None) -> Any:
    """Return a value that is cast as it is written."""
    if dtype is None or value.dtype is dtype:
        return value
    dense = value.contiguous()
    return ShardedValue.of(name, dense.view(-1), 0, dense.shape, dense.stride(), dtype)


def _write(
    target: Path, checkpoint: Any, control: Control, on_written: Callable[[int], object]
) -> None:
    provenance = Provenance(stage=0, world_size=1, precision="")
    if target.suffix == _DIRECTORY:
        DirectorySave(checkpoint, str(target), control, provenance).run()
        return
    if "optimizer_states" in checkpoint:
        states = [with_integer_ids(state) for state in checkpoint["optimizer_states"]]
        checkpoint = {**checkpoint, "optimizer_states": states}
    FileSave(checkpoint, str(target), control, provenance, on_written).run()


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"Expected a floating-point dtype such as 'bfloat16', got {name!r}.")
    return dtype
