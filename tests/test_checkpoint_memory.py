"""No rank holds more than its shards and a buffer, measured under a limit of the system."""

from __future__ import annotations

import ctypes
import gc
import resource
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
    Provenance,
    Save,
    Saver,
    load,
    load_module_state,
    load_optimizer_state,
    module_state,
    optimizer_state,
)
from lightning_zero.engine import Engine
from lightning_zero.settings import Settings
from tests.ranks import Pools

WIDTH, NUM_LAYERS, WORLD = 1024, 12, 4
WEIGHT_BYTES = NUM_LAYERS * WIDTH * WIDTH * 4
FILE_BYTES = 3 * WEIGHT_BYTES
BUFFER_BYTES = 20 * 2**20


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
    with limited_to(BUFFER_BYTES):
        checkpoint = {
            "state_dict": module_state(module, engine),
            "optimizer_states": [optimizer_state(optimizer, engine, "optimizer 0")],
        }
        Saver(engine.comm).save(checkpoint, path, Provenance(3, WORLD, "32-true"), kind=kind)
    total = sum(piece.double().sum().item() for piece in engine.pieces)
    engine.close(restore=False)
    return total


def load_under_limit(path: str, mapped_bytes: int) -> list[float]:
    module, optimizer, engine = sharded()
    own_states = 2 * WEIGHT_BYTES // WORLD
    with limited_to(mapped_bytes + own_states + BUFFER_BYTES):
        checkpoint: Any = load(path, engine.comm)
        load_module_state(module, engine, checkpoint["state_dict"])
        load_optimizer_state(optimizer, checkpoint["optimizer_states"][0])
        del checkpoint
    totals = [sum(piece.double().sum().item() for piece in engine.pieces)]
    with torch.no_grad():
        for piece in engine.pieces:
            piece.zero_()
    with limited_to(mapped_bytes + BUFFER_BYTES):
        load_weights(module, path)
    totals.append(sum(piece.double().sum().item() for piece in engine.pieces))
    engine.close(restore=False)
    return totals


# A mapped file counts as data though it takes no memory; a directory is not mapped.
@pytest.mark.parametrize(("kind", "mapped_bytes"), [(Save, FILE_BYTES), (DirectorySave, 0)])
def test_saving_and_loading_take_one_buffer(
    ranks: Pools, tmp_path: Path, kind: type[Any], mapped_bytes: int
) -> None:
    path = tmp_path / "file.ckpt"
    saved = ranks(WORLD).run(save_under_limit, str(path), kind)
    nbytes = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))
    assert FILE_BYTES < nbytes < FILE_BYTES + 2**20
    loaded = ranks(WORLD).run(load_under_limit, str(path), mapped_bytes)
    for total, found in zip(saved, loaded, strict=True):
        assert found == [pytest.approx(total), pytest.approx(total)]
        assert total != 0
