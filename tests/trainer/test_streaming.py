"""``predict(ckpt_path=...)`` with weights in files, from where they are read unit by unit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_zero import ZeROStrategy
from lightning_zero.checkpoint import write_safetensors
from tests.oracle.by_trainer import make_trainer, world
from tests.oracle.device import Device, beside_the_host
from tests.oracle.ranks import Pools

WIDTH, DEPTH = 640, 3
"""A layer has 1.6 MB."""


def layers() -> nn.Sequential:
    return nn.Sequential(
        *[
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
            for _ in range(DEPTH)
        ],
        nn.BatchNorm1d(WIDTH),
    )


class Net(LightningModule):
    def __init__(self, *, is_meta: bool = True) -> None:
        super().__init__()
        self.is_meta = is_meta
        self.net: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta" if self.is_meta else "cpu"):
                self.net = layers()

    def forward(self, x: Tensor) -> Tensor:
        assert self.net is not None
        return self.net(x)  # type: ignore[no-any-return]

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self(batch[0]).detach().clone()  # type: ignore[no-any-return]

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val", self(batch[0]).square().mean())

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.validation_step(batch, index)


class Batches:
    """The same for all ranks."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[Tensor]]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(len(self)):
            yield [torch.randn(4, WIDTH, generator=generator)]


