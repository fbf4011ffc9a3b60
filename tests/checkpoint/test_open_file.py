"""Files that are read over and over: what the system's cache has lost is read past it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.checkpoint.open_file import OpenFile
from lightning_zero.tensors import SECTOR
from tests.oracle.cached import are_forgettable, cached_share, forget

NBYTES = 10 * 2**20 + 136
PARTS = [(136, 4 * 2**20), (4 * 2**20 + 136, 1000), (4 * 2**20 + 2000, NBYTES - 4 * 2**20 - 2000)]
"""The begin of each, and its bytes: none is at a page, one ends in the middle of one."""


@pytest.fixture
def content(tmp_path: Path) -> Tensor:
    content = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8)
    (tmp_path / "file").write_bytes(content.numpy().tobytes())
    if not are_forgettable(tmp_path / "file"):
        pytest.skip("this file system has no requests past the system's cache")
    return content


def read_all(file: OpenFile, content: Tensor) -> None:
    for start, nbytes in PARTS:
        out = torch.zeros(nbytes, dtype=torch.uint8)
        file.read(out, start)
        assert torch.equal(out, content[start : start + nbytes])


def test_what_is_lost_is_read_past_the_cache(tmp_path: Path, content: Tensor) -> None:
    path = tmp_path / "file"
    file = OpenFile(path)
    path.rename(tmp_path / "renamed")
    path = tmp_path / "renamed"
    file.expect_passes()
    forget(path)
    read_all(file, content)
    assert cached_share(path) == 1  # others may read it
    for _ in range(2):
        forget(path)
        read_all(file, content)
        assert cached_share(path) < 0.1
    os.pread(file.descriptor, 2**20, 0)  # and what the system reads ahead
    read_all(file, content)
    assert 0.09 < cached_share(path) < 0.9


@pytest.mark.parametrize("start", [136, 4 * 2**20 + 1, 5 * 2**20])
@pytest.mark.parametrize("nbytes", [0, 100, 700, 5 * 2**20 + 77])
@pytest.mark.parametrize("takes_sectors", [True, False])
def test_memory_that_lies_as_the_file_is_filled_without_a_copy(
    tmp_path: Path, content: Tensor, start: int, nbytes: int, takes_sectors: bool, mocker: Any
) -> None:
    memory = torch.zeros(6 * 2**20, dtype=torch.uint8)
    place = (start - memory.data_ptr()) % SECTOR
    file = OpenFile(tmp_path / "file")
    if not takes_sectors:
        refused = OSError(22, "Invalid argument")
        mocker.patch("lightning_zero.checkpoint.open_file._fill", side_effect=refused)
    file.expect_passes()
    mocker.stopall()
    read_all(file, content)
    forget(tmp_path / "file")
    copies = mocker.spy(ctypes, "memmove")
    file.read(memory[place : place + nbytes], start)
    assert torch.equal(memory[place : place + nbytes], content[start : start + nbytes])
    assert not memory[:place].any()
    assert not memory[place + nbytes :].any()
    assert copies.call_count == (0 if takes_sectors else -(-nbytes // (4 * 2**20)))
    assert cached_share(tmp_path / "file") < 0.1


def test_what_is_read_by_many_goes_through_the_cache(tmp_path: Path, content: Tensor) -> None:
    file = OpenFile(tmp_path / "file")
    for _ in range(3):
        forget(tmp_path / "file")
        read_all(file, content)
        assert cached_share(tmp_path / "file") == 1


@pytest.mark.parametrize("passes", [False, True])
def test_the_end_is_an_error(tmp_path: Path, content: Tensor, passes: bool) -> None:
    file = OpenFile(tmp_path / "file")
    if passes:
        file.expect_passes()
    for _ in range(3):
        forget(tmp_path / "file")
        with pytest.raises(OSError, match=f"the file ends before byte {NBYTES + 1}"):
            file.read(torch.empty(2**20, dtype=torch.uint8), NBYTES - 2**20 + 1)


def test_where_requests_past_the_cache_fail_they_go_through_it(
    tmp_path: Path, content: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = OpenFile(tmp_path / "file")
    file.expect_passes()
    read_all(file, content)
    real = os.preadv

    def preadv(descriptor: int, *args: object) -> int:
        if descriptor != file.descriptor:
            raise OSError(22, "Invalid argument")
        return real(descriptor, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", preadv)
    forget(tmp_path / "file")
    read_all(file, content)
    assert cached_share(tmp_path / "file") == 1
