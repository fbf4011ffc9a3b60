"""Offload under a Trainer: what a monitor shows, torn steps, and a device beside its host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_zero import MemoryMonitor, ZeROStrategy
from tests.oracle.by_trainer import Model, Rows, Stop, make_trainer, world
from tests.oracle.device import beside_the_host
from tests.oracle.messages import messages
from tests.oracle.ranks import Pools

STEPS = 6
FILES: dict[str, Any] = {"offload_optimizer": "nvme", "offload_weights": "nvme"}


class Fused(Model):
    """As offload steps by itself, with states of which every file has some."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, fused=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(name: Any, folder: str, *callbacks: Any, path: str | None = None, **more: Any) -> Fused:
    torch.manual_seed(0)
    module = Fused()
    options = {"enable_checkpointing": False, "gradient_clip_val": 0.5, "max_steps": STEPS, **more}
    trainer = make_trainer(world(), name, folder, callbacks=list(callbacks), **options)
    trainer.fit(module, Rows(), ckpt_path=path)
    return module


def reported(folder: str) -> tuple[dict[str, int], str]:
    monitor = MemoryMonitor(report=f"{folder}/report")
    strategy = ZeROStrategy(3, **FILES, offload_path=f"{folder}/files")
    module = fit(strategy, folder, monitor, precision="bf16-mixed")
    read = module.trainer.strategy.traffic["optimizer", "read"]
    times = module.trainer.strategy.step_times
    assert read.bytes > 0
    assert 0 < times.waiting < times.stepping < times.seconds
    assert monitor.times.bytes_read == (STEPS - 1) * read.bytes
    return monitor.measured["step"], monitor.text(world())


def test_the_monitor_shows_files_and_times(ranks: Pools, tmp_path: Path) -> None:
    measured, text = ranks(2).run(reported, str(tmp_path))[0]
    assert measured["states"] == measured["master"] == 0
    assert measured["disk states"] > 0
    assert measured["disk master"] > 0
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

    strategy = ZeROStrategy(units={torch.nn.Linear, torch.nn.Embedding}, **files)
    torch._fused_adamw_ = fail
    try:
        with pytest.raises((Torn, RuntimeError)):
            fit(
                strategy,
                folder,
                OnExceptionCheckpoint(folder),
                enable_checkpointing=True,
            )
    finally:
        torch._fused_adamw_ = kernel
    assert next(calls) == 2
    assert strategy.engine is not None
    names = [path.name for path in Path(folder).glob("**/*.ckpt")]
    return names, strategy.engine.is_restored


def test_a_torn_step_is_neither_saved_for_its_exception_nor_made_whole(
    ranks: Pools, tmp_path: Path
) -> None:
    assert ranks(1).run(torn, str(tmp_path), FILES) == [([], False)]
    assert ranks(1).run(torn, str(tmp_path), {}) == [(["on_exception.ckpt"], True)]


# ---------------------------------------------------------------------------- host memory


def on_host(folder: str, name: str, precision: str) -> dict[str, int]:
    """Resumes beside a host from a run without, and the other way round."""
    stage = "zero2" if "2" in name else "zero3"

    def offloaded() -> Any:
        return ZeROStrategy(3, offload_optimizer="cpu") if name == "states alone" else name

    whole = fit(stage, folder, precision=precision).state_dict()
    monitor = MemoryMonitor()
    with beside_the_host(followed=False):
        stop = Stop(f"{folder}/host.ckpt", 3)
        fit(offloaded(), folder, stop, precision=precision)
    found = fit(stage, folder, Stop(f"{folder}/device.ckpt", 3), precision=precision)
    found = fit(stage, folder, path=f"{folder}/host.ckpt", precision=precision).state_dict()
    assert all(torch.equal(value, whole[key]) for key, value in found.items())
    with beside_the_host(followed=False):
        path = f"{folder}/device.ckpt"
        found = fit(offloaded(), folder, monitor, path=path, precision=precision).state_dict()
    assert all(torch.equal(value, whole[key]) for key, value in found.items())
    return monitor.measured["step"]


@pytest.mark.parametrize("name", ["zero2_offload", "states alone"])
def test_states_on_the_host(ranks: Pools, tmp_path: Path, name: str) -> None:
    for held in ranks(2).run(on_host, str(tmp_path), name, "bf16-mixed"):
        assert held["states"] == held["master"] == 0
        assert held["host states"] > 0
        assert held["host master"] > 0


def on_a_laptop(folder: str) -> int:
    with messages() as said:
        fit(ZeROStrategy(3, offload_optimizer="cpu", offload_weights="cpu"), folder)
    return "".join(said).count("the device is the host, so nothing moves")


def test_a_host_without_a_device_moves_nothing(ranks: Pools, tmp_path: Path) -> None:
    """Rank 0 says so; the numbers are those of `tests/cases/loops.py`."""
    assert ranks(2).run(on_a_laptop, str(tmp_path)) == [1, 0]
