"""Offload under a Trainer: files, what a monitor shows, torn steps, a device beside its host."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn

from lightning_zero import MemoryMonitor, ZeROStrategy, estimate
from lightning_zero.checkpoint import write_safetensors
from tests.cases import scheduled, user
from tests.oracle.by_trainer import Model, Rows, Stop, make_trainer
from tests.oracle.device import Device, beside_the_host
from tests.oracle.messages import messages
from tests.oracle.ranks import Pools

STEPS = 6
FILES: dict[str, Any] = {"offload_optimizer": "nvme", "offload_weights": "nvme"}


def fused(module: Model) -> Any:
    """As offload steps by itself, with states of which every file has some."""
    return scheduled(torch.optim.AdamW(module.parameters(), lr=0.02, fused=True))


Fused = user(Model, configure_optimizers=fused)


def fit(name: Any, folder: str, *callbacks: Any, path: str | None = None, **more: Any) -> Any:
    torch.manual_seed(0)
    module = Fused()
    options = {"enable_checkpointing": False, "gradient_clip_val": 0.5, "max_steps": STEPS, **more}
    trainer = make_trainer(name, folder, callbacks=list(callbacks), **options)
    trainer.fit(module, Rows(), ckpt_path=path)
    return module


def reported(folder: str) -> tuple[dict[str, int], str]:
    monitor = MemoryMonitor(report=f"{folder}/report")
    strategy = ZeROStrategy(3, **FILES, offload_path=f"{folder}/files")
    fit(strategy, folder, monitor, precision="bf16-mixed")
    read, times = strategy.traffic["optimizer", "read"], strategy.step_times
    assert read.bytes > 0
    assert 0 < times.waiting < times.stepping < times.seconds
    assert monitor.times.bytes_read == (STEPS - 1) * read.bytes
    return monitor.measured["step"], monitor.text(dist.get_world_size())


def test_the_monitor_shows_files_and_times(ranks: Pools, tmp_path: Path) -> None:
    measured, text = ranks(2).run(reported, str(tmp_path))[0]
    assert measured["states"] == measured["master"] == 0
    assert min(measured["disk states"], measured["disk master"]) > 0
    assert "disk states" in text
    assert "of the time was spent in optimizer steps on the host" in text
    facts = json.loads((tmp_path / "report" / "memory.json").read_text())
    assert facts["times"]["bytes_read"] > 0


class Torn(Exception):
    pass


def torn(folder: str, files: dict[str, Any]) -> tuple[list[str], bool]:
    """The checkpoints that are left by a step that fails, and whether the module is whole."""
    kernel = torch._fused_adamw_
    calls = iter(range(100))

    def fail(*args: Any, **kwargs: Any) -> None:
        # Not in the trial of the optimizer, whose toys are small.
        if sum(one.numel() for one in args[0]) > 30 and next(calls) == 1:
            raise Torn
        kernel(*args, **kwargs)

    strategy = ZeROStrategy(units={nn.Linear, nn.Embedding}, **files)
    keeper = OnExceptionCheckpoint(folder)
    with mock.patch.object(torch, "_fused_adamw_", fail), pytest.raises((Torn, RuntimeError)):
        fit(strategy, folder, keeper, enable_checkpointing=True)
    assert next(calls) == 2
    assert strategy.engine is not None
    names = [path.name for path in Path(folder).glob("**/*.ckpt")]
    return names, strategy.engine.is_restored


def test_a_torn_step_is_neither_saved_for_its_exception_nor_made_whole(
    ranks: Pools, tmp_path: Path
) -> None:
    assert ranks(1).run(torn, str(tmp_path), FILES) == [([], False)]
    assert ranks(1).run(torn, str(tmp_path), {}) == [(["on_exception.ckpt"], True)]


def on_host(folder: str, name: str) -> dict[str, int]:
    """Resumes beside a host from a run without, and the other way round; bytes are as estimated."""
    stage = "zero2" if "2" in name else "zero3"

    def chosen() -> Any:
        return ZeROStrategy(3, offload_optimizer="cpu") if name == "states alone" else name

    def offloaded(*callbacks: Any, **more: Any) -> dict[str, Tensor]:
        strategy = chosen()
        with beside_the_host(followed=False):
            return fit(strategy, folder, *callbacks, precision="bf16-mixed", **more).state_dict()

    def plain(*callbacks: Any, **more: Any) -> dict[str, Tensor]:
        return fit(stage, folder, *callbacks, precision="bf16-mixed", **more).state_dict()

    monitor = MemoryMonitor()
    whole = plain(Stop(f"{folder}/device.ckpt", 3))
    offloaded(Stop(f"{folder}/host.ckpt", 3))
    found = plain(path=f"{folder}/host.ckpt"), offloaded(monitor, path=f"{folder}/device.ckpt")
    for state in found:
        assert all(torch.equal(value, whole[key]) for key, value in state.items())
    held = monitor.measured["step"]
    how: dict[str, Any] = {"world_size": dist.get_world_size(), "precision": "bf16-mixed"}
    found = [
        estimate(Fused(), chosen(), rank=rank, **how).rests for rank in range(dist.get_world_size())
    ]
    for kind in found[0]:
        assert held.get(kind, 0) == max(one[kind] for one in found), kind
    return held


@pytest.mark.parametrize("name", ["zero2_offload", "states alone"])
def test_states_on_the_host(ranks: Pools, tmp_path: Path, name: str) -> None:
    for held in ranks(2).run(on_host, str(tmp_path), name):
        assert held["states"] == held["master"] == 0
        assert min(held["host states"], held["host master"]) > 0


def on_a_laptop(folder: str) -> int:
    with messages() as said:
        fit(ZeROStrategy(3, offload_optimizer="cpu", offload_weights="cpu"), folder)
    return "".join(said).count("the device is the host, so nothing moves")


def test_a_host_without_a_device_moves_nothing(ranks: Pools, tmp_path: Path) -> None:
    """Rank 0 says so; the numbers are those of `tests/cases/loops.py`."""
    assert ranks(2).run(on_a_laptop, str(tmp_path)) == [1, 0]


# ---------------------------------------------------------------------------- predictions

WIDTH, DEPTH = 640, 3
"""A layer has 1.6 MB."""


def layers() -> nn.Sequential:
    blocks = [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)
    ]
    return nn.Sequential(*blocks, nn.BatchNorm1d(WIDTH))


class Net(LightningModule):
    """Predicts with weights that it has on meta before they are read from a checkpoint."""

    def __init__(self, *, is_meta: bool = True) -> None:
        super().__init__()
        self.is_meta = is_meta
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta" if self.is_meta else "cpu"):
                self.net = layers()

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.net(batch[0]).detach().clone()

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val", self.net(batch[0]).square().mean())


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


def as_lightning(folder: Path) -> str:
    """A Trainer's file without checksums of blocks, as DDP writes it."""
    content = {"state_dict": state(), "pytorch-lightning_version": "2.5.0", "epoch": 1}
    torch.save({**content, "global_step": 3}, folder / "ddp.ckpt")
    return str(folder / "ddp.ckpt")


