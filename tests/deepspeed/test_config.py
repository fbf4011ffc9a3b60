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

from lightning_zero import ZeROPrecision, ZeROStrategy, load_weights
from lightning_zero.deepspeed import ACTING, REFUSED, Config, OptimizerBlock, SchedulerBlock
from lightning_zero.plan import Offload
from tests.oracle.projects import make_trainer
from tests.oracle.ranks import ROOT, Pools


def nested(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


# ---------------------------------------------------------------------------- reading

ACTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "zero_optimization.stage": (2, {"arguments": {"stage": 2}}),
    "zero_optimization.stage3_prefetch_bucket_size": (0, {"arguments": {"prefetch": 0}}),
    "zero_optimization.mics_shard_size": (8, {"arguments": {"shard": 8}}),
    "zero_optimization.zero_quantized_weights": (True, {"arguments": {"gather_bits": 8}}),
    "zero_optimization.zero_quantized_gradients": (True, {"arguments": {"reduce_bits": 8}}),
    "zero_optimization.offload_optimizer.device": (
        "nvme",
        {"arguments": {"offload_optimizer": "nvme"}},
    ),
    "zero_optimization.offload_optimizer.nvme_path": ("/a", {"arguments": {"offload_path": "/a"}}),
    "zero_optimization.offload_param.device": ("nvme", {"arguments": {"offload_weights": "nvme"}}),
    "zero_optimization.offload_param.nvme_path": ("/a", {"arguments": {"offload_path": "/a"}}),
    "tensor_parallel.autotp_size": (2, {"arguments": {"tensor_parallel_size": 2}}),
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


def test_acting_keys_act_and_take_one_kind_of_value() -> None:
    assert set(ACTS) == set(ACTING)
    for name, (value, becomes) in ACTS.items():
        assert Config.read(nested(name, value)) == Config(**becomes), name
        for nothing in ("auto", None):
            assert Config.read(nested(name, nothing)) == Config()
        with pytest.raises(ValueError, match=f"Expected {name} .* to be a"):
            Config.read(nested(name, ["wrong"]))


DEFAULTS: list[tuple[str, Any]] = [
    *((name, value) for name in REFUSED for value in (False, "auto", None, {"enabled": False})),
    ("sequence_parallel_size", 1),
    ("pipeline.stages", 1),
    ("pipeline", {"stages": "auto"}),
    ("compression_training", {"weight_quantization": {"shared_parameters": {"enabled": False}}}),
    ("amp", {"enabled": False, "opt_level": "O1"}),
    ("zero_optimization.offload_optimizer.ratio", 1.0),
    ("zero_optimization.mics_shard_size", -1),
    ("zero_optimization.overlap_comm", True),
    ("zero_optimization.zero_hpz_partition_size", 0),
    ("tensor_parallel.autotp_size", 1),
    ("gradient_clipping", 0.0),
    ("fp16.loss_scale", 0),
    ("optimizer", {}),
    ("wandb", {"enabled": False, "project": "x"}),
]


def test_a_refused_key_raises_with_the_remedy_unless_it_asks_for_nothing() -> None:
    for name, value in DEFAULTS:
        assert Config.read(nested(name, value)) == Config(), (name, value)
    page = (ROOT / "docs" / "deepspeed.md").read_text()
    for name, remedy in REFUSED.items():
        words = f"{name} in the DeepSpeed .* would change the run(?s:.*){re.escape(remedy)}"
        with pytest.raises(ValueError, match=words):
            Config.read(nested(name, 0.5))
        assert name.rpartition("zero_optimization.")[2] in page


def test_of_two_loss_scales_the_static_one_counts_and_none_of_a_block_that_is_off() -> None:
    both = {"loss_scale": 8, "initial_scale_power": 4}
    for given in (both, dict(reversed(both.items()))):
        assert Config.read({"fp16": given}).scaler["scale"] == 8.0
    off = {**both, "enabled": False, "hysteresis": 2, "fp16_master_weights_and_grads": True}
    assert Config.read({"fp16": off}) == Config(enabled={"fp16": False})


IDLE = """
zero_optimization: reduce_bucket_size allgather_bucket_size sub_group_size leaf_module legacy_stage1
    use_multi_rank_bucket_allreduce round_robin_gradients stage3_prefetch_bucket_size
    stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_reuse_distance
    stage3_max_live_parameters stage3_module_granularity_threshold stage3_allgather_sequential
    stage3_use_all_reduce_for_fetch_params stage3_partition_stream_chunk_size override_module_apply
    memory_efficient_linear pipeline_loading_checkpoint log_trace_cache_warnings
    enable_sanity_checks save_muon_momentum_buffer_in_memory cpu_offload_use_pin_memory
    zero_hpz_partition_size mics_hierarchical_params_gather offload_optimizer.buffer_count
    offload_optimizer.pipeline_read offload_optimizer.fast_init offload_param.max_in_cpu
bf16: immediate_grad_update check_grad_overflow
fp16: auto_cast hysteresis consecutive_hysteresis min_loss_scale
: zero_allow_untested_optimizer zero_force_ds_cpu_optimizer train_batch_size aio steps_per_print
    train_micro_batch_size_per_gpu dataloader_drop_last seq_parallel_communication_data_type
    data_types prescale_gradients gradient_predivide_factor sparse_gradients disable_allgather
    activation_checkpointing checkpoint compile wall_clock_breakdown memory_breakdown dump_state
    flops_profiler comms_logger monitor_config tensorboard wandb comet csv_monitor autotuning
    eigenvalue pipeline.partition distributed_backend
"""
"""DeepSpeed's keys without effect, by block."""


def test_one_warning_names_all_keys_without_effect() -> None:
    """None of DeepSpeed's own keys is taken for a typing error of another."""
    config: dict[str, Any] = {}
    expected = set()
    block = ""
    for word in IDLE.split():
        if word.endswith(":"):
            block = word.replace(":", ".").lstrip(".")
            continue
        *blocks, last = f"{block}{word}".split(".")
        inner = config
        for name in blocks:
            inner = inner.setdefault(name, {})
        inner[last] = 7
        expected.add(block + word)
    found = Config.read(config)
    [warning] = found.warnings
    assert found == Config(warnings=[warning])
    listed = warning.removesuffix(".").partition("have no effect: ")[2].split(", ")
    assert set(listed) == expected


def test_offload_blocks_act_refuse_or_ask_for_nothing() -> None:
    def read(optimizer: dict[str, Any], param: dict[str, Any]) -> Config:
        blocks = {"offload_optimizer": optimizer, "offload_param": param}
        return Config.read({"zero_optimization": {"stage": 3, **blocks}})

    off = {"device": "none", "ratio": 1, "pin_memory": True}
    assert read(off, {"device": "none"}) == Config(arguments={"stage": 3})
    on = {"device": "nvme", "nvme_path": "/a"}
    arguments = {"offload_optimizer": "nvme", "offload_weights": "nvme", "offload_path": "/a"}
    assert read({**on, "pin_memory": True}, on) == Config(arguments={"stage": 3, **arguments})
    blocks = {"offload_optimizer": on, "offload_param": on}
    settings = ZeROStrategy(config={"zero_optimization": blocks}).settings
    assert (settings.offload, settings.offload_path) == (Offload("nvme", "nvme"), "/a")
    with pytest.raises(ValueError, match="but all files go into one folder"):
        read(on, {**on, "nvme_path": "/b"})


def test_quantized_gradients_are_summed_in_fp32() -> None:
    def read(dtype: str) -> dict[str, Any]:
        quantized = {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}
        return {**quantized, "communication_data_type": dtype}

    strategy = ZeROStrategy(config=read("fp32"))
    assert (strategy.settings.reduce_bits, strategy.settings.reduce_dtype) == (8, None)
    assert strategy.config.warnings == []
    for dtype in ("bf16", "fp16"):
        with pytest.raises(ValueError, match="contradicts reduce_bits=8"):
            ZeROStrategy(config=read(dtype))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"stage": 0}}, r"For stage 0, use Trainer\(strategy='ddp'\)"),
        ({"zero_optimization": {"stag": 3}}, "Did you mean 'zero_optimization.stage'?"),
        ({"fp16": {"loss_scal": 2}}, "Did you mean 'fp16.loss_scale'?"),
        ({"zero_optimisation": {"stage": 3}}, "Did you mean 'zero_optimization'?"),
        ({"stage": 3}, "Did you mean 'zero_optimization.stage'?"),
        ({"gradient_clip": 1.0}, "Did you mean 'gradient_clipping'?"),
        ({"zero_optimization": True}, "Expected zero_optimization in .* an object"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "one precision"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, "cpu, nvme, got 'disk'"),
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


