"""Optimizers and schedulers that a DeepSpeed configuration asks for."""

from __future__ import annotations

import math
import warnings
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
from tests.oracle.projects import Regression, Run, assert_like_ddp, make_trainer, rows
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
        ("RMSprop", {"alpha": 0.8}, optim.RMSprop, {"alpha": 0.8}),
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
        ({"type": "AdmW"}, "Did you mean 'AdamW'?"),
        ({"type": "lr_scheduler"}, "is not in torch.optim"),
        ({"params": {"lr": 1}}, "a type, which is a string"),
        ({"type": "SGD", "params": 3}, "params, which is an object"),
        ({"type": "SGD", "lr": 3}, "unknown key 'optimizer.lr'"),
        ({"type": "SGD", "params": {"momentun": 1}}, "Did you mean 'momentum'?"),
        ({"type": "Adam", "params": {"max_grad_norm": 1}}, "gradient_clipping"),
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


CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4}
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
        (
            "WarmupCosineLR",
            {**WARMUP, "total_num_steps": 4, "warmup_min_ratio": 0.2, "cos_min_ratio": 0.1},
            [0.0, 0.2, 0.6, 0.55, 0.1, 0.1],
        ),
        (
            "OneCycle",
            {**CYCLE, "cycle_second_step_size": 2, "decay_step_size": 2, "decay_lr_rate": 1.0},
            [0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1, 0.1 / 1.5, 0.05],
        ),
        (
            "OneCycle",
            {**CYCLE, "cycle_first_stair_count": 2, "cycle_momentum": False},
            [0.1, 0.1, 0.3, 0.3, 0.5, 0.3, 0.3, 0.1, 0.1, 0.1],
        ),
        (
            "LRRangeTest",
            {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2},
            [0.1, 0.15, 0.2, 0.25],
        ),
        (
            "LRRangeTest",
            {
                "lr_range_test_min_lr": 0.1,
                "lr_range_test_step_size": 2,
                "lr_range_test_staircase": True,
            },
            [0.1, 0.1, 0.2, 0.2, 0.3],
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
    cosine = {"type": "WarmupCosineLR", "params": {**WARMUP, "total_num_steps": 8}}
    assert rates(cosine, steps=3, lr=[1.0, 2.0])[2] == [0.5, 1.0]
    with pytest.raises(ValueError, match="list of 1, one for each param group"):
        rates(block, steps=1)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "WarmupLr"}, "Did you mean 'WarmupLR'?"),
        ({"type": "ReduceLROnPlateau"}, "needs a metric"),
        ({"type": "OneCycle"}, "lacks 'cycle_min_lr'"),
        ({"type": "StepLR", "params": {"gama": 1}}, "Did you mean 'gamma'?"),
        ({"type": "WarmupLR", "params": {"warmup_type": "square"}}, "'log' or 'linear'"),
        ({"type": "WarmupDecayLR"}, "has no last step"),
        ({"type": "OneCycle", "params": CYCLE}, "betas of Adam are not cycled"),
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
    """Has what the configuration does not bring."""

    def __init__(self, *, optimizer: bool, scheduler: bool) -> None:
        super().__init__()
        self.head.bias.requires_grad_(False)
        self.has, self.has_scheduler = optimizer, scheduler
        self.notes: list[float] = []

    def configure_optimizers(self) -> Any:
        if not self.has:
            return None
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = optim.AdamW(trained, lr=0.05, weight_decay=0.1)
        if not self.has_scheduler:
            return optimizer
        last = self.trainer.estimated_stepping_batches

        def share(step: int) -> float:
            count = max(step - 1, 0)
            return count / 2 if count < 2 else (last - count) / (last - 2)

        return [optimizer], [{"scheduler": LambdaLR(optimizer, share), "interval": "step"}]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.notes.append(optimizer.param_groups[0]["lr"])


def _train(
    strategy: Any, config: dict[str, Any], folder: str = "", resumed: str | None = None
) -> Run:
    is_ddp = strategy == "ddp"
    module = Configured(
        optimizer=is_ddp or "optimizer" not in config, scheduler=is_ddp and "scheduler" in config
    )
    if not is_ddp:
        strategy = ZeROStrategy(strategy, config=config, units={Block})
    callbacks = [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)] if folder else []
    trainer = make_trainer(
        strategy,
        max_epochs=3,
        accumulate_grad_batches=2,
        callbacks=callbacks,
        enable_checkpointing=bool(folder),
    )
    trainer.fit(module, rows(), ckpt_path=resumed)
    return Run.of(module, trainer, module.notes)


def _train_all(folder: str) -> dict[str, dict[Any, Run]]:
    both = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER}
    runs = {
        "both": {name: _train(name, both) for name in ("ddp", 1)},
        "scheduler": {name: _train(name, {"scheduler": SCHEDULER}) for name in ("ddp", 2)},
        "optimizer": {name: _train(name, {"optimizer": OPTIMIZER}) for name in ("ddp", 3)},
    }
    whole = runs["both"][3] = _train(3, both, folder)
    late = _train(3, both, resumed=f"{folder}/epoch=0.ckpt")
    late.losses[:0] = whole.losses[: -len(late.losses)]
    late.notes[:0] = whole.notes[: -len(late.notes)]
    runs["both"]["resumed"] = late
    return runs


