"""The file: a plain zip that torch, zipfile and DDP read, from parts that ranks wrote."""

from __future__ import annotations

import errno
import os
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_mock import MockerFixture
from torch import nn

from lightning_zero.checkpoint import (
    Provenance,
    Saver,
    ShardedValue,
)
from lightning_zero.checkpoint.archive import Archive
from lightning_zero.checkpoint.files import BUFFER_BYTES, Writer
from lightning_zero.comm import Control
from tests.oracle.ranks import Pools

PROVENANCE = Provenance(stage=3, world_size=1, precision="32-true")


# -- the archive -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [[6, 0, 2**20, 1], [5 * 2**30, 7], [3 * 2**30, 3 * 2**30, 7], [1] * 70_000]
)
def test_archive_is_a_zip_with_aligned_records(tmp_path: Path, sizes: list[int]) -> None:
    named = [("version", 2), *((f"data/{n}", size) for n, size in enumerate(sizes))]
    archive = Archive.of(named)
    assert all(place % 64 == 0 for place in archive.places)
    checksums = [zlib.crc32(b"3\n")]
    checksums += [zlib.crc32(b"\0" * size) if size <= 2**20 else 0 for size in sizes]
    with (tmp_path / "file.zip").open("wb") as file:  # sparse: it takes no room
        file.truncate(archive.end)
        file.seek(archive.places[0])
        file.write(b"3\n")
    archive.seal(tmp_path / "file.zip", checksums)
    with zipfile.ZipFile(tmp_path / "file.zip") as archived:
        assert [info.file_size for info in archived.infolist()] == [2, *sizes]
        assert archived.read(f"archive/data/{len(sizes) - 1}") == b"\0" * sizes[-1]
    reader = torch._C.PyTorchFileReader(str(tmp_path / "file.zip"))
    for number in (0, len(sizes) - 1):
        assert reader.get_record_offset(f"data/{number}") == archive.places[number + 1]


# -- the writer ------------------------------------------------------------------------------------

LARGE = BUFFER_BYTES + 12345
FILE_BYTES = LARGE + 30000


@pytest.mark.parametrize("place", [0, 4095, 4100])
@pytest.mark.parametrize("nbytes", [0, 4096, 2**18 + 1, LARGE])
@pytest.mark.parametrize("direct", ["open", "pwrite", "works"])
def test_bytes_reach_their_place(
    tmp_path: Path, place: int, nbytes: int, direct: str, mocker: MockerFixture
) -> None:
    """Also on a file system that refuses direct I/O, or the writing of it."""
    path, real_open, real_write = tmp_path / "file", os.open, os.pwrite
    path.write_bytes(b"\1" * FILE_BYTES)
    refused: set[int] = set()

    def opened(name: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT and direct == "open":
            raise OSError(errno.EINVAL, "no")
        descriptor = real_open(name, flags, *mode)
        if flags & os.O_DIRECT and direct == "pwrite":
            refused.add(descriptor)
        return descriptor

    def written(descriptor: int, chunk: Any, start: int) -> int:
        if descriptor in refused:
            raise OSError(errno.EINVAL, "no")
        return real_write(descriptor, chunk, start)

    mocker.patch("os.open", opened)
    mocker.patch("os.pwrite", written)
    content = torch.randint(256, (nbytes,), dtype=torch.uint8)
    with Writer(path) as writer:
        checksum = writer.write(place, content)
        writer.sync()
    expected, found = content.numpy().tobytes(), path.read_bytes()
    assert found[place : place + nbytes] == expected
    assert not (found[:place] + found[place + nbytes :]).strip(b"\1")
    assert len(found) == FILE_BYTES
    assert checksum == zlib.crc32(expected)


# -- what a file holds -----------------------------------------------------------------------------


class Unknown:
    """An object that nobody can walk through, with a tensor in it."""

    def __init__(self) -> None:
        self.hidden = torch.arange(5.0)


def save_everything(path: str) -> None:
    """All kinds of values, some of them cut over the ranks."""
    control = Control()
    dtypes = (torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.uint16, torch.int8)

    def cut(key: str, whole: torch.Tensor) -> ShardedValue:
        flat = whole.reshape(-1)
        edges = [flat.numel() * r // control.world_size for r in range(control.world_size + 1)]
        start, stop = edges[control.rank], edges[control.rank + 1]
        return ShardedValue.of(key, flat[start:stop], start, whole.shape, whole.stride(), control)

    tied = cut("tied", torch.arange(6.0).view(2, 3))
    checkpoint = {
        "plain": torch.arange(3),
        "view": torch.arange(10)[2:4],
        "strided": torch.arange(6).view(2, 3).t(),
        "scalar": torch.tensor(3.5),
        "list": [1, "two", None, 3.0, (4, b"five")],
        "parameter": nn.Parameter(torch.ones(2)),
        "unknown": Unknown() if path.endswith(".trusted") else None,
        "state_dict": OrderedDict(a=tied, b=tied),
        "nothing": cut("nothing", torch.empty(0, 4)),
        "point": cut("point", torch.tensor(7.0)),
        **{str(t): cut(str(t), torch.arange(100).to(t)) for t in dtypes},
    }
    checkpoint["state_dict"]._metadata = {"": {"version": 1}}
    Saver(control).save(checkpoint, path, PROVENANCE)


@pytest.mark.parametrize(("world", "suffix"), [(1, "trusted"), (3, "ckpt"), (3, "trusted")])
def test_file_is_what_torch_save_would_write(
    ranks: Pools, tmp_path: Path, world: int, suffix: str
) -> None:
    path = tmp_path / "new" / f"file.{suffix}"
    ranks(world).run(save_everything, str(path))
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    for mmap in (False, True):
        found = torch.load(path, weights_only=suffix == "ckpt", mmap=mmap)
        assert found["plain"].tolist() == [0, 1, 2]
        assert found["view"].tolist() == [2, 3]
        assert found["strided"].tolist() == [[0, 3], [1, 4], [2, 5]]
        assert found["scalar"].item() == 3.5
        assert found["list"] == [1, "two", None, 3.0, (4, b"five")]
        assert isinstance(found["parameter"], nn.Parameter)
        if suffix == "trusted":
            assert found["unknown"].hidden.tolist() == [0, 1, 2, 3, 4]
        assert found["state_dict"]["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert found["state_dict"]["a"].data_ptr() == found["state_dict"]["b"].data_ptr()
        assert found["state_dict"]._metadata == {"": {"version": 1}}
        assert found["nothing"].shape == (0, 4)
        assert found["point"].item() == 7
        for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.uint16):
            assert torch.equal(found[str(dtype)], torch.arange(100).to(dtype))
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