def as_safetensors(folder: Path, max_bytes: int | None = None) -> str:
    path = folder / ("sharded" if max_bytes else "one.safetensors")
    write_safetensors(path, state(torch.bfloat16), max_bytes=max_bytes)
    return str(path)


def outputs(name: str, folder: str, path: str, module: Any = None, **more: Any) -> tuple[Any, Any]:
    """Return what a model gives for a checkpoint."""
    trainer = make_trainer(name, folder, **more)
    predicted = trainer.predict(module or Net(), Batches(), ckpt_path=path)
    rows = trainer.strategy.engine.sharded.memory()
    assert bool(rows.get("disk weights", 0) + rows.get("disk master", 0)) is (name == "zero3_nvme")
    return predicted, trainer.validate(Net(), Batches(), ckpt_path=path, verbose=False)


def same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> bool:
    return all(map(torch.equal, found[0], expected[0])) and found[1] == expected[1]


class Writer(Net):
    def on_validation_end(self) -> None:
        kind = self.trainer.strategy.settings.checkpoint
        self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/own.{kind}")


def compare(folder: str, layouts: dict[str, str]) -> None:
    """Also a file and a directory that these ranks write from what ``ddp.ckpt`` holds."""
    for form in ("file", "dcp"):
        trainer = make_trainer(ZeROStrategy(checkpoint=form), folder)  # type: ignore[arg-type]
        trainer.validate(Writer(), Batches(), ckpt_path=f"{folder}/ddp.ckpt", verbose=False)
    for path, precision in layouts.items():
        expected, found = (
            outputs(name, folder, path, precision=precision) for name in ("zero3", "zero3_nvme")
        )
        assert same(found, expected), (path, precision)


