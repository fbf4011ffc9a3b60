"""Estimates without a run: their size, arguments and modules.

Bytes between steps are compared with those of runs in `tests/oracle/play.py`, and peaks in
`test_walk.py` and `tests/engine/test_device_paths.py`.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_zero import ZeROStrategy
from lightning_zero.memory import ModelPlan, estimate
from lightning_zero.plan import Settings
from tests.oracle.launch import run_python
from tests.oracle.models import MODELS


def test_a_hundred_billion_parameters_on_meta() -> None:
    """In seconds, and in less than 1 GB, with Python and torch in it."""
    script = """
import torch
from pathlib import Path
from torch import nn
from lightning_zero.memory import estimate
from lightning_zero.plan import Settings
width = 12288
def build():
    return nn.Sequential(*[
        nn.TransformerEncoderLayer(width, 96, 4 * width, dropout=0.0, batch_first=True)
        for _ in range(55)
    ])
found = estimate(
    build, Settings(activation_checkpointing=True), world_size=512, precision="bf16-mixed",
    batch=torch.empty(1, 128, width),
)
assert found.num_parameters > 99e9, found.num_parameters
assert found.model_states < 16.01 * found.num_parameters / 512
assert found.most["activations"] > 0
# Not `getrusage`, whose maximum includes the process that started this one.
lines = Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""
    assert int(run_python(["-c", script]).stdout) * 1024 < 10**9


def test_gradients_of_ddp_live_as_long_as_they_are_shown() -> None:
    """Until the Trainer drops them before a backward; all the time if microbatches add to them."""
    case = MODELS["transformer"]
    optimizer = torch.optim.AdamW
    model = ModelPlan(
        case.build(), optimizer=optimizer, batch=case.batch(4, 0), step=case.loss,
        device=torch.device("cpu"),
    )  # fmt: skip
    once, added = (model.estimate(0, 2, num_microbatches=number) for number in (1, 4))
    whole = once.resting["gradients"]
    assert {m.kinds["gradients"] for m in once.snapshots if m.phase == "forward"} == {whole}
    first = next(m for m in once.snapshots if m.phase == "backward")
    assert first.kinds["gradients"] == 0
    assert {moment.kinds["gradients"] for moment in added.snapshots} == {whole}
    assert added.peak.total > once.peak.total


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 0}, "Expected world_size >= 1, got 0."),
        ({"strategy": "zero4"}, "Expected a strategy among zero1, zero2, zero3, zero2_offload"),
        ({"precision": "8-bit"}, "Expected a precision among"),
        ({"optimizer": "adamm"}, "Expected an optimizer of torch.optim (adadelta, "),
        ({"optimizer": "lbfgs"}, "The size of LBFGS's state cannot be predicted"),
        ({"rank": 2, "world_size": 2}, "Expected a rank from 0 to 1, got 2."),
        (
            {"strategy": Settings(activation_offload=True), "batch": torch.zeros(1)},
            "Activations are not counted with activation_offload=True. Remove it",
        ),
        ({"batch": {"wrong": torch.zeros(1)}}, "Tied does not run on tensors without data"),
    ],
)
def test_a_bad_argument_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        estimate(MODELS["tied"].build(), **change)


def test_a_strategy_is_its_name_or_itself() -> None:
    found = estimate(10**6, ZeROStrategy(2, offload_optimizer="cpu"), world_size=2)
    assert found == estimate(10**6, "zero2_offload", world_size=2)
    assert found == estimate(10**6, "zero2_offload_spawn", world_size=2)
    with pytest.raises(TypeError, match="Expected a strategy's name or a ZeROStrategy, got 3"):
        estimate(10**6, 3)  # type: ignore[arg-type]


class Unusual(LightningModule):
    """Has attributes that cannot be copied, and others that a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.lock = threading.Lock()
        self.file = Path(__file__).open()  # noqa: SIM115
        self.numbers = (number for number in range(3))
        self.seen: list[Tensor] = []
        self.by_name = {"net": self.net}
        self.act = self.double

    def double(self, x: Tensor) -> Tensor:
        return 2 * self.by_name["net"](x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with self.lock:
            self.seen.append(batch)
            return self.act(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_module_with_attributes_that_cannot_be_copied() -> None:
    module = Unusual()
    found = estimate(module, batch=torch.ones(2, 4))
    assert found.most["activations"] > 0
    assert found.resting["weights"] > 0
    assert module.seen == []
    assert next(module.numbers) == 0
    assert not any(p.is_meta or p.grad is not None for p in module.parameters())
    module.file.close()
