"""The file: a plain zip that torch, zipfile and DDP read, from parts that ranks wrote."""

from __future__ import annotations

import zipfile
import zlib
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.checkpoint import (
    Provenance,
    Saver,
    ShardedValue,
    collected,
    module_state,
    optimizer_state,
)
from lightning_zero.checkpoint.archive import Archive, joined_checksum
from lightning_zero.comm import Control
from lightning_zero.engine import Engine
from lightning_zero.plan import Settings
from tests.oracle.models import MODELS
from tests.oracle.ranks import Pools

PROVENANCE = Provenance(stage=3, world_size=1, precision="32-true")


# -- the archive -----------------------------------------------------------------------------------


def written(archive: Archive, contents: list[bytes]) -> bytes:
    """The file with these contents, from records and seams."""
    checksums = [zlib.crc32(content) for content in contents]
    file = bytearray(archive.nbytes)
    for record, content in zip(archive.records, contents, strict=True):
        file[record.offset : record.stop] = content
    for index in range(len(contents) + 1):
        start, seam = archive.seam(index, checksums)
        file[start : start + len(seam)] = seam
    return bytes(file)


def test_archive_is_a_zip_with_aligned_records(tmp_path: Path) -> None:
    contents = [b"pickle", b"", b"x" * 1000, b"y"]
    archive = Archive.build((f"data/{n}", len(content)) for n, content in enumerate(contents))
    path = tmp_path / "file.zip"
    path.write_bytes(written(archive, contents))
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        assert [file.read(name) for name in file.namelist()] == contents
        assert file.namelist() == [f"archive/data/{n}" for n in range(4)]
    assert all(record.offset % 64 == 0 for record in archive.records)
    assert path.stat().st_size == archive.nbytes


@pytest.mark.parametrize("sizes", [[5 * 2**30, 7], [3 * 2**30, 3 * 2**30, 7], [1] * 70_000])
def test_archive_beyond_the_limits_of_plain_zip(tmp_path: Path, sizes: list[int]) -> None:
    named = [("version", 2), *((f"data/{n}", size) for n, size in enumerate(sizes))]
    archive = Archive.build(named)
    checksums = [zlib.crc32(b"3\n")]
    checksums += [zlib.crc32(b"\0" * size) if size < 9 else 0 for size in sizes]
    with (tmp_path / "file.zip").open("wb") as file:  # sparse: it takes no room
        file.truncate(archive.nbytes)
        for index in range(len(named) + 1):
            start, seam = archive.seam(index, checksums)
            file.seek(start)
            file.write(seam)
        file.seek(archive.records[0].offset)
        file.write(b"3\n")
    with zipfile.ZipFile(tmp_path / "file.zip") as archived:
        assert [info.file_size for info in archived.infolist()] == [2, *sizes]
        assert archived.read(f"archive/data/{len(sizes) - 1}") == b"\0" * sizes[-1]
    reader = torch._C.PyTorchFileReader(str(tmp_path / "file.zip"))
    for number in (0, len(sizes) - 1):
        assert reader.get_record_offset(f"data/{number}") == archive.records[number + 1].offset


def test_checksums_join() -> None:
    content = bytes(n * 31 % 251 for n in range(500))
    edges = (0, 1, 7, 7, 499, 500)
    parts = [(a, b - a, zlib.crc32(content[a:b])) for a, b in pairwise(edges)]
    assert joined_checksum(parts[::-1], 500) == zlib.crc32(content)
    for wrong in (parts[1:], parts[:-1], [*parts, parts[-1]]):
        with pytest.raises(ValueError, match="do not join"):
            joined_checksum(wrong, 500)


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
        return ShardedValue.of(key, flat[start:stop], start, whole.shape, whole.stride())

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


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("suffix", ["ckpt", "trusted"])
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


# -- models and optimizers -------------------------------------------------------------------------


def train_and_save(name: str, stage: int, path: str) -> dict[str, Any]:
    """Two steps and a save; returns what the whole state is by way of gathering."""
    case = MODELS[name]
    module = case.build()
    engine = Engine(module, Settings(stage=stage))
    wanted = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=0.01)
    engine.adopt(optimizer)
    for step in range(2):
        optimizer.zero_grad()
        with engine.step() as watch:
            watch(loss := case.loss(module, case.batch(12, step)))
        loss.backward()
        optimizer.step()
    checkpoint = {
        "state_dict": module_state(module, engine),
        "optimizer_states": [optimizer_state(optimizer, engine, "optimizer 0")],
    }
    Saver(engine.comm.control).save(checkpoint, path, PROVENANCE)
    whole = collected(checkpoint, engine.comm.control)
    engine.close()
    return whole if engine.comm.control.rank == 0 else {}


def plain(name: str, world: int) -> dict[str, Any]:
    case = MODELS[name]
    module = case.build()
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        case.loss(module, case.batch(12, step)).backward()
        optimizer.step()
    return {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        assert found.stride() == expected.stride(), where
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=where)
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            assert_same(found[number], value, f"{where}/{number}")
    else:
        assert found == expected, where


NAMES = ["odd_widths", "zero_sized", "tied", "frozen", "unused_branch", "channels_last"]


@pytest.mark.parametrize("world", [1, 3])
def test_file_holds_what_a_plain_loop_would_save(ranks: Pools, tmp_path: Path, world: int) -> None:
    for name in NAMES:
        expected = plain(name, world)
        for stage in (1, 2, 3):
            path = str(tmp_path / f"{name}{stage}.ckpt")
            whole = ranks(world).run(train_and_save, name, stage, path)[0]
            found = torch.load(path, weights_only=True)
            assert_same(found, whole, f"{name} {stage}")
            assert_same(found, expected, f"{name} {stage}")
            assert found["state_dict"]._metadata == expected["state_dict"]._metadata
            MODELS[name].build().load_state_dict(found["state_dict"])
