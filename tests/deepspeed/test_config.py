"""A DeepSpeed configuration: each key acts, warns or raises, in words and in a real run."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel

from lightning_zero import ZeROPrecision, ZeROStrategy
from lightning_zero.deepspeed import KEYS, Config, Fate, Kind, OptimizerBlock, SchedulerBlock, table
from lightning_zero.plan import Offload
from tests.oracle.projects import make_trainer
from tests.oracle.ranks import ROOT, Pools

ON = {Kind.SWITCH: True, Kind.NUMBER: 7, Kind.TEXT: "fp16", Kind.BLOCK: {"device": "cpu", "x": 1}}
OFF = {Kind.SWITCH: False, Kind.NUMBER: 0, Kind.TEXT: "none", Kind.BLOCK: {"enabled": False}}
WRONG = {Kind.SWITCH: 1, Kind.NUMBER: "many", Kind.TEXT: 3, Kind.BLOCK: True}


def nested(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def keys_with(*fates: Fate) -> list[str]:
    return [name for name, key in KEYS.items() if key.fate in fates]


# ---------------------------------------------------------------------------- reading


@pytest.mark.parametrize("name", KEYS)
def test_auto_and_null_ask_for_nothing(name: str) -> None:
    for value in ("auto", None):
        assert Config.read(nested(name, value)) == Config()


@pytest.mark.parametrize("name", KEYS)
def test_a_value_of_the_wrong_kind_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"Expected {re.escape(name)}") as caught:
        Config.read(nested(name, WRONG[KEYS[name].kind]))
    assert KEYS[name].kind.value in str(caught.value)


@pytest.mark.parametrize("name", keys_with(Fate.REPLACED))
def test_a_replaced_key_warns_by_name_unless_off(name: str) -> None:
    key = KEYS[name]
    [warning] = Config.read(nested(name, ON[key.kind])).warnings
    assert name in warning
    assert key.becomes in warning
    assert Config.read(nested(name, OFF[key.kind])) == Config()


@pytest.mark.parametrize("name", keys_with(Fate.ALWAYS))
def test_what_is_always_so_warns_only_when_contradicted(name: str) -> None:
    key = KEYS[name]
    assert Config.read(nested(name, key.fitting)) == Config()
    other = "bf16" if key.kind is Kind.TEXT else not key.fitting
    [warning] = Config.read(nested(name, other)).warnings
    assert name in warning


@pytest.mark.parametrize("name", keys_with(Fate.REFUSED))
def test_a_refused_key_raises_with_the_cure_unless_off(name: str) -> None:
    key = KEYS[name]
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        Config.read(nested(name, ON[key.kind]))
    assert key.becomes in str(caught.value)
    assert Config.read(nested(name, OFF[key.kind])) == Config()


ACTING = {
    "zero_optimization.stage": (2, {"arguments": {"stage": 2}}),
    "zero_optimization.stage3_prefetch_bucket_size": (0, {"arguments": {"prefetch": 0}}),
    "zero_optimization.mics_shard_size": (8, {"arguments": {"shard": 8}}),
    "tensor_parallel.autotp_size": (2, {"arguments": {"tensor_parallel_size": 2}}),
    "zero_optimization.zero_quantized_weights": (True, {"arguments": {"gather_bits": 8}}),
    "zero_optimization.zero_quantized_gradients": (True, {"arguments": {"reduce_bits": 8}}),
    "zero_optimization.offload_optimizer.device": (
        "nvme",
        {"arguments": {"offload_optimizer": "nvme"}},
    ),
    "zero_optimization.offload_optimizer.nvme_path": ("/a", {"arguments": {"offload_path": "/a"}}),
    "zero_optimization.offload_optimizer.ratio": (1, {}),
    "zero_optimization.offload_param.device": ("nvme", {"arguments": {"offload_weights": "nvme"}}),
    "zero_optimization.offload_param.nvme_path": ("/a", {"arguments": {"offload_path": "/a"}}),
    "communication_data_type": ("bf16", {"arguments": {"reduce_dtype": torch.bfloat16}}),
    "bf16.enabled": (True, {"enabled": {"bf16": True}}),
    "fp16.enabled": (False, {"enabled": {"fp16": False}}),
    "fp16.loss_scale": (
        128,
        {"scaler": {"scale": 128.0, "growth_factor": 1.0, "backoff_factor": 1.0}},
    ),
    "fp16.initial_scale_power": (4, {"scaler": {"scale": 16.0}}),
    "fp16.loss_scale_window": (100, {"scaler": {"growth_interval": 100}}),
    "optimizer": (
        {"type": "SGD", "params": {"lr": 0.1, "momentum": "auto"}},
        {"optimizer": OptimizerBlock(torch.optim.SGD, {"lr": 0.1})},
    ),
    "scheduler": (
        {"type": "StepLR", "params": {"step_size": 2}},
        {"scheduler": SchedulerBlock("StepLR", {"step_size": 2})},
    ),
    "gradient_clipping": (0.5, {"trainer": {"gradient_clip_val": 0.5}}),
    "gradient_accumulation_steps": (4, {"trainer": {"accumulate_grad_batches": 4}}),
}


def test_every_acting_key_is_among_those_below() -> None:
    assert set(ACTING) == set(keys_with(Fate.ACTS))


def test_offload_blocks_act_refuse_or_ask_for_nothing() -> None:
    def read(optimizer: dict[str, Any], param: dict[str, Any]) -> Config:
        blocks = {"offload_optimizer": optimizer, "offload_param": param}
        return Config.read({"zero_optimization": {"stage": 3, **blocks}})

    off = {"device": "none", "ratio": 1, "pin_memory": True}
    assert read(off, {"device": "none"}) == Config(arguments={"stage": 3})
    on = {"device": "nvme", "nvme_path": "/a"}
    arguments = {"offload_optimizer": "nvme", "offload_weights": "nvme", "offload_path": "/a"}
    found = read({**on, "pin_memory": True}, on)
    assert found.arguments == {"stage": 3, **arguments}
    [warning] = found.warnings
    assert "offload_optimizer.pin_memory" in warning
    blocks = {"offload_optimizer": on, "offload_param": on}
    settings = ZeROStrategy(config={"zero_optimization": blocks}).settings
    assert (settings.offload, settings.offload_path) == (Offload("nvme", "nvme"), "/a")
    host = read({"device": "cpu"}, {"device": "cpu"}).arguments
    assert host == {"stage": 3, "offload_optimizer": "cpu", "offload_weights": "cpu"}
    with pytest.raises(ValueError, match=r"offload_param\.device .* none, cpu, nvme, got 'disk'"):
        read(on, {"device": "disk"})
    for ratio in (0, 0.5, 1.5):
        with pytest.raises(ValueError, match=r"offloaded as a whole or not at all. Remove the key"):
            read({**on, "ratio": ratio}, on)
    with pytest.raises(ValueError, match="but all files go into one folder"):
        read(on, {**on, "nvme_path": "/b"})


@pytest.mark.parametrize("name", ACTING)
def test_an_acting_key_acts(name: str) -> None:
    value, becomes = ACTING[name]
    assert Config.read(nested(name, value)) == Config(**becomes)


def test_groups_of_no_size_ask_for_nothing() -> None:
    assert Config.read({"zero_optimization": {"mics_shard_size": -1}}) == Config()


@pytest.mark.parametrize(
    ("name", "value", "given"),
    [
        ("mics_shard_size", 8, {"shard": 2}),
    ],
)
def test_an_argument_that_says_otherwise_is_refused(
    name: str, value: Any, given: dict[str, int]
) -> None:
    ((argument, number),) = given.items()
    with pytest.raises(ValueError, match=f"{argument}={number} contradicts"):
        ZeROStrategy(config={"zero_optimization": {"stage": 3, name: value}}, **given)


def test_a_static_loss_scale_counts_more_than_the_first_of_a_dynamic_one() -> None:
    for block in ({"loss_scale": 8, "initial_scale_power": 4}, {"initial_scale_power": 4}):
        reverse = dict(reversed(block.items()))
        expected = 8.0 if "loss_scale" in block else 16.0
        assert Config.read({"fp16": block}).scaler["scale"] == expected
        assert Config.read({"fp16": reverse}).scaler["scale"] == expected


def test_a_block_that_is_off_asks_for_nothing() -> None:
    block = {
        "enabled": False,
        "hysteresis": 2,
        "loss_scale": 8,
        "fp16_master_weights_and_grads": True,
    }
    assert Config.read({"fp16": block}) == Config(enabled={"fp16": False})
    with pytest.raises(ValueError, match=r"unknown key 'fp16\.histeresis'"):
        Config.read({"fp16": {"enabled": False, "histeresis": 2}})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimisation": {"stage": 3}}, "'zero_optimization'?"),
        ({"stage": 3}, "'zero_optimization.stage'?"),
        ({"gradient_clip": 1.0}, "'gradient_clipping'?"),
        ({"gradient_checkpointing": True}, "'gradient_clipping'?"),
        ({"wall_clock": True}, "'wall_clock_breakdown'?"),
        ({"distributed_backend": "nccl"}, "Remove it."),
        ({"qqqqqqqq": {"a": 1}}, "Remove it."),
    ],
)
def test_an_unknown_key_at_the_top_warns_with_the_nearest(
    config: dict[str, Any], words: str
) -> None:
    found = Config.read({"gradient_clipping": 0.5, **config})
    [warning] = found.warnings
    assert f"unknown key {next(iter(config))!r}, which has no effect." in warning
    assert words in warning
    assert found == Config(trainer={"gradient_clip_val": 0.5}, warnings=[warning])


def test_quantized_gradients_are_summed_in_fp32() -> None:
    def read(dtype: str) -> dict[str, Any]:
        quantized = {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}
        return {**quantized, "communication_data_type": dtype}

    strategy = ZeROStrategy(config=read("fp32"))
    assert (strategy.settings.reduce_bits, strategy.settings.reduce_dtype) == (8, None)
    [warning] = strategy.config.warnings
    assert "communication_data_type" in warning
    assert "travel in 8 bits and are summed in fp32" in warning
    for dtype in ("bf16", "fp16"):
        with pytest.raises(ValueError, match="contradicts reduce_bits=8"):
            ZeROStrategy(config=read(dtype))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"stag": 3}}, "'zero_optimization.stage'?"),
        ({"zero_optimization": {"prefetch_bucket_size": 1}}, "stage3_prefetch_bucket_size'?"),
        ({"fp16": {"loss_scal": 1}}, "'fp16.loss_scale'?"),
    ],
)
def test_an_unknown_key_in_a_block_raises_with_the_nearest(
    config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match="unknown key") as caught:
        Config.read(config)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"stage": 0}}, r"For stage 0, use Trainer\(strategy='ddp'\)"),
        ({"zero_optimization": True}, "Expected zero_optimization in .* an object"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "one precision"),
        ({"bfloat16": {"enabled": 1}}, "bf16.enabled"),
        ({"communication_data_type": "fp8"}, "fp32, fp16, bf16"),
        ({"gradient_clipping": -1.0}, "non-negative"),
        ("/nowhere/zero.json", "/nowhere/zero.json"),
    ],
)
def test_a_wrong_configuration_is_one_sentence(config: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Config.read(config)


def test_a_file_is_read_as_a_dictionary_is(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    assert Config.read(path) == Config.read(str(path)) == Config.read(config)
    path.write_text("{not json")
    with pytest.raises(ValueError, match=r"ds\.json"):
        Config.read(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="Expected an object"):
        Config.read(path)


def test_the_page_lists_every_key() -> None:
    assert table() in (ROOT / "docs" / "deepspeed.md").read_text()


# ---------------------------------------------------------------------------- the strategy


def test_arguments_come_from_the_configuration() -> None:
    config = {
        "zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 0},
        "communication_data_type": "bf16",
    }
    settings = ZeROStrategy(config=config).settings
    assert (settings.stage, settings.prefetch) == (2, 0)
    assert settings.reduce_dtype is torch.bfloat16
    with pytest.raises(ValueError, match="stage=1 contradicts"):
        ZeROStrategy(stage=1, config=config)
    assert ZeROStrategy(stage=2, config=config).settings.stage == 2
    assert ZeROStrategy(stage=1, config={"bf16": {}}).settings.stage == 1


def test_a_configuration_without_a_stage_warns_unless_the_strategy_has_one() -> None:
    for config in ({"bf16": {}}, {"zero_optimization": {"stage": "auto"}}):
        strategy = ZeROStrategy(config=config)
        assert strategy.settings.stage == 3
        [warning] = strategy.config.warnings
        assert "zero_optimization.stage is missing from the DeepSpeed configuration" in warning
        assert "ZeROStrategy(stage=3)" in warning
        assert ZeROStrategy(stage=2, config=config).config.warnings == []
    assert ZeROStrategy(config={"zero_optimization": {"stage": 3}}).config.warnings == []
    assert ZeROStrategy().config.warnings == []


def fit(
    config: dict[str, Any] | None,
    *,
    is_manual: bool = False,
    plugin: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Run; return an error, or weights, steps, loss scale and warnings."""
    strategy = ZeROStrategy(
        config=config, precision_plugin=ZeROPrecision(plugin) if plugin else None
    )
    trainer = make_trainer(strategy, limit_train_batches=4, limit_val_batches=0, **options)
    torch.manual_seed(0)
    module = ManualOptimBoringModel() if is_manual else BoringModel()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module)
        except ValueError as error:
            return {"error": str(error)}
    scaler = strategy.precision_plugin.scaler
    return {
        "weight": module.layer.weight.detach().clone(),
        "steps": trainer.global_step,
        "scale": scaler and (scaler.scale, scaler.growth_interval),
        "warnings": [str(w.message) for w in caught if "DeepSpeed" in str(w.message)],
    }


