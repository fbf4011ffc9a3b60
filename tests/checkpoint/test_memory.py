"""No rank holds more than its shards and a buffer, measured under a limit of the system."""

from __future__ import annotations

import ctypes
import gc
import resource
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import load_weights
from lightning_zero.checkpoint import (
    DirectorySave,
    FileSave,
    Provenance,
    Saver,
    load,
    load_module_state,
    load_optimizer_state,
    module_state,
    optimizer_state,
    write_safetensors,
)
from lightning_zero.checkpoint.files import BUFFER_BYTES
from lightning_zero.engine import Engine
from lightning_zero.plan import Settings
from tests.oracle.ranks import Pool

WIDTH, NUM_LAYERS, WORLD = 1024, 12, 4
WEIGHT_BYTES = NUM_LAYERS * WIDTH * WIDTH * 4
FILE_BYTES = 3 * WEIGHT_BYTES
ALLOWED_BYTES = BUFFER_BYTES + 4 * 2**20  # one would do; the allocator rounds


class Layers(nn.Module):
    """12 layers of 4 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sharded() -> tuple[nn.Module, torch.optim.Optimizer, Engine]:
    with torch.device("meta"):
        module = Layers()
    optimizer = torch.optim.Adam(module.parameters())
    engine = Engine(module, Settings(stage=3))
    engine.adopt(optimizer)
    return module, optimizer, engine


@contextmanager
def limited_to(nbytes: int) -> Iterator[None]:
    """Let this process allocate so many bytes more than it has now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    now = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + nbytes, before[1]))
    try:
        with pytest.raises(RuntimeError, match="memory"):  # the limit holds
            torch.ones((nbytes + WEIGHT_BYTES) // 4)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def save_under_limit(path: str, kind: type[Any]) -> float:
    module, optimizer, engine = sharded()
    module(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with limited_to(ALLOWED_BYTES):
        checkpoint = {
            "state_dict": module_state(module, engine),
            "optimizer_states": [optimizer_state(optimizer, engine, "optimizer 0")],
        }
        Saver(engine.comm.control).save(
            checkpoint, path, Provenance(3, WORLD, "32-true"), kind=kind
        )
    total = sum(piece.detach().double().sum().item() for piece in engine.sharded.pieces)
    engine.close(restore=False)
    return total


def load_under_limit(path: str, weights: list[str]) -> list[float]:
    """Resume, then load weights from each file; a number for what this rank got each time."""
    module, optimizer, engine = sharded()
    own_states = 2 * WEIGHT_BYTES // WORLD
    totals = []
    # The system counts the mapping of a file that this process could change, whatever it reads.
    with limited_to(own_states + FILE_BYTES + ALLOWED_BYTES):
        checkpoint: Any = load(path, engine.comm.control)
        load_module_state(module, engine, checkpoint["state_dict"])
        load_optimizer_state(optimizer, checkpoint["optimizer_states"][0], engine)
        del checkpoint
    totals.append(sum(piece.detach().double().sum().item() for piece in engine.sharded.pieces))
    for file in weights:
        with torch.no_grad():
            for piece in engine.sharded.pieces:
                piece.detach().zero_()
        mapped = WEIGHT_BYTES if Path(file).is_dir() else Path(file).stat().st_size
        with limited_to(mapped + ALLOWED_BYTES):
            load_weights(module, file)
        totals.append(sum(piece.detach().double().sum().item() for piece in engine.sharded.pieces))
    engine.close(restore=False)
    return totals


def as_safetensors(path: Path) -> Path:
    """The weights of a checkpoint file once more, in a file beside it."""
    weights = torch.load(path, mmap=True)["state_dict"]
    return write_safetensors(path.with_suffix(".safetensors"), weights)[0]


def checksums(files: list[Path]) -> list[int]:
    return [zlib.crc32(file.read_bytes()) for file in files]


def give_back_what_is_freed() -> None:
    """Let each block of 64 KiB or more be a mapping of its own; they leave no holes."""
    mmap_threshold = -3  # M_MMAP_THRESHOLD of malloc.h
    assert ctypes.CDLL(None).mallopt(mmap_threshold, 2**16) == 1


@pytest.fixture(scope="module")
def fresh_ranks() -> Iterator[Pool]:
    """Ranks whose allocator gives back what is freed.

    In the heap of ranks that ran other tests there are holes of any size, which the system's limit
    does not see.
    """
    pool = Pool(WORLD)
    pool.run(give_back_what_is_freed)
    yield pool
    pool.kill()


@pytest.mark.parametrize("kind", [FileSave, DirectorySave])
def test_saving_and_loading_take_one_buffer(
    fresh_ranks: Pool, tmp_path: Path, kind: type[Any]
) -> None:
    path = tmp_path / "file.ckpt"
    saved = fresh_ranks.run(save_under_limit, str(path), kind)
    files = list(path.iterdir()) if path.is_dir() else [path]
    assert FILE_BYTES < sum(file.stat().st_size for file in files) < FILE_BYTES + 2**20
    weights = [path] if path.is_dir() else [path, as_safetensors(path)]
    files += weights[1:]
    before = checksums(files)
    loaded = fresh_ranks.run(load_under_limit, str(path), [str(file) for file in weights])
    for total, found in zip(saved, loaded, strict=True):
        assert found == [pytest.approx(total)] * (1 + len(weights))
        assert total != 0
    assert checksums(files) == before