def test_weights_in_files_give_the_bits_of_memory(ranks: Pools, tmp_path: Path) -> None:
    layouts = {
        as_lightning(tmp_path): "bf16-mixed",
        as_safetensors(tmp_path): "32-true",
        as_safetensors(tmp_path, 2_000_000): "bf16-true",
        f"{tmp_path}/own.file": "32-true",
        f"{tmp_path}/own.dcp": "bf16-mixed",
    }
    ranks(2).run(compare, str(tmp_path), layouts)


class Counted(Net):
    """Notes what crosses in a prediction, and the most that the device has."""

    def __init__(self, memories: Device) -> None:
        super().__init__()
        self.memories = memories

    def on_predict_start(self) -> None:
        self.memories.restart()

    def on_predict_end(self) -> None:
        self.seen = dict(self.memories.crossed), self.memories.peak
        self.sharded = self.trainer.strategy.engine.sharded


def beside(folder: str, path: str, precision: str) -> None:
    expected = outputs("zero3", folder, path, precision=precision)
    with beside_the_host() as memories:
        model = Counted(memories)
        assert same(outputs("zero3_nvme", folder, path, model, precision=precision), expected)
    units, going_up = [], 0
    for unit in model.sharded.units:
        units.append(sum(flat.weight._nbytes for flat in unit.flat_parameters))
        for flat in unit.flat_parameters:
            going_up += flat.layout.shard_numel * flat.plan.weight.dtype.itemsize
    crossed, peak = model.seen
    assert crossed == {"up": len(Batches()) * going_up}
    # The root, a unit and the next one; small tensors of the batch and of the file.
    assert peak < units[-1] + 2 * max(units) + max(units) // 2


def test_a_device_gets_weights_from_threads_of_its_host(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(beside, str(tmp_path), as_lightning(tmp_path), "bf16-mixed")
    ranks(2).run(beside, str(tmp_path), as_safetensors(tmp_path, 2_000_000), "bf16-true")


class Editing(Net):
    def on_predict_start(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(2)
        self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/edited.ckpt")


def edited(folder: str, path: str) -> list[Tensor]:
    """Predict on the host; beside it nothing is followed: on a CPU an edit's copy down is none."""
    found: list[Tensor] = []
    for context in (contextlib.nullcontext(), beside_the_host(followed=False)):
        with context:
            trainer = make_trainer("zero3_nvme", folder)
            found += trainer.predict(Editing(), Batches(), ckpt_path=path)
    return found


def test_what_is_changed_rests_in_files_from_then_on(ranks: Pools, tmp_path: Path) -> None:
    net = layers().eval()
    net.load_state_dict({key.removeprefix("net."): value for key, value in state().items()})
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
        expected = [net(batch) for [batch] in Batches()]
    for found in ranks(2).run(edited, str(tmp_path), as_lightning(tmp_path)):
        assert all(map(torch.allclose, found, 2 * expected))
    saved = torch.load(tmp_path / "edited.ckpt")["state_dict"]
    for key, value in net.state_dict().items():
        assert torch.equal(saved[f"net.{key}"], value)


class Again(Net):
    """One parameter is not contiguous; hooks read weights, and save them after each run."""

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            self.net[0][1].weight = nn.Parameter(self.net[0][1].weight.detach().t())

    def on_predict_batch_end(self, *_: Any) -> None:
        held = state()
        for name, parameter in self.named_parameters():
            assert torch.equal(parameter, held[name]), name

    def on_predict_end(self) -> None:
        self.strides = [parameter.stride() for parameter in self.parameters()]
        self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/again.ckpt")


def again(folder: str, path: str, *, is_meta: bool) -> None:
    model = Again(is_meta=is_meta)
    trainer = make_trainer("zero3_nvme", folder, precision="bf16-mixed")
    first = trainer.predict(model, Batches(), ckpt_path=path)
    strides = model.strides
    second = trainer.predict(model, Batches(), ckpt_path=path)
    assert all(map(torch.equal, second, first))
    assert model.strides == strides
    saved = torch.load(f"{folder}/again.ckpt")["state_dict"]
    assert all(torch.equal(saved[key], value) for key, value in state().items())
    if not is_meta:  # there is memory for what came with values
        assert trainer.strategy.engine.is_restored
        assert all(torch.equal(value, state()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("is_meta", [False, True])
def test_hooks_and_another_run_read_all_digits(ranks: Pools, tmp_path: Path, is_meta: bool) -> None:
    """It computes in half precision."""
    ranks(1).run(again, str(tmp_path), as_lightning(tmp_path), is_meta=is_meta)