@pytest.mark.parametrize("place", [".", "checkpoint"])
def test_a_checkpoint_of_deepspeed_is_refused_with_two_commands(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "x.ckpt"
    (folder / place).mkdir(parents=True)
    (folder / place / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    script = f"`python {folder}/zero_to_fp32.py {folder} weights --safe_serialization`"
    trainer = make_trainer("zero1", devices=1)
    uses = (
        lambda: load_weights(BoringModel(), folder),
        lambda: trainer.fit(BoringModel(), ckpt_path=folder),
    )
    for use in uses:
        with pytest.raises(ValueError, match="is a checkpoint by DeepSpeed") as e:
            use()
        assert script in str(e.value)
        assert 'lightning_zero.load_weights(module, "weights")' in str(e.value)


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
        "scale": scaler and (scaler.get_scale(), scaler.get_growth_interval()),
        "warnings": [str(w.message) for w in caught if "DeepSpeed" in str(w.message)],
    }


FP16 = {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 2}
CLIP, ACCUMULATE = {"gradient_clipping": 0.01}, {"gradient_accumulation_steps": 2}
IDLE_KEYS = {"zero_optimization": {"reduce_bucket_size": 5e8}, "steps_per_print": 10}
RUNS: dict[str, dict[str, Any]] = {
    "by config": {"config": {**CLIP, **ACCUMULATE}},
    "by trainer": {"config": None, "gradient_clip_val": 0.01, "accumulate_grad_batches": 2},
    "unclipped": {"config": ACCUMULATE},
    "dynamic": {"config": {"fp16": FP16}, "plugin": "16-mixed"},
    "static": {"config": {"fp16": {**FP16, "loss_scale": 8}}, "plugin": "16-mixed"},
    "quiet": {"config": IDLE_KEYS},
    "bf16": {"config": {"bf16": {"enabled": True}}},
    "no bf16": {"config": {"bf16": {"enabled": False}}, "precision": "bf16-mixed"},
    "clip": {"config": CLIP, "gradient_clip_val": 2.0},
    "accumulate": {"config": ACCUMULATE, "accumulate_grad_batches": 4},
    "manual": {"config": CLIP, "is_manual": True},
}
ERRORS = {
    "bf16": "Use Trainer(precision='bf16-mixed')",
    "no bf16": "bf16.enabled in the DeepSpeed configuration is false",
    "clip": "gradient_clip_val=2.0",
    "accumulate": "accumulate_grad_batches=4",
    "manual": "manual optimization",
}


def fit_all() -> dict[str, dict[str, Any]]:
    return {name: fit(**run) for name, run in RUNS.items()}


def test_a_run_obeys_warns_once_or_ends_at_a_contradiction(ranks: Pools) -> None:
    found = ranks(2).run(fit_all)[0]
    same = [found[name] for name in ("by config", "by trainer", "unclipped")]
    assert [run["steps"] for run in same] == [2, 2, 2]
    clipped, by_trainer, unclipped = (run["weight"] for run in same)
    assert torch.equal(clipped, by_trainer)
    assert not torch.equal(clipped, unclipped)
    # Four good steps, of which every second one doubles.
    assert (found["dynamic"]["scale"], found["static"]["scale"]) == ((2.0**7, 2), (8.0, 2))
    [warning] = found["quiet"]["warnings"]
    for words in ("zero_optimization.stage is missing from", "reduce_bucket_size", "steps_per_"):
        assert words in warning
    for name, words in ERRORS.items():
        assert words in found[name]["error"]
