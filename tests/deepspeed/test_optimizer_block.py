"""Optimizers and schedulers that a DeepSpeed configuration asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import optim
from torch.nn import Parameter
from torch.optim.lr_scheduler import LambdaLR

from lightning_zero import ZeROStrategy
from lightning_zero.deepspeed import Config, SchedulerBlock
from tests.oracle.messages import messages
from tests.oracle.models import Block
from tests.oracle.projects import Regression, Trace, assert_like_ddp, make_trainer, rows
from tests.oracle.ranks import Pools

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


# ---------------------------------------------------------------------------- in runs

OPTIMIZER = {"type": "Adam", "params": {"lr": 0.05, "weight_decay": 0.1}}
SCHEDULER = {"type": "WarmupDecayLR", "params": {**WARMUP, "warmup_max_lr": 0.05}}


class Configured(Regression):
    """Under DDP, has what the configuration asks for; else another optimizer and scheduler."""

    def __init__(self, *, is_ddp: bool, has: Any) -> None:
        super().__init__()
        self.head.bias.requires_grad_(False)
        self.is_ddp, self.has, self.calls = is_ddp, has, 0
        self.notes: list[float] = []

    def configure_optimizers(self) -> Any:
        self.calls += 1
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer: Any = optim.AdamW(trained, lr=0.05, weight_decay=0.1)
        if not self.is_ddp and "optimizer" in self.has:
            optimizer = optim.SGD(self.parameters(), lr=3.0)
        if "scheduler" not in self.has:
            return optimizer
        if not self.is_ddp:
            return [optimizer], [optim.lr_scheduler.LinearLR(optimizer, 0.125)]
        last = self.trainer.estimated_stepping_batches

        def share(step: int) -> float:
            count = max(step - 1, 0)
            return count / 2 if count < 2 else (last - count) / (last - 2)

        return [optimizer], [{"scheduler": LambdaLR(optimizer, share), "interval": "step"}]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.notes.append(optimizer.param_groups[0]["lr"])


def _train(stage: int | None, config: dict[str, Any], folder: str, *, resumes: bool) -> Any:
    """Return the run, the lines about the configuration, and the calls of the module's hook."""
    module = Configured(is_ddp=stage is None, has=config)
    strategy = "ddp" if stage is None else ZeROStrategy(stage, config=config, units={Block})
    trainer = make_trainer(
        strategy,
        max_epochs=3,
        accumulate_grad_batches=2,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)] if folder else [],
        enable_checkpointing=bool(folder),
    )
    with messages() as said:
        trainer.fit(module, rows(), ckpt_path=f"{folder}/epoch=0.ckpt" if resumes else None)
    lines = [line for line in said if "is that of the DeepSpeed configuration" in line]
    return Trace.of(module, trainer, module.notes), lines, module.calls


def _train_all(folder: str) -> list[Any]:
    both = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER}
    found = []
    for config, stages in (
        (both, (None, 1, 3)),
        ({"scheduler": SCHEDULER}, (None, 2)),
        ({"optimizer": OPTIMIZER}, (None, 3)),
    ):
        found.append(
            {
                stage or "ddp": _train(stage, config, folder if stage == 3 else "", resumes=False)
                for stage in stages
            }
        )
    whole, _, _ = found[0][3]
    late, lines, calls = _train(3, both, folder, resumes=True)
    late.losses[:0] = whole.losses[: -len(late.losses)]
    late.notes[:0] = whole.notes[: -len(late.notes)]
    found[0]["resumed"] = late, lines, calls
    return found


def test_blocks_count_more_than_the_module_and_a_line_says_so(ranks: Pools, tmp_path: Any) -> None:
    found = ranks(2).run(_train_all, str(tmp_path))
    assert found[0][0]["ddp"][0].notes[:5] == pytest.approx([0.0, 0.0, 0.025, 0.05, 0.0375])
    by_optimizer = "The optimizer is that of the DeepSpeed configuration; configure_optimizers is"
    by_scheduler = "The scheduler is that of the DeepSpeed configuration; configure_optimizers' Lin"
    for index, words in enumerate((by_optimizer, by_scheduler, by_optimizer)):
        assert_like_ddp(
            [{name: run for name, (run, _, _) in rank[index].items()} for rank in found], ulps=256
        )
        for number, rank in enumerate(found):
            for name, (_, lines, calls) in rank[index].items():
                assert calls == (words is by_scheduler or name == "ddp")
                assert len(lines) == (number == 0 and name != "ddp")
                assert all(line.startswith(words) for line in lines)


TYPICAL = """{
    "fp16": {"enabled": false},
    "bf16": {"enabled": true},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": "auto"}
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": 4}
    },
    "zero_optimization": {
        "stage": 3, "overlap_comm": true, "contiguous_gradients": true,
        "sub_group_size": 1e9, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": true
    },
    "gradient_accumulation_steps": 2, "gradient_clipping": 0.1,
    "steps_per_print": 2000, "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
}"""
"""A whole file of the kind that the documentation of DeepSpeed's integrations shows."""


def test_a_typical_file_is_read_with_one_warning(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(TYPICAL)
    config = Config.read(path)
    assert config.arguments == {"stage": 3}
    assert config.optimizer is not None
    assert config.optimizer.kind is optim.AdamW
    assert config.scheduler is not None
    assert config.scheduler.name == "WarmupLR"
    assert config.enabled == {"fp16": False, "bf16": True}
    [warning] = config.warnings
    assert "overlap_comm" not in warning
    assert "steps_per_print" in warning
