"""Offload is predicted by the plan's terms: where each kind rests, and what lies on its way."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from lightning_zero import estimate
from lightning_zero.memory import (
    ModelPlan,
    Offload,
    compare,
    named_offloads,
)
from lightning_zero.plan import Settings

P, N = 10**9, 8


def total(kinds: dict[str, int]) -> float:
    """Bytes for each parameter."""
    return sum(kinds.values()) / P


CPU, NVME, BOTH = Offload("cpu"), Offload("nvme"), Offload("cpu", "cpu")


@pytest.mark.parametrize(
    ("stage", "offload", "precision", "device", "held", "host", "disk"),
    [
        # 2 or 4 of weights; 4 + 4 + 8 of gradients, masters and Adam's states.
        (1, CPU, "bf16-mixed", "cuda", 2, 16 / N, 0),
        # Weights that come up often are cast once.
        (3, BOTH, "bf16-mixed", "cuda", 0, 18 / N, 0),
        (3, BOTH, "bf16-mixed", "cpu", 0, 18 / N, 0),  # the device is assumed to be an accelerator
        (3, Offload("nvme", "nvme"), "bf16-mixed", "cuda", 0, 4 / N, 12 / N),
        # A sharded fp32 weight is its own master; a replicated one on the device cannot be.
        (2, CPU, "32-true", "cuda", 4, 16 / N, 0),
        (3, BOTH, "32-true", "cuda", 0, 16 / N, 0),
        (2, NVME, "bf16-true", "cuda", 2, 2 / N, 6 / N),
        # Files of a CPU are mapped. Gradients stay, as do whole weights.
        (1, NVME, "32-true", "cpu", 4 + 4 / N, 0, 12 / N),
        (2, NVME, "bf16-mixed", "cpu", 2 + 4 / N, 0, 12 / N),
        (3, Offload("nvme", "nvme"), "32-true", "cpu", 4 / N, 0, 12 / N),
        # In part.
        (3, NVME, "bf16-mixed", "cpu", 8 / N, 0, 8 / N),
        (3, Offload(weights="nvme"), "bf16-mixed", "cpu", 12 / N, 0, 4 / N),
    ],
)
def test_what_rests_where(
    stage: int,
    offload: Offload,
    precision: str,
    device: str,
    held: float,
    host: float,
    disk: float,
) -> None:
    settings = Settings(stage, offload=offload)
    found = estimate(P, settings, world_size=N, precision=precision, device=device)
    actual = (found.model_states / P, total(found.host), total(found.disk))
    assert actual == pytest.approx((held, host, disk), rel=1e-6)
    assert found.host_peak == (sum(found.host.values()) if host else found.peak.total)


def test_a_bad_offload_is_named() -> None:
    for change, message in (
        ({"offload": Offload(weights="nvme")}, "weights rest beside their masters"),
        ({"offload": BOTH, "stage": 2}, "stage=2 keeps whole weights"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            estimate(P, Settings(**change), device="cuda")  # type: ignore[arg-type]
    subject = ModelPlan(P, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"got stage=0 \(DDP\) and Offload\(optimizer='cpu'"):
        subject.estimate(0, 1, offload="cpu")
    with pytest.raises(ValueError, match="Expected offload_optimizer='cpu', 'nvme' or None, got"):
        subject.estimate(3, 1, offload="ram")


def test_columns_have_the_strategies_names() -> None:
    subject = ModelPlan(P, device=torch.device("cpu"))
    names = [
        one.name for one in compare(subject, (3,), [2], offloads=named_offloads("cpu", "nvme"))
    ]
    assert names == ["zero3", "zero2_offload", "zero3_offload", "zero3_nvme"]
    assert estimate(P, Settings(offload=Offload("nvme"))).name == "zero3, optimizer on nvme"


def test_what_does_not_step_unit_by_unit_is_refused() -> None:
    subject = ModelPlan(
        lambda: nn.Linear(64, 40), optimizer="adafactor", device=torch.device("cuda")
    )
    for medium in ("cpu", "nvme"):
        with pytest.raises(ValueError, match=r"Adafactor .*numbers when it steps unit by unit"):
            subject.estimate(3, 2, offload=medium)
