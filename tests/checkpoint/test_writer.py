"""Bytes reach their places whichever way they take, and what cannot be written is an error."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_mock import MockerFixture
from torch import Tensor

from lightning_zero.checkpoint.writer import BUFFER_BYTES, Writer

LARGE = 3 * BUFFER_BYTES + 12345
FILE_BYTES = LARGE + 30000


def content_of(nbytes: int) -> Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of the right size, full of ones."""
    path = tmp_path / "file"
    path.write_bytes(b"\1" * FILE_BYTES)
    return path


def assert_written(path: Path, place: int, content: Tensor, checksum: int) -> None:
    expected = content.numpy().tobytes()
    found = path.read_bytes()
    assert found[place : place + len(expected)] == expected
    assert not (found[:place] + found[place + len(expected) :]).strip(b"\1")
    assert len(found) == FILE_BYTES
    assert checksum == zlib.crc32(expected)


@pytest.mark.parametrize("place", [0, 1, 4095, 4096, 4100, 8191])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 2**18 + 1, LARGE])
def test_bytes_reach_their_place(path: Path, place: int, nbytes: int) -> None:
    content = content_of(nbytes)
    with Writer(path) as writer:
        checksum = writer.write(place, content)
        writer.sync()
    assert_written(path, place, content, checksum)


def test_neighbours_share_a_block(path: Path) -> None:
    first, second = content_of(LARGE // 2), content_of(LARGE // 2)
    with Writer(path) as one, Writer(path) as other:
        one.write(10, first)
        other.write(10 + len(first), second)
        one.write(10 + len(first) + len(second), b"the end")
    found = path.read_bytes()[10:][: LARGE + 6]
    assert found == (torch.cat([first, second]).numpy().tobytes() + b"the end")


@pytest.mark.parametrize("where", ["open", "pwrite"])
def test_a_file_system_without_direct_writes(path: Path, where: str, mocker: MockerFixture) -> None:
    direct: set[int] = set()
    real_open, real_write = os.open, os.pwrite

    def opened(name: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT and where == "open":
            raise OSError(errno.EINVAL, "no")
        descriptor = real_open(name, flags & ~os.O_DIRECT, *mode)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def written(descriptor: int, chunk: Any, place: int) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, "no")
        return real_write(descriptor, chunk, place)

    mocker.patch("os.open", opened)
    mocker.patch("os.pwrite", written)
    content = content_of(LARGE)
    with Writer(path) as writer:
        checksum = writer.write(7, content)
    assert_written(path, 7, content, checksum)
    assert bool(direct) == (where == "pwrite")


def test_a_full_disk_is_an_error(path: Path, mocker: MockerFixture) -> None:
    real_write, room = os.pwrite, 5000

    def written(descriptor: int, chunk: Any, place: int) -> int:
        if place >= room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, memoryview(chunk)[: room - place], place)

    mocker.patch("os.pwrite", written)
    with Writer(path) as writer, pytest.raises(OSError, match="No space left"):
        writer.write(0, content_of(LARGE))
