"""``lightning-zero inspect``: the content of a checkpoint, and whether it is intact."""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_zero.checkpoint import (
    REST,
    DamageError,
    Directory,
    LazyTensor,
    is_directory,
    provenance,
    read_file,
    read_safetensors,
    refuse_deepspeed,
    rest_of,
)
from lightning_zero.tensors import named_tensors

_EXPECTED = (
    "a .ckpt or .pt file, a safetensors file or folder, or a directory of"
    " torch.distributed.checkpoint"
)


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
        help=_EXPECTED,
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
    value: Any
    written_by: Any = None
    if is_directory(path):
        directory = Directory.open(path)
        value = {"/".join(map(str, where)): found for where, found in directory.entries.items()}
        beside = rest_of(directory)
        value.update(beside if isinstance(beside, dict) else {})
        written_by = directory.provenance
    elif path.is_dir() or path.suffix == ".safetensors":
        if path.is_dir() and not any(path.glob("*.safetensors")):
            refuse_deepspeed(path)
            raise ValueError(f"{str(path)!r} is not a checkpoint. Expected {_EXPECTED}.")
        value = read_safetensors(path)
    else:
        value = read_file(str(path))
        written_by = provenance(path) if zipfile.is_zipfile(path) else None
    rows = list(named_tensors(value))
    storages = {_identity(row): row.nbytes for _, row in rows}
    yield f"{path}: {len(rows)} tensors, {sum(storages.values()):,} bytes"
    if isinstance(value, dict) and "epoch" in value and "global_step" in value:
        yield f"epoch {value['epoch']}, step {value['global_step']}"
    if written_by is not None and written_by.get("stage") == 0:
        yield "written by `lightning-zero convert`"
    elif written_by is not None:
        yield (
            f"written by ZeRO stage {written_by.get('stage')}"
            f" on {written_by.get('world_size')} ranks,"
            f" precision {written_by.get('precision')}"
        )
    width = max((len(name) for name, _ in rows), default=0)
    for name, tensor in rows:
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield f"  {name:<{width}}  {dtype:<9} {tensor.nbytes:>15,}  {tuple(tensor.shape)}"


def _identity(tensor: Tensor) -> Any:
    """Return a key that tied tensors share."""
    return id(tensor) if isinstance(tensor, LazyTensor) else tensor.untyped_storage().data_ptr()


def damage(path: Path) -> list[str]:
    """Return a line for each failed checksum of a file, or of all files of a folder."""
    if is_directory(path):
        rest = path / REST
        return [*Directory.open(path).damage(), *(damage(rest) if rest.is_file() else [])]
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{str(path)!r} has no checksums: it is not an archive of torch.save.")
    found = []
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            try:
                with archive.open(info) as record:
                    while record.read(2**20):
                        pass
            except Exception as error:  # a damaged archive can fail in any way
                found.append(f"{info.filename} is damaged: {error}")
    return found
