"""``lightning-zero inspect``: the content of a checkpoint, and whether it is intact."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint import (
    EXPECTED,
    DamageError,
    Directory,
    are_safetensors,
    damage,
    is_directory,
    provenance,
    read_file,
    read_safetensors,
    rest_of,
)
from lightning_zero.tensors import named_tensors


def add_inspect_command(commands: Any) -> None:
    """Add ``inspect`` to a command line's subparsers."""
    parser = commands.add_parser(
        "inspect",
        help="show what a checkpoint holds",
        description="Show the names, shapes, dtypes and bytes of the tensors in a checkpoint, and"
        " what wrote it. Only tensors and plain values are unpickled.",
    )
    parser.add_argument(
        "file",
        type=Path,
        help=EXPECTED,
    )
    parser.add_argument(
        "--verify", action="store_true", help="read everything and verify the checksums"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        print("\n".join(describe(arguments.file)))
    except DamageError:
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
        value, directory = rest_of(path), Directory.open(path)
        for where, name in directory.names.items():
            if name in directory.kinds:
                dtype, shape = directory.kinds[name]
                nbytes = prod(shape) * dtype.itemsize
                rows.append(("/".join(map(str, where)), dtype, shape, nbytes, directory.key(name)))
    elif are_safetensors(path):
        value = read_safetensors(path)
    else:
        value = read_file(path)
    for name, tensor in named_tensors(value):
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
    width = max((len(name) for name, *_ in rows), default=0)
    for name, dtype, shape, nbytes, _ in rows:
        kind = str(dtype).removeprefix("torch.")
        yield f"  {name:<{width}}  {kind:<9} {nbytes:>15,}  {shape}"