def state(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(7)
    net = layers()
    with torch.no_grad():
        net(torch.randn(8, WIDTH))  # statistics of its own
    found = {f"net.{key}": value for key, value in net.state_dict().items()}
    return {
        key: value.to(dtype) if value.is_floating_point() and value.dim() else value
        for key, value in found.items()
    }


def as_lightning(folder: Path) -> Path:
    """A Trainer's file without checksums of blocks, as DDP writes it."""
    content = {"state_dict": state(), "pytorch-lightning_version": "2.5.0", "epoch": 1}
    torch.save({**content, "global_step": 3}, folder / "ddp.ckpt")
    return folder / "ddp.ckpt"


def as_safetensors(folder: Path, max_bytes: int | None = None) -> Path:
    path = folder / ("sharded" if max_bytes else "one.safetensors")
    write_safetensors(path, state(torch.bfloat16), max_bytes=max_bytes)
    return path


def outputs(name: str, folder: str, path: str, **more: Any) -> tuple[Any, ...]:
    """Return what a model gives for a checkpoint."""
    trainer = make_trainer(world(), name, folder, **more)
    model = Net()
    predicted = trainer.predict(model, Batches(), ckpt_path=path)
    rows = trainer.strategy.engine.sharded.memory()
    assert bool(rows.get("disk weights", 0) + rows.get("disk master", 0)) is (name == "zero3_nvme")
    return predicted, trainer.validate(model, Batches(), ckpt_path=path, verbose=False)


class Writer(Net):
    def on_validation_end(self) -> None:
        kind = self.trainer.strategy.settings.checkpoint
        self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/own.{kind}")


def written(folder: str) -> None:
    """A file and a directory, written by these ranks from what ``ddp.ckpt`` holds."""
    for form in ("file", "dcp"):
        trainer = make_trainer(world(), ZeROStrategy(checkpoint=form), folder)  # type: ignore[arg-type]
        trainer.validate(Writer(), Batches(), ckpt_path=f"{folder}/ddp.ckpt", verbose=False)


def compare(folder: str, layouts: dict[str, str]) -> None:
    for path, precision in layouts.items():
        expected = outputs("zero3", folder, path, precision=precision)
        found = outputs("zero3_nvme", folder, path, precision=precision)
        assert all(map(torch.equal, found[0], expected[0])), (path, precision)
        assert found[1] == expected[1]


def test_the_bits_are_those_of_memory(ranks: Pools, tmp_path: Path) -> None:
    layouts = {
        str(as_lightning(tmp_path)): "bf16-mixed",
        str(as_safetensors(tmp_path)): "32-true",
        str(as_safetensors(tmp_path, 2_000_000)): "bf16-true",
        f"{tmp_path}/own.file": "32-true",
        f"{tmp_path}/own.dcp": "bf16-mixed",
    }
    ranks(2).run(written, str(tmp_path))
    ranks(2).run(compare, str(tmp_path), layouts)


class Restored(Net):
    """Compares its weights with those of the file between batches, where each rank may look."""

    def on_predict_batch_end(self, *_: Any) -> None:
        held = state()
        for name, parameter in self.named_parameters():
            assert torch.equal(parameter, held[name]), name


def read_in_hooks(folder: str, path: str) -> None:
    model = Restored(is_meta=False)
    trainer = make_trainer(world(), "zero3_nvme", folder)
    trainer.predict(model, Batches(), ckpt_path=path)
    engine = trainer.strategy.engine
    assert engine.is_restored  # it came with values, so there is memory for them
    assert all(torch.equal(value, state()[key]) for key, value in model.state_dict().items())


def test_weights_are_read_in_hooks_and_whole_at_the_end(ranks: Pools, tmp_path: Path) -> None:
    ranks(1).run(read_in_hooks, str(tmp_path), str(as_lightning(tmp_path)))


# ---------------------------------------------------------------------------- beside a device


class Counted(Net):
    """Notes what crosses in a prediction, and the most that the device has."""

    def __init__(self, memories: Device) -> None:
        super().__init__()
        self.memories = memories

    def on_predict_start(self) -> None:
        self.memories.restart()

    def on_predict_end(self) -> None:
        self.seen = dict(self.memories.crossed), self.memories.peak


def beside(folder: str, path: str, precision: str) -> None:
    expected = outputs("zero3", folder, path, precision=precision)
    with beside_the_host() as memories:
        model = Counted(memories)
        trainer = make_trainer(world(), "zero3_nvme", folder, precision=precision)
        found = trainer.predict(model, Batches(), ckpt_path=path)
        sharded = trainer.strategy.engine.sharded
        losses = trainer.validate(Net(), Batches(), ckpt_path=path, verbose=False)
    assert all(map(torch.equal, found, expected[0]))
    assert losses == expected[1]
    units, going_up = [], 0
    for unit in sharded.units:
        units.append(sum(flat.weight._nbytes for flat in unit.flat_parameters))
        for flat in unit.flat_parameters:
            going_up += flat.layout.shard_numel * flat.plan.weight.dtype.itemsize
    crossed, peak = model.seen
    assert crossed == {"up": len(Batches()) * going_up}
    # The root, a unit and the next one; small tensors of the batch and of the file.
    assert peak < units[-1] + 2 * max(units) + max(units) // 2


def test_a_device_gets_it_from_threads_of_its_host(ranks: Pools, tmp_path: Path) -> None:
    folder = str(tmp_path)
    ranks(2).run(beside, folder, str(as_lightning(tmp_path)), "bf16-mixed")
    ranks(2).run(beside, folder, str(as_safetensors(tmp_path, 2_000_000)), "bf16-true")


# ---------------------------------------------------------------------------- changes, damage


class Editing(Net):
    def on_predict_start(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(2)
        self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/edited.ckpt")


def edited(folder: str, path: str, is_beside: bool) -> list[Tensor]:
    trainer = make_trainer(world(), "zero3_nvme", folder)
    # Nothing is followed: on a CPU an edit's copy to the host is none.
    with beside_the_host(followed=False) if is_beside else contextlib.nullcontext():
        return trainer.predict(Editing(), Batches(), ckpt_path=path)  # type: ignore[return-value]


@pytest.mark.parametrize("is_beside", [False, True])
def test_what_is_changed_rests_in_files_from_then_on(
    ranks: Pools, tmp_path: Path, is_beside: bool
) -> None:
    path = as_lightning(tmp_path)
    net = layers().eval()
    net.load_state_dict({key.removeprefix("net."): value for key, value in state().items()})
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
        expected = [net(batch) for [batch] in Batches()]
    for found in ranks(2).run(edited, str(tmp_path), str(path), is_beside):
        assert all(map(torch.allclose, found, expected))
    saved = torch.load(tmp_path / "edited.ckpt")["state_dict"]
    for key, value in net.state_dict().items():
        assert torch.equal(saved[f"net.{key}"], value)


class Again(Net):
    """One parameter is not contiguous; it is saved after each run."""

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            self.net[0][1].weight = nn.Parameter(self.net[0][1].weight.detach().t())

    def on_predict_end(self) -> None:
        self.strides = [parameter.stride() for parameter in self.parameters()]
        self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/again.ckpt")


def again(folder: str, path: str) -> None:
    model = Again()
    trainer = make_trainer(world(), "zero3_nvme", folder, precision="bf16-mixed")
    first = trainer.predict(model, Batches(), ckpt_path=path)
    strides = model.strides
    second = trainer.predict(model, Batches(), ckpt_path=path)
    assert all(map(torch.equal, second, first))
    assert model.strides == strides
    saved = torch.load(f"{folder}/again.ckpt")["state_dict"]
    assert all(torch.equal(saved[key], value) for key, value in state().items())


def test_a_module_that_was_left_at_rest_has_all_digits_in_another_run(
    ranks: Pools, tmp_path: Path
) -> None:
    """It computed in half precision."""
    ranks(1).run(again, str(tmp_path), str(as_lightning(tmp_path)))
