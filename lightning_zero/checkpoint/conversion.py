"""``lightning-zero convert``: between checkpoint files and safetensors, and from DeepSpeed.

Everything is done tensor by tensor.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from lightning_zero.checkpoint.deepspeed_folder import DeepSpeedFolder
from lightning_zero.checkpoint.deepspeed_tag import is_deepspeed_folder
from lightning_zero.checkpoint.deferred import Deferred
from lightning_zero.checkpoint.directory import is_directory
from lightning_zero.checkpoint.directory_save import DirectorySave
from lightning_zero.checkpoint.mapped_file import content, mapped, opened
from lightning_zero.checkpoint.provenance import Provenance
from lightning_zero.checkpoint.safetensors import read_safetensors, write_safetensors
from lightning_zero.checkpoint.save import Save
from lightning_zero.checkpoint.spread import Spread
from lightning_zero.checkpoint.stored import Stored, in_memory
from lightning_zero.checkpoint.weights import read_weights
from lightning_zero.comm import Comm

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]

_PLAIN = (".ckpt", ".pt", ".pth", ".bin")
_DIRECTORY = ".dcp"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_convert_command(commands: Any) -> None:
    """Add ``convert`` to a command line's subparsers."""
    parser = commands.add_parser(
        "convert",
        help="turn a checkpoint into another kind of file",
        description="Convert between checkpoint files (.ckpt, .pt), directories of"
        " torch.distributed.checkpoint and safetensors, and from folders by DeepSpeed's ZeRO. The"
        " kind of DST follows from its name: .ckpt, .pt, .dcp (a directory), .safetensors, or a"
        " folder of safetensors files.",
    )
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("target", type=Path, metavar="DST")
    parser.add_argument(
        "--weights-only", action="store_true", help="leave out everything but the weights"
    )
    parser.add_argument("--dtype", type=_dtype, help="cast floating-point weights, e.g. bfloat16")
    parser.add_argument(
        "--max-shard-size",
        type=parse_bytes,
        default=parse_bytes("5GB"),
        help="the most that one file of a safetensors folder holds (default: 5GB)",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="also unpickle objects of other classes in SRC, which can run code of its writer",
    )
    parser.add_argument(
        "--frozen-in-optimizer",
        action="store_true",
        help="from DeepSpeed: the optimizer was given frozen parameters, too",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    convert(
        arguments.source,
        arguments.target,
        weights_only=arguments.weights_only,
        dtype=arguments.dtype,
        max_shard_bytes=arguments.max_shard_size,
        shows_progress=True,
        trust=arguments.trust,
        frozen_in_optimizer=arguments.frozen_in_optimizer,
    )
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
    frozen_in_optimizer: bool = False,
) -> None:
    """Write what ``source`` holds to ``target``, whose name tells its kind.

    Args:
        source: A ``.ckpt`` or ``.pt`` file, a directory of torch.distributed.checkpoint, a
            safetensors file, a folder of those, or a folder that DeepSpeed's ZeRO wrote.
        target: ``.ckpt`` or ``.pt``, ``.dcp`` for a directory of torch.distributed.checkpoint,
            ``.safetensors``, or a folder for safetensors files.
        weights_only: Leave out everything but the weights, as safetensors files always do.
        dtype: Cast floating-point weights to it. Optimizer states are never cast.
        max_shard_bytes: The most that one file of a folder holds.
        shows_progress: Whether to draw a bar.
        trust: Also unpickle objects that are neither tensors nor plain values; they can run code.
        frozen_in_optimizer: From DeepSpeed, which does not tell: the optimizer was given frozen
            parameters, too, as ``Adam(self.parameters())`` is. It has one param group then.

    Raises:
        FileNotFoundError: The source, or a rank's file of it, is missing.
        NotImplementedError: DeepSpeed's optimizer states cannot be given to single parameters.
        RuntimeError: This process is one of several ranks.
        ValueError: The source is damaged or holds no weights, or the result is not right.
    """
    _check_alone()
    holds_more = target.suffix in (*_PLAIN, _DIRECTORY) and not weights_only
    rest: Any = None
    weights: Mapping[str, Any]
    if is_deepspeed_folder(source):
        rest = DeepSpeedFolder(source, trust=trust).checkpoint(
            weights_only=not holds_more, frozen_in_optimizer=frozen_in_optimizer
        )
        weights = rest["state_dict"]
    else:
        weights = read_weights(source, weights_only=not trust)
        rest = _rest(source, weights_only=not trust) if holds_more else None
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
                return _values(weights[name]).to(shapes[name][0])

            is_file = target.suffix == ".safetensors"
            write_safetensors(target, shapes, read, max_bytes=None if is_file else max_shard_bytes)
    _verify(target, shapes, weights_only=not trust)


def _check_alone() -> None:
    """Raise if writing a file would wait for other ranks."""
    num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_ranks > 1:
        raise RuntimeError(
            f"convert works alone, but this process is one of {num_ranks} ranks. Call it before the"
            " Trainer runs, or run the command `lightning-zero convert`."
        )


def _write_plain(
    target: Path,
    weights: Mapping[str, Any],
    shapes: Shapes,
    rest: Any,
    on_written: Callable[[int], object],
) -> None:
    """Write a checkpoint file, its other content from ``rest`` if that is one of a Trainer."""
    spreads = {
        name: _whole(value, shapes[name][0]) if isinstance(value, Tensor) else value
        for name, value in weights.items()
    }
    is_of_trainer = isinstance(rest, dict) and "state_dict" in rest
    checkpoint = {**rest, "state_dict": spreads} if is_of_trainer else {"state_dict": spreads}
    comm = Comm(torch.device("cpu"))
    provenance = Provenance(stage=0, world_size=1, precision="")
    kind = DirectorySave if target.suffix == _DIRECTORY else Save
    kind(_streamed(checkpoint), str(target), comm, provenance, on_written).run()


def _rest(source: Path, *, weights_only: bool) -> Any:
    """What the source holds besides weights, if it may be more than weights."""
    if is_directory(source):
        return content(opened(source), weights_only=weights_only)
    return mapped(str(source), weights_only=weights_only) if source.suffix in _PLAIN else None


def _streamed(value: Any) -> Any:
    """A copy of nested containers whose stored tensors are read one by one, when written."""
    if isinstance(value, Stored):
        return Spread.of_whole(value)
    if type(value) is dict:
        return {key: _streamed(item) for key, item in value.items()}
    return [_streamed(item) for item in value] if type(value) is list else value


def _whole(value: Tensor, dtype: torch.dtype) -> Spread:
    """A whole tensor that is cast when it is written; ties have one key, so they stay tied."""
    if isinstance(value, Deferred):
        return value.cast(dtype)
    return Spread.of_whole(value, dtype)


def _values(value: Tensor) -> Tensor:
    """A tensor with its values, which are read now if they were not yet."""
    return value.part.view(value.shape) if isinstance(value, Deferred) else in_memory(value)


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
                f"{str(target)!r} was written wrongly: {name!r} should be {shapes.get(name)},"
                f" but is {found.get(name)}."
            )


def _target_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise argparse.ArgumentTypeError(f"expected a floating-point dtype, got {name!r}")
    return dtype


def parse_bytes(text: str) -> int:
    """A number of bytes such as ``5GB``, ``200MiB`` or ``4096``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = match and match[2].upper().removesuffix("B") + ("B" if match[2] else "")
    if match is None or unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"expected bytes such as 5GB or 200MiB, got {text!r}")
    return int(float(match[1]) * _UNITS[unit])