def test_a_run_is_that_of_ddp(ranks: Pools, tmp_path: Any) -> None:
    runs = ranks(2).run(_train_all, str(tmp_path))
    assert runs[0]["both"]["ddp"].notes[:5] == pytest.approx([0.0, 0.0, 0.025, 0.05, 0.0375])
    for name in ("both", "scheduler", "optimizer"):
        assert_like_ddp([run[name] for run in runs], ulps=256)


TYPICAL = {
    2: """{
        "fp16": {
            "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000,
            "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 4}
        },
        "zero_optimization": {
            "stage": 2, "allgather_partitions": true, "allgather_bucket_size": 2e8,
            "overlap_comm": true, "reduce_scatter": true, "reduce_bucket_size": 2e8,
            "contiguous_gradients": true
        },
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "steps_per_print": 2000, "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
    }""",
    3: """{
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
    }""",
}
"""Whole files of the kind that the documentation of DeepSpeed's integrations shows."""


class Warmed(Regression):
    """DDP's part in it: the same optimizer and warm-up by hand."""

    def configure_optimizers(self) -> Any:
        optimizer = optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)
        scheduler = LambdaLR(optimizer, lambda step: min(math.log(max(step, 1)) / math.log(4), 1))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Bare(Regression):
    """Leaves optimizer and scheduler to the configuration."""

    def configure_optimizers(self) -> None:
        """There is none."""


def _typical(path: str, stage: int) -> dict[str, Run]:
    runs = {}
    asked = {"precision": "bf16-mixed", "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    for name in ("ddp", "config"):
        is_ddp = name == "ddp"
        module = Warmed() if is_ddp else Bare()
        strategy = "ddp" if is_ddp else ZeROStrategy(config=path, units={Block})
        options = asked if stage == 3 else {}
        if not is_ddp:
            options = {key: value for key, value in options.items() if key == "precision"}
        trainer = make_trainer(strategy, max_epochs=3, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, rows())
        told = [str(w.message) for w in caught if "DeepSpeed" in str(w.message)]
        runs[name] = Run.of(module, trainer)
        assert is_ddp or trainer.strategy.settings.stage == stage
        assert len(told) == (0 if is_ddp or trainer.global_rank else 1)
    return runs


@pytest.mark.parametrize("stage", TYPICAL)
def test_a_typical_file_runs_whole(ranks: Pools, tmp_path: Path, stage: int) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(TYPICAL[stage])
    runs = ranks(2).run(_typical, str(path), stage)
    start = {name: p.detach() for name, p in Regression().named_parameters()}
    for run in runs:
        for name, before in start.items():
            ours, theirs = (run[who].params[name] - before for who in ("config", "ddp"))
            assert theirs.norm() > 1e-3, name
            assert (ours - theirs).norm() < 1e-2 * theirs.norm(), name


class Answering(Configured):
    """Has other optimizers and schedulers than the configuration."""

    def __init__(self, strategy: Any, config: dict[str, Any]) -> None:
        is_ddp = strategy == "ddp"
        super().__init__(optimizer=is_ddp or "optimizer" not in config, scheduler=is_ddp)
        self.is_ddp, self.asked = is_ddp, 0

    def configure_optimizers(self) -> Any:
        self.asked += 1
        if self.is_ddp:
            return super().configure_optimizers()
        given = super().configure_optimizers() or optim.SGD(self.parameters(), lr=3.0)
        return [given], [optim.lr_scheduler.LinearLR(given, 0.125)]


def _answer_twice(config: dict[str, Any]) -> tuple[dict[str | int, Run], list[str], list[int]]:
    runs: dict[str | int, Run] = {}
    asked = []
    with messages() as said:
        for name in ("ddp", 1, 2, 3):
            module = Answering(name, config)
            strategy = (
                name if name == "ddp" else ZeROStrategy(int(name), config=config, units={Block})
            )
            trainer = make_trainer(strategy, max_epochs=3, accumulate_grad_batches=2)
            trainer.fit(module, rows())
            runs[name] = Run.of(module, trainer, module.notes)
            asked.append(module.asked)
    return runs, [line for line in said if "DeepSpeed configuration" in line], asked


@pytest.mark.parametrize(
    ("config", "words", "calls"),
    [
        (
            {"optimizer": OPTIMIZER, "scheduler": SCHEDULER},
            "The optimizer is that of the DeepSpeed configuration; configure_optimizers is not",
            [1, 0, 0, 0],
        ),
        (
            {"scheduler": SCHEDULER},
            "The scheduler is that of the DeepSpeed configuration; configure_optimizers' LinearLR",
            [1, 1, 1, 1],
        ),
    ],
)
def test_the_block_counts_and_a_line_says_so(
    ranks: Pools, config: dict[str, Any], words: str, calls: list[int]
) -> None:
    found = ranks(2).run(_answer_twice, config, timeout=120)
    assert_like_ddp([runs for runs, _, _ in found], ulps=256)
    for rank, (_, lines, asked) in enumerate(found):
        assert asked == calls
        assert len(lines) == (0 if rank else 3)
        assert all(line.startswith(words) for line in lines)
