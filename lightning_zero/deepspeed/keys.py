"""The keys of a DeepSpeed configuration and their fates: data for the reader and the docs."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Fate(Enum):
    """The fate of a key."""

    ACTS = "applied"
    """Becomes an argument, a demand on the Trainer, or a number of the loss scaler."""
    ALWAYS = "always on"
    """Holds in any case; a warning only if the value asks for something else."""
    REPLACED = "replaced"
    """Has no effect; a warning names the replacement, unless the value turns the key off."""
    REFUSED = "refused"
    """Raises an error that names the cure, unless the value turns the key off."""


class Kind(Enum):
    """The kind of a value, in words."""

    SWITCH = "a boolean"
    NUMBER = "a non-negative number"
    TEXT = "a string"
    BLOCK = "an object"


@dataclass(frozen=True)
class Key:
    """A key's fate, the kind of its value, and what it becomes or what replaces it.

    ``fitting`` is the value of an ``ALWAYS`` key that asks for what holds anyway.
    """

    fate: Fate
    kind: Kind
    becomes: str
    fitting: Any = True


_acts = functools.partial(Key, Fate.ACTS)
_always = functools.partial(Key, Fate.ALWAYS, Kind.SWITCH)
_replaced = functools.partial(Key, Fate.REPLACED)
_refused = functools.partial(Key, Fate.REFUSED)


_UNITS = "`units` chooses what is gathered and reduced together, one message per unit"
_LOGGERS = "use Lightning's loggers and callbacks"
_DATA = "set the DataLoader's `batch_size`"
_PARALLEL = "only data and tensor parallelism are supported; remove the key"
_OFFLOAD_SWITCH = "offload is set by blocks; use `offload_optimizer` and `offload_param`"
_ZENFLOW = "a step updates all parameters, none later than the rest; remove the key"
_MEDIUM = "`none`, `cpu` (the host of an accelerator) or `nvme`"
_MAPPED = "files are memory-mapped, and the system decides what stays in memory"
_STAGED = "states in files are always read and written during the step, four batches in memory"
_PATH = "`offload_path`; refused without offload to `nvme`"

_OFFLOAD_BLOCK = {
    "nvme_path": _acts(Kind.TEXT, _PATH),
    "pin_memory": _replaced(Kind.SWITCH, "host memory that a GPU reads is always pinned"),
}
_WHOLE = "a checkpoint holds whole tensors at every stage, in the master's precision"
_SMALL = "modules too small for their own message belong to the enclosing unit"
_AVERAGED = "gradients are averaged as they are copied, or in fp32"
_BACKS_OFF = "the loss scale backs off on every overflow"
_COMPRESSION = "compression belongs to the model; remove the key"
_SAMPLING = "sampling belongs to the DataLoader; remove the key"
_NO_QUANTIZED = "`zero_quantized_weights` applies to all weights; remove the key"
_NO_FEEDBACK = "gradients are rounded stochastically, without a bias to make up for; remove the key"

_ZERO_OPTIMIZATION = {
    "stage": _acts(Kind.NUMBER, "`stage`; for 0, use `strategy='ddp'`"),
    "overlap_comm": _always("reductions overlap the backward pass"),
    "contiguous_gradients": _always("gradients lie in one buffer per unit"),
    "reduce_scatter": _always("gradients are reduce-scattered"),
    "allgather_partitions": _always("weights are gathered in one message"),
    "load_from_fp32_weights": _always("masters are read from the checkpoint"),
    "ignore_unused_parameters": _always("gradients of unused parameters count as zero"),
    "elastic_checkpoint": _always("a checkpoint can be loaded on any number of ranks"),
    "stage3_gather_16bit_weights_on_model_save": _always(_WHOLE),
    "stage3_gather_fp16_weights_on_model_save": _always(_WHOLE),
    "stage3_prefetch_bucket_size": _acts(
        Kind.NUMBER, "0 means `prefetch=0`; else set `prefetch`, which counts units, not elements"
    ),
    "reduce_bucket_size": _replaced(Kind.NUMBER, _UNITS),
    "allgather_bucket_size": _replaced(Kind.NUMBER, _UNITS),
    "sub_group_size": _replaced(Kind.NUMBER, _UNITS),
    "use_multi_rank_bucket_allreduce": _replaced(Kind.SWITCH, _UNITS),
    "round_robin_gradients": _replaced(Kind.SWITCH, _UNITS),
    "stage3_param_persistence_threshold": _replaced(Kind.NUMBER, _SMALL),
    "stage3_model_persistence_threshold": _replaced(Kind.NUMBER, _SMALL),
    "stage3_max_live_parameters": _replaced(
        Kind.NUMBER, "`units` and `prefetch` bound how much is whole at the same time"
    ),
    "stage3_max_reuse_distance": _replaced(
        Kind.NUMBER, "`reshard_after_forward=False` keeps weights until the backward pass"
    ),
    "stage3_module_granularity_threshold": _replaced(Kind.NUMBER, _UNITS),
    "stage3_use_all_reduce_for_fetch_params": _replaced(Kind.SWITCH, _UNITS),
    "stage3_allgather_sequential": _replaced(Kind.SWITCH, _UNITS),
    "stage3_partition_stream_chunk_size": _replaced(
        Kind.NUMBER, "build the model in `configure_model` under `trainer.init_module`"
    ),
    "leaf_module": _replaced(Kind.BLOCK, "`units` accepts module classes"),
    "memory_efficient_linear": _replaced(
        Kind.SWITCH, "weights saved by autograd are freed without a special `Linear`"
    ),
    "override_module_apply": _replaced(
        Kind.SWITCH, "`lightning_zero.gathered(module, modify=True)` makes weights editable"
    ),
    "pipeline_loading_checkpoint": _replaced(
        Kind.SWITCH, "a checkpoint is loaded by all ranks at once"
    ),
    "log_trace_cache_warnings": _replaced(Kind.SWITCH, "there is no trace to become invalid"),
    "enable_sanity_checks": _replaced(
        Kind.SWITCH, "errors always name the parameter and the remedy"
    ),
    "save_muon_momentum_buffer_in_memory": _refused(
        Kind.SWITCH, "Muon's momentum stays on the rank that owns the parameter; remove the key"
    ),
    "legacy_stage1": _replaced(Kind.SWITCH, "there is only one stage 1"),
    "offload_optimizer.device": _acts(Kind.TEXT, f"`offload_optimizer`: {_MEDIUM}"),
    **{f"offload_optimizer.{name}": key for name, key in _OFFLOAD_BLOCK.items()},
    "offload_optimizer.buffer_count": _replaced(Kind.NUMBER, _STAGED),
    "offload_optimizer.pipeline": _replaced(Kind.SWITCH, _STAGED),
    "offload_optimizer.pipeline_read": _replaced(Kind.SWITCH, _STAGED),
    "offload_optimizer.pipeline_write": _replaced(Kind.SWITCH, _STAGED),
    "offload_optimizer.fast_init": _replaced(Kind.SWITCH, "files are allocated, not written"),
    "offload_optimizer.ratio": _acts(Kind.NUMBER, "1 only: all or nothing is offloaded"),
    "offload_param.device": _acts(Kind.TEXT, f"`offload_weights`: {_MEDIUM}"),
    **{f"offload_param.{name}": key for name, key in _OFFLOAD_BLOCK.items()},
    "offload_param.buffer_count": _replaced(Kind.NUMBER, _MAPPED),
    "offload_param.buffer_size": _replaced(Kind.NUMBER, _MAPPED),
    "offload_param.max_in_cpu": _replaced(Kind.NUMBER, _MAPPED),
    "cpu_offload": _refused(Kind.SWITCH, _OFFLOAD_SWITCH),
    "cpu_offload_param": _refused(Kind.SWITCH, _OFFLOAD_SWITCH),
    "cpu_offload_use_pin_memory": _refused(Kind.SWITCH, _OFFLOAD_SWITCH),
    "zenflow": _refused(Kind.BLOCK, _ZENFLOW),
    "zero_hpz_partition_size": _replaced(
        Kind.NUMBER, "`mics_shard_size` (hybrid sharding) gathers within a node"
    ),
    "zero_quantized_weights": _acts(Kind.SWITCH, "`gather_bits=8`"),
    "zero_quantized_nontrainable_weights": _refused(Kind.SWITCH, _NO_QUANTIZED),
    "zero_quantized_gradients": _acts(Kind.SWITCH, "`reduce_bits=8`"),
    "zeropp_loco_param": _refused(Kind.BLOCK, _NO_FEEDBACK),
    "mics_shard_size": _acts(Kind.NUMBER, "`shard`, the ranks of one copy; -1 means all"),
    "mics_hierarchical_params_gather": _replaced(
        Kind.SWITCH, "`shard` sets the ranks over which weights are gathered, in one step"
    ),
}

KEYS: dict[str, Key] = {
    **{f"zero_optimization.{name}": key for name, key in _ZERO_OPTIMIZATION.items()},
    "zero_allow_untested_optimizer": _replaced(
        Kind.SWITCH,
        "how an optimizer can be stepped is proved from its operations on toy tensors",
    ),
    "zero_force_ds_cpu_optimizer": _replaced(Kind.SWITCH, "the optimizer is torch's or your own"),
    "bf16.enabled": _acts(Kind.SWITCH, "must agree with `Trainer(precision=...)`"),
    "bf16.immediate_grad_update": _replaced(
        Kind.SWITCH, "each gradient moves into its unit's buffer as soon as it is computed"
    ),
    "bf16.check_grad_overflow": _replaced(
        Kind.SWITCH, "`Trainer(detect_anomaly=True)` finds gradients that are not finite"
    ),
    "bf16.bf16_master_weights_and_grads": _refused(
        Kind.SWITCH, "`Trainer(precision='bf16-true')` has no fp32 masters; remove the key"
    ),
    "bf16.bf16_optimizer_states": _refused(
        Kind.SWITCH, "`Trainer(precision='bf16-true')` has no fp32 states; remove the key"
    ),
    "fp16.enabled": _acts(Kind.SWITCH, "must agree with `Trainer(precision=...)`"),
    "fp16.loss_scale": _acts(Kind.NUMBER, "a static loss scale; 0 means a dynamic one"),
    "fp16.initial_scale_power": _acts(Kind.NUMBER, "the initial loss scale, as a power of 2"),
    "fp16.loss_scale_window": _acts(Kind.NUMBER, "steps after which the loss scale grows"),
    "fp16.auto_cast": _replaced(Kind.SWITCH, "autocast casts inputs as they are used"),
    "fp16.hysteresis": _replaced(Kind.NUMBER, _BACKS_OFF),
    "fp16.consecutive_hysteresis": _replaced(Kind.SWITCH, _BACKS_OFF),
    "fp16.min_loss_scale": _replaced(Kind.NUMBER, "the loss scale has no lower bound"),
    "fp16.fp16_master_weights_and_grads": _refused(
        Kind.SWITCH, "`Trainer(precision='16-true')` has no fp32 masters; remove the key"
    ),
    "amp": _refused(Kind.BLOCK, "`Trainer(precision='16-mixed')` replaces it; remove the key"),
    "torch_autocast": _replaced(Kind.BLOCK, "use `Trainer(precision='bf16-mixed')`"),
    "gradient_clipping": _acts(
        Kind.NUMBER, "`Trainer(gradient_clip_val=...)`, by norm, unless the Trainer has its own"
    ),
    "gradient_accumulation_steps": _acts(
        Kind.NUMBER, "must agree with `Trainer(accumulate_grad_batches=...)`"
    ),
    "managed_gradient_accumulation": _always("the Trainer counts microbatches"),
    "train_batch_size": _replaced(Kind.NUMBER, _DATA),
    "train_micro_batch_size_per_gpu": _replaced(Kind.NUMBER, _DATA),
    "dataloader_drop_last": _replaced(Kind.SWITCH, "set the DataLoader's `drop_last`"),
    "communication_data_type": _acts(
        Kind.TEXT,
        "`reduce_dtype`: `fp32`, `fp16` or `bf16`; quantized gradients are summed in `fp32`",
    ),
    "seq_parallel_communication_data_type": _refused(Kind.TEXT, _PARALLEL),
    "data_types.grad_accum_dtype": Key(
        Fate.ALWAYS, Kind.TEXT, "reduced gradients have the master's dtype", "fp32"
    ),
    "prescale_gradients": _replaced(Kind.SWITCH, _AVERAGED),
    "gradient_predivide_factor": _replaced(Kind.NUMBER, _AVERAGED),
    "sparse_gradients": _replaced(Kind.SWITCH, "sparse gradients are made dense"),
    "disable_allgather": _replaced(Kind.SWITCH, "weights are gathered in one message"),
    "optimizer": _acts(
        Kind.BLOCK, "torch's optimizer of that type; `configure_optimizers` is not called"
    ),
    "scheduler": _acts(
        Kind.BLOCK,
        "a scheduler for the only optimizer, stepped once per step, in place of the module's",
    ),
    "activation_checkpointing": _replaced(
        Kind.BLOCK,
        "use `activation_checkpointing` with `True` or module classes, and on GPUs"
        " `activation_offload` for `cpu_checkpointing`",
    ),
    "checkpoint": _replaced(
        Kind.BLOCK, "a checkpoint is one plain file or, with `checkpoint='dcp'`, a directory"
    ),
    "aio": _replaced(Kind.BLOCK, _STAGED),
    "steps_per_print": _replaced(Kind.NUMBER, "use `Trainer(log_every_n_steps=...)`"),
    "wall_clock_breakdown": _replaced(Kind.SWITCH, "use `Trainer(profiler=...)`"),
    "memory_breakdown": _replaced(
        Kind.SWITCH, "`MemoryMonitor` and `trainer.strategy.memory()` report bytes by kind"
    ),
    "dump_state": _replaced(Kind.SWITCH, "the units are logged once"),
    "flops_profiler": _replaced(Kind.BLOCK, "use `Trainer(profiler=...)`"),
    "comms_logger": _replaced(
        Kind.BLOCK,
        "`TrafficMonitor` logs what is sent; `Trainer(profiler='pytorch')` names every message",
    ),
    "monitor_config": _replaced(Kind.BLOCK, _LOGGERS),
    "tensorboard": _replaced(Kind.BLOCK, _LOGGERS),
    "wandb": _replaced(Kind.BLOCK, _LOGGERS),
    "comet": _replaced(Kind.BLOCK, _LOGGERS),
    "csv_monitor": _replaced(Kind.BLOCK, _LOGGERS),
    "compile": _replaced(Kind.BLOCK, "use `torch.compile(module)`"),
    "autotuning": _refused(Kind.BLOCK, "autotuning is not supported; remove the key"),
    "elasticity": _refused(Kind.BLOCK, "`torchrun` restarts ranks; remove the key"),
    "sparse_attention": _refused(Kind.BLOCK, "attention belongs to the model; remove the key"),
    "data_efficiency": _refused(Kind.BLOCK, _SAMPLING),
    "curriculum_learning": _refused(Kind.BLOCK, _SAMPLING),
    "compression_training": _refused(Kind.BLOCK, _COMPRESSION),
    "progressive_layer_drop": _refused(Kind.BLOCK, "layers belong to the model; remove the key"),
    "eigenvalue": _refused(Kind.BLOCK, _COMPRESSION),
    "quantize_training": _refused(Kind.BLOCK, _COMPRESSION),
    "hybrid_engine": _refused(Kind.BLOCK, _PARALLEL),
    "pipeline": _refused(Kind.BLOCK, _PARALLEL),
    "tensor_parallel.autotp_size": _acts(
        Kind.NUMBER, "`tensor_parallel_size`, for models with a `tp_plan` or cut by you"
    ),
    "sequence_parallel_size": _refused(Kind.NUMBER, _PARALLEL),
    "use_data_before_expert_parallelism": _refused(Kind.SWITCH, _PARALLEL),
}
"""Every key of a DeepSpeed configuration; a dot leads into a block."""


def table() -> str:
    """Return the keys as a table in Markdown; those of a block with one fate share a row."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, key in KEYS.items():
        block, _, last = name.rpartition(".")
        names = alike.setdefault((block, key.fate.value, key.becomes), [])
        names.append(f"`{last if names else name}`")
    rows = [
        f"| {', '.join(names)} | {fate} | {becomes} |"
        for (_, fate, becomes), names in alike.items()
    ]
    return "\n".join(
        ["| key | fate | what it becomes, or what replaces it |", "|---|---|---|", *rows]
    )


def suggestion(given: Iterable[str], names: Mapping[str, str]) -> str:
    """Return a question that suggests the value of the first key close to one of ``given``."""
    for name in given:
        for close in difflib.get_close_matches(name, list(names), 1):
            return f" Did you mean {names[close]!r}?"
    return ""
