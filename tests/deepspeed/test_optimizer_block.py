"""Optimizers and schedulers that a DeepSpeed configuration asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim
from torch.nn import Parameter

from lightning_zero import ZeROStrategy
from lightning_zero.deepspeed import Config, SchedulerBlock

# ---------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize(
    ("name", "params", "kind", "options"),
    [
        ("Adam", {"lr": 0.1}, optim.AdamW, {"lr": 0.1, "weight_decay": 0.0}),
        ("adam", {"adam_w_mode": False}, optim.Adam, {"lr": 0.001, "weight_decay": 0.0}),
        ("AdamW", {"betas": [0.8, 0.9]}, optim.AdamW, {"betas": (0.8, 0.9), "weight_decay": 0.0}),
        ("AdamW", {"adam_w_mode": False, "weight_decay": 0.1}, optim.AdamW, {"weight_decay": 0.1}),
        ("AdamW", {"torch_adam": True}, optim.AdamW, {"weight_decay": 0.01}),
        ("Adagrad", {"lr": "auto", "eps": None}, optim.Adagrad, {"lr": 0.01, "eps": 1e-10}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, optim.SGD, {"momentum": 0.9, "weight_decay": 0}),
        ("RMSprop", {"max_grad_norm": 0.0, "alpha": 0.8}, optim.RMSprop, {"alpha": 0.8}),
    ],
)
def test_types_are_torchs_with_the_defaults_of_deepspeed(
    name: str, params: dict[str, Any], kind: type, options: dict[str, Any]
) -> None:
    config = Config.read({"optimizer": {"type": name, "params": params}})
    assert config.optimizer is not None
    trained, frozen = Parameter(torch.ones(2)), Parameter(torch.ones(2), requires_grad=False)
    optimizer = config.optimizer.build([trained, frozen])
    assert type(optimizer) is kind
    [group] = optimizer.param_groups
    assert group["params"] == [trained]
    assert {key: group[key] for key in options} == options


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "Lamb"}, "'Lamb', which is not in torch.optim"),
        ({"type": "Muon"}, "'Muon', which is not in torch.optim"),
        ({"type": "AdammW"}, "Did you mean 'AdamW'?"),
        ({"type": "lr_scheduler"}, "is not in torch.optim"),
        ({"params": {"lr": 1}}, "a type, which is a string"),
        ({"type": "SGD", "params": 3}, "params, which is an object"),
        ({"type": "SGD", "lr": 3}, "unknown key 'optimizer.lr'"),
        ({"type": "SGD", "params": {"momentun": 1}}, "Did you mean 'momentum'?"),
        ({"type": "Adam", "params": {"max_grad_norm": 1}}, "does not accept"),
        ({"type": "Adam", "params": {"bias_correction": False}}, "always corrects"),
    ],
)
def test_a_wrong_optimizer_is_one_sentence(block: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="optimizer") as caught:
        ZeROStrategy(config={"optimizer": block})
    assert words in str(caught.value)


# ---------------------------------------------------------------------------- learning rates


def rates(block: dict[str, Any], *, steps: int, lr: float | list[float] = 1.0) -> list[Any]:
    """The learning rate of each step, or of each group in each step."""
    lrs = lr if isinstance(lr, list) else [lr]
    optimizer = optim.SGD([{"params": [Parameter(torch.ones(1))], "lr": one} for one in lrs])
    config = Config.read({"scheduler": block})
    assert config.scheduler is not None
    scheduler = config.scheduler.build(optimizer, lambda: 6)
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return [one if isinstance(lr, list) else one[0] for one in seen]


WARMUP = {"warmup_num_steps": 2, "warmup_type": "linear"}


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        (
            "WarmupLR",
            {"warmup_max_lr": 0.4, "warmup_num_steps": 4, "warmup_type": "linear"},
            [0.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.4],
        ),
        # log(count + 1) / log(4), up to the optimizer's own rate
        ("WarmupLR", {"warmup_num_steps": 4}, [0.0, 0.0, 0.5, 0.79248125, 1.0, 1.0]),
        (
            "WarmupDecayLR",
            {**WARMUP, "warmup_max_lr": 1.0, "total_num_steps": 6},
            [0.0, 0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0],
        ),
        (
            "WarmupDecayLR",
            {**WARMUP, "warmup_max_lr": 1.0, "total_num_steps": "auto"},
            [0.0, 0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0],
        ),
        ("StepLR", {"step_size": 2, "gamma": 0.5}, [1.0, 1.0, 0.5, 0.5, 0.25]),
    ],
)
def test_rates_are_those_of_deepspeed(
    name: str, params: dict[str, Any], expected: list[float]
) -> None:
    """Computed by hand; the first rate is that of the first optimizer step."""
    actual = rates({"type": name, "params": params}, steps=len(expected))
    assert actual == pytest.approx(expected, rel=1e-6)


def test_every_param_group_has_its_own_rate() -> None:
    block = {"type": "WarmupLR", "params": {**WARMUP, "warmup_max_lr": [1.0, 2.0]}}
    assert rates(block, steps=4, lr=[3.0, 3.0])[2:] == [[0.5, 1.0], [1.0, 2.0]]
    with pytest.raises(ValueError, match="list of 1, one for each param group"):
        rates(block, steps=1)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "WarmupLr"}, "Did you mean 'WarmupLR'?"),
        ({"type": "ReduceLROnPlateau"}, "that needs no metric"),
        ({"type": "WarmupCosineLR"}, "Return the scheduler from `configure_optimizers`"),
        ({"type": "OneCycle"}, "Return the scheduler from `configure_optimizers`"),
        ({"type": "StepLR"}, "lacks 'step_size'"),
        ({"type": "StepLR", "params": {"gama": 1}}, "Did you mean 'gamma'?"),
        ({"type": "WarmupLR", "params": {"warmup_type": "square"}}, "'log' or 'linear'"),
        ({"type": "WarmupDecayLR"}, "has no last step"),
    ],
)
def test_a_wrong_scheduler_is_one_sentence(block: dict[str, Any], words: str) -> None:
    def build() -> None:
        scheduler = SchedulerBlock.read(block)
        scheduler.build(optim.Adam([Parameter(torch.ones(1))]), lambda: float("inf"))

    with pytest.raises(ValueError, match="scheduler") as caught:
        build()
    assert words in str(caught.value)