def fit_all(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [fit(**run) for run in runs]


def test_the_trainer_obeys(ranks: Pools) -> None:
    by_config, by_trainer, unclipped = ranks(2).run(
        fit_all,
        [
            {"config": {"gradient_clipping": 0.01, "gradient_accumulation_steps": 2}},
            {"config": None, "gradient_clip_val": 0.01, "accumulate_grad_batches": 2},
            {"config": {"gradient_accumulation_steps": 2}},
        ],
    )[0]
    assert by_config["steps"] == by_trainer["steps"] == unclipped["steps"] == 2
    assert torch.equal(by_config["weight"], by_trainer["weight"])
    assert not torch.equal(by_config["weight"], unclipped["weight"])


def test_the_loss_scaler_obeys(ranks: Pools) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 2}
    dynamic, static = ranks(2).run(
        fit_all,
        [
            {"config": {"fp16": fp16}, "plugin": "16-mixed"},
            {"config": {"fp16": {**fp16, "loss_scale": 8}}, "plugin": "16-mixed"},
        ],
    )[0]
    assert dynamic["scale"] == (2.0**7, 2)  # four good steps, doubled at every second
    assert static["scale"] == (8.0, 2)


def test_warnings_come_once_and_contradictions_end_the_run(ranks: Pools) -> None:
    config = {"zero_optimization": {"reduce_bucket_size": 5e8}, "steps_per_print": 10}
    quiet, bf16, no_bf16, clip, accumulate, manual = ranks(2).run(
        fit_all,
        [
            {"config": config},
            {"config": {"bf16": {"enabled": True}}},
            {"config": {"bf16": {"enabled": False}}, "precision": "bf16-mixed"},
            {"config": {"gradient_clipping": 1.0}, "gradient_clip_val": 2.0},
            {"config": {"gradient_accumulation_steps": 2}, "accumulate_grad_batches": 4},
            {"config": {"gradient_clipping": 1.0}, "is_manual": True},
        ],
    )[0]
    [warning] = quiet["warnings"]
    assert "zero_optimization.stage is missing from" in warning
    assert "reduce_bucket_size" in warning
    assert "steps_per_print" in warning
    assert "Use Trainer(precision='bf16-mixed')" in bf16["error"]
    assert "bf16.enabled in the DeepSpeed configuration is false" in no_bf16["error"]
    assert "gradient_clip_val=2.0" in clip["error"]
    assert "accumulate_grad_batches=4" in accumulate["error"]
    assert "manual optimization" in manual["error"]
