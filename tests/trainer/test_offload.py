"""``zero3_nvme`` and its arguments under a Trainer: numbers and checkpoints are those of zero3."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor

from lightning_zero import MemoryMonitor, ZeROStrategy
from tests.oracle.by_trainer import Model, Rows, Stop, make_trainer, world
from tests.oracle.device import beside_the_host
from tests.oracle.messages import messages
from tests.oracle.ranks import Pools

STEPS = 6


class Fused(Model):
    """As offload steps by itself, with states of which every file has some."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, fused=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.net(batch[0]).detach().clone()  # type: ignore[no-any-return]


def fit(name: Any, folder: str, *callbacks: Any, path: str | None = None, **more: Any) -> Fused:
    torch.manual_seed(0)
    module = Fused()
    options = {"enable_checkpointing": False, "gradient_clip_val": 0.5, "max_steps": STEPS, **more}
    trainer = make_trainer(world(), name, folder, callbacks=list(callbacks), **options)
    trainer.fit(module, Rows(), ckpt_path=path)
    return module


def resumed_all_ways(folder: str, precision: str) -> None:
    whole = fit("zero3", folder, precision=precision).state_dict()
    for saved, going_on in (("zero3", "zero3_nvme"), ("zero3_nvme", "zero3"), ("zero3_nvme",) * 2):
        path = f"{folder}/{saved}-{going_on}.ckpt"
        found = fit(saved, folder, Stop(path, 3), precision=precision).state_dict()
        assert all(torch.equal(value, whole[key]) for key, value in found.items())
        found = fit(going_on, folder, path=path, precision=precision).state_dict()
        assert all(torch.equal(value, whole[key]) for key, value in found.items())


@pytest.mark.parametrize(("num_ranks", "precision"), [(1, "32-true"), (2, "bf16-mixed")])
def test_resumed_with_and_without_files(
    ranks: Pools, tmp_path: Path, num_ranks: int, precision: str
) -> None:
    ranks(num_ranks).run(resumed_all_ways, str(tmp_path), precision)


def reported(folder: str, stage: int) -> tuple[dict[str, int], str]:
    monitor = MemoryMonitor(report=f"{folder}/report")
    strategy = ZeROStrategy(
        stage,
        offload_optimizer="nvme",
        offload_weights="nvme" if stage == 3 else None,
        offload_path=f"{folder}/files",
    )
    module = fit(strategy, folder, monitor, precision="bf16-mixed")
    read = module.trainer.strategy.traffic["optimizer", "read"]
    times = module.trainer.strategy.step_times
    assert read.bytes > 0
    assert 0 < times.waiting < times.stepping < times.seconds
    assert monitor.times.bytes_read == (STEPS - 1) * read.bytes
    return monitor.measured["step"], monitor.text(world())


def test_the_monitor_shows_files_and_times(ranks: Pools, tmp_path: Path) -> None:
    for stage in (2, 3):
        measured, text = ranks(2).run(reported, str(tmp_path), stage)[0]
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
    files = {"offload_optimizer": "nvme", "offload_weights": "nvme"}
    assert ranks(1).run(torn, str(tmp_path), files) == [([], False)]
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


@pytest.mark.parametrize("name", ["zero2_offload", "zero3_offload", "states alone"])
def test_states_on_the_host(ranks: Pools, tmp_path: Path, name: str) -> None:
    for held in ranks(2).run(on_host, str(tmp_path), name, "bf16-mixed"):
        assert held["states"] == held["master"] == 0
        assert held["host states"] > 0
        assert held["host master"] > 0


HOSTED: dict[str, Any] = {
    "zero2_offload": "zero2_offload",
    "zero3_offload": "zero3_offload",
    "zero1 by argument": {"stage": 1, "offload_optimizer": "cpu"},
    "states alone by argument": {"stage": 3, "offload_optimizer": "cpu"},
    "zero3 by argument": {"stage": 3, "offload_optimizer": "cpu", "offload_weights": "cpu"},
    "DeepSpeed's stage 2": {
        "config": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    },
    "DeepSpeed's stage 3": {
        "config": {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            }
        }
    },
}


def on_a_laptop(folder: str) -> None:
    expected = fit("ddp", folder)
    for name, given in HOSTED.items():
        strategy = given if isinstance(given, str) else ZeROStrategy(**given)
        path = f"{folder}/{name}.ckpt"
        with messages() as said:
            found = fit(strategy, folder, Stop(path, 3))
        assert "".join(said).count("the device is the host, so nothing moves") == (
            os.environ["RANK"] == "0"
        )
        strategy = given if isinstance(given, str) else ZeROStrategy(**given)
        resumed = fit(strategy, folder, path=path)
        for module in (found, resumed):
            for key, value in module.state_dict().items():
                torch.testing.assert_close(value, expected.state_dict()[key], msg=name)


def test_a_host_without_a_device_moves_nothing(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(on_a_laptop, str(tmp_path))
