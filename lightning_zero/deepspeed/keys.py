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

    ACTS = "acts"
    """Becomes an argument, a demand on the Trainer, or a number of the loss scaler."""
    ALWAYS = "always so"
    """Holds in any case; a warning only if the value asks for something else."""
    REPLACED = "replaced"
    """Has no effect; a warning names the replacement, unless the value turns the key off."""
    REFUSED = "refused"
    """Raises an error that names the cure, unless the value turns the key off."""


class Kind(Enum):
    """The kind of a value, in words."""

    SWITCH = "true or false"
    NUMBER = "a number that is not negative"
    TEXT = "a text"
    BLOCK = "a block of keys"


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


_UNITS = "`units` chooses what is gathered and reduced together; one unit is one message"
_LOGGERS = "Lightning's loggers and callbacks log"
_DATA = "the DataLoader's `batch_size` decides"
_PARALLEL = "only data parallelism exists here; take the key out"
_OFFLOAD_SWITCH = "blocks say what is offloaded: write `offload_optimizer` and `offload_param`"
_ZENFLOW = "every step is whole: nothing is stepped later than the rest; take the key out"
_MEDIUM = "`none`, `cpu` (the host of an accelerator) or `nvme`"
_MAPPED = "files are mapped, and the system decides what it keeps in memory"
_STAGED = "states in files are always read and written beside the step, six batches in memory"
_PATH = "`offload_path`; without offload to `nvme` it is refused"

_OFFLOAD_BLOCK = {
    "nvme_path": _acts(Kind.TEXT, _PATH),
    "pin_memory": _replaced(Kind.SWITCH, "what a GPU reads of its host's memory is always pinned"),
}
_WHOLE = "a checkpoint holds whole tensors at every stage, in the master's precision"
_SMALL = "modules too small for a message of their own stay with the unit around them"
_AVERAGED = "gradients are averaged in the pass that copies or in fp32"
_BACKS_OFF = "the loss scale backs off at every overflow"
_NO_QUANTIZED = "`zero_quantized_weights` is for all weights; take the key out"
_NO_FEEDBACK = "`error_feedback=True` adds errors to the next gradients whole; take the key out"

_ZERO_OPTIMIZATION = {
    "stage": _acts(Kind.NUMBER, "`stage`; 0 is `strategy='ddp'`"),
    "overlap_comm": _always("reductions run behind the backward pass"),
    "contiguous_gradients": _always("gradients lie in one buffer per unit"),
    "reduce_scatter": _always("gradients are reduced and scattered at once"),
    "allgather_partitions": _always("weights are gathered in one message"),
    "load_from_fp32_weights": _always("masters are read from the checkpoint"),
    "ignore_unused_parameters": _always("unused parameters count as zero"),
    "elastic_checkpoint": _always("a checkpoint fits any number of ranks"),
    "stage3_gather_16bit_weights_on_model_save": _always(_WHOLE),
    "stage3_gather_fp16_weights_on_model_save": _always(_WHOLE),
    "stage3_prefetch_bucket_size": _acts(
        Kind.NUMBER, "0 is `prefetch=0`; else `prefetch` counts units, not elements"
    ),
    "reduce_bucket_size": _replaced(Kind.NUMBER, _UNITS),
    "allgather_bucket_size": _replaced(Kind.NUMBER, _UNITS),
    "sub_group_size": _replaced(Kind.NUMBER, _UNITS),
    "use_multi_rank_bucket_allreduce": _replaced(Kind.SWITCH, _UNITS),
    "round_robin_gradients": _replaced(Kind.SWITCH, _UNITS),
    "stage3_param_persistence_threshold": _replaced(Kind.NUMBER, _SMALL),
    "stage3_model_persistence_threshold": _replaced(Kind.NUMBER, _SMALL),
    "stage3_max_live_parameters": _replaced(
        Kind.NUMBER, "`units` and `prefetch` bound what is whole at the same time"
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
    "leaf_module": _replaced(Kind.BLOCK, "`units` takes module classes"),
    "memory_efficient_linear": _replaced(
        Kind.SWITCH, "autograd's saved weights are freed without another `Linear`"
    ),
    "override_module_apply": _replaced(
        Kind.SWITCH, "`lightning_zero.gathered(module, modify=True)` makes weights editable"
    ),
    "pipeline_loading_checkpoint": _replaced(
        Kind.SWITCH, "a checkpoint is loaded by all ranks at once"
    ),
    "log_trace_cache_warnings": _replaced(Kind.SWITCH, "no trace exists that could become invalid"),
    "enable_sanity_checks": _replaced(
        Kind.SWITCH, "errors name the parameter and the cure without a switch"
    ),
    "save_muon_momentum_buffer_in_memory": _refused(
        Kind.SWITCH, "a Muon's momentum stays with the rank that owns a parameter; take the key out"
    ),
    "legacy_stage1": _replaced(Kind.SWITCH, "there is one stage 1"),
    "offload_optimizer.device": _acts(Kind.TEXT, f"`offload_optimizer`: {_MEDIUM}"),
    **{f"offload_optimizer.{name}": key for name, key in _OFFLOAD_BLOCK.items()},
    "offload_optimizer.buffer_count": _replaced(Kind.NUMBER, _STAGED),
    "offload_optimizer.pipeline": _replaced(Kind.SWITCH, _STAGED),
    "offload_optimizer.pipeline_read": _replaced(Kind.SWITCH, _STAGED),
    "offload_optimizer.pipeline_write": _replaced(Kind.SWITCH, _STAGED),
    "offload_optimizer.fast_init": _replaced(Kind.SWITCH, "files are made without being written"),
    "offload_optimizer.ratio": _acts(Kind.NUMBER, "`offload_ratio`, at every stage"),
    "offload_param.device": _acts(Kind.TEXT, f"`offload_weights`: {_MEDIUM}"),
    **{f"offload_param.{name}": key for name, key in _OFFLOAD_BLOCK.items()},
    "offload_param.buffer_count": _replaced(Kind.NUMBER, _MAPPED),
    "offload_param.buffer_size": _replaced(Kind.NUMBER, _MAPPED),
    "offload_param.max_in_cpu": _replaced(Kind.NUMBER, _MAPPED),
    "cpu_offload": _refused(Kind.SWITCH, _OFFLOAD_SWITCH),
    "cpu_offload_param": _refused(Kind.SWITCH, _OFFLOAD_SWITCH),
    "cpu_offload_use_pin_memory": _refused(Kind.SWITCH, _OFFLOAD_SWITCH),
    "zenflow": _refused(Kind.BLOCK, _ZENFLOW),
    "zero_hpz_partition_size": _acts(Kind.NUMBER, "`backward_shard`; 1 is none"),
    "zero_quantized_weights": _acts(Kind.SWITCH, "`gather_bits=8`"),
    "zero_quantized_nontrainable_weights": _refused(Kind.SWITCH, _NO_QUANTIZED),
    "zero_quantized_gradients": _acts(Kind.SWITCH, "`reduce_bits=8`"),
    "zeropp_loco_param": _refused(Kind.BLOCK, _NO_FEEDBACK),
    "mics_shard_size": _acts(Kind.NUMBER, "`shard`, the ranks of one copy; -1 is all"),
    "mics_hierarchical_params_gather": _replaced(
        Kind.SWITCH, "`shard` says over which ranks weights are gathered, in one step"
    ),
}

KEYS: dict[str, Key] = {
    **{f"zero_optimization.{name}": key for name, key in _ZERO_OPTIMIZATION.items()},
    "zero_allow_untested_optimizer": _replaced(
        Kind.SWITCH,
        "how an optimizer may be stepped is proved from its own operations on toy tensors",
    ),
    "zero_force_ds_cpu_optimizer": _replaced(Kind.SWITCH, "the optimizer is torch's or your own"),
    "bf16.enabled": _acts(Kind.SWITCH, "must agree with `Trainer(precision=...)`"),
    "bf16.immediate_grad_update": _replaced(
        Kind.SWITCH, "each gradient moves into its unit's buffer as it appears"
    ),
    "bf16.check_grad_overflow": _replaced(
        Kind.SWITCH, "`Trainer(detect_anomaly=True)` finds gradients that are not finite"
    ),
    "bf16.bf16_master_weights_and_grads": _refused(
        Kind.SWITCH, "`Trainer(precision='bf16-true')` has no fp32 masters; take the key out"
    ),
    "bf16.bf16_optimizer_states": _refused(
        Kind.SWITCH, "`Trainer(precision='bf16-true')` has no fp32 states; take the key out"
    ),
    "fp16.enabled": _acts(Kind.SWITCH, "must agree with `Trainer(precision=...)`"),
    "fp16.loss_scale": _acts(Kind.NUMBER, "a loss scale that never changes; 0 is a dynamic one"),
    "fp16.initial_scale_power": _acts(Kind.NUMBER, "the first loss scale, as a power of 2"),
    "fp16.loss_scale_window": _acts(Kind.NUMBER, "steps after which the loss scale grows"),
    "fp16.auto_cast": _replaced(Kind.SWITCH, "autocast casts inputs as they are used"),
    "fp16.hysteresis": _replaced(Kind.NUMBER, _BACKS_OFF),
    "fp16.consecutive_hysteresis": _replaced(Kind.SWITCH, _BACKS_OFF),
    "fp16.min_loss_scale": _replaced(Kind.NUMBER, "the loss scale has no lower bound"),
    "fp16.fp16_master_weights_and_grads": _refused(
        Kind.SWITCH, "`Trainer(precision='16-true')` has no fp32 masters; take the key out"
    ),
    "amp": _refused(Kind.BLOCK, "write `Trainer(precision='16-mixed')`, and take the key out"),
    "torch_autocast": _replaced(Kind.BLOCK, "`Trainer(precision='bf16-mixed')` autocasts"),
    "gradient_clipping": _acts(
        Kind.NUMBER, "`Trainer(gradient_clip_val=...)`, by norm, unless the Trainer has its own"
    ),
    "gradient_accumulation_steps": _acts(
        Kind.NUMBER, "must agree with `Trainer(accumulate_grad_batches=...)`"
    ),
    "managed_gradient_accumulation": _always("the Trainer counts microbatches"),
    "train_batch_size": _replaced(Kind.NUMBER, _DATA),
    "train_micro_batch_size_per_gpu": _replaced(Kind.NUMBER, _DATA),
    "dataloader_drop_last": _replaced(Kind.SWITCH, "the DataLoader's `drop_last` decides"),
    "communication_data_type": _acts(Kind.TEXT, "`reduce_dtype`: `fp32`, `fp16` or `bf16`"),
    "seq_parallel_communication_data_type": _refused(Kind.TEXT, _PARALLEL),
    "data_types.grad_accum_dtype": Key(
        Fate.ALWAYS, Kind.TEXT, "reduced gradients have the master's dtype", "fp32"
    ),
    "prescale_gradients": _replaced(Kind.SWITCH, _AVERAGED),
    "gradient_predivide_factor": _replaced(Kind.NUMBER, _AVERAGED),
    "sparse_gradients": _replaced(Kind.SWITCH, "sparse gradients are made dense"),
    "disable_allgather": _replaced(Kind.SWITCH, "weights are gathered in one message"),
    "optimizer": _acts(
        Kind.BLOCK, "torch's optimizer of that type; `configure_optimizers` returns `None`"
    ),
    "scheduler": _acts(Kind.BLOCK, "a scheduler of the one optimizer, stepped at every step"),
    "activation_checkpointing": _replaced(
        Kind.BLOCK,
        "`activation_checkpointing` takes `True` or module classes; `activation_offload`, on GPUs,"
        " is its `cpu_checkpointing`",
    ),
    "checkpoint": _replaced(
        Kind.BLOCK, "a checkpoint is one plain file or, with `checkpoint='dcp'`, a directory"
    ),
    "aio": _replaced(Kind.BLOCK, _STAGED),
    "steps_per_print": _replaced(Kind.NUMBER, "`Trainer(log_every_n_steps=...)`"),
    "wall_clock_breakdown": _replaced(Kind.SWITCH, "`Trainer(profiler=...)`"),
    "memory_breakdown": _replaced(
        Kind.SWITCH, "`MemoryMonitor` and `trainer.strategy.memory()` tell bytes by kind"
    ),
    "dump_state": _replaced(Kind.SWITCH, "the units are logged once"),
    "flops_profiler": _replaced(Kind.BLOCK, "`Trainer(profiler=...)`"),
    "comms_logger": _replaced(
        Kind.BLOCK,
        "`TrafficMonitor` logs what is sent; `Trainer(profiler='pytorch')` names every message",
    ),
    "monitor_config": _replaced(Kind.BLOCK, _LOGGERS),
    "tensorboard": _replaced(Kind.BLOCK, _LOGGERS),
    "wandb": _replaced(Kind.BLOCK, _LOGGERS),
    "comet": _replaced(Kind.BLOCK, _LOGGERS),
    "csv_monitor": _replaced(Kind.BLOCK, _LOGGERS),
    "compile": _replaced(Kind.BLOCK, "`torch.compile(module)`"),
    "autotuning": _refused(Kind.BLOCK, "nothing is tuned by trial; take the key out"),
    "elasticity": _refused(Kind.BLOCK, "`torchrun` restarts ranks; take the key out"),
    "sparse_attention": _refused(Kind.BLOCK, "attention is the model's; take the key out"),
    "data_efficiency": _refused(Kind.BLOCK, "the data are the DataLoader's; take the key out"),
    "curriculum_learning": _refused(Kind.BLOCK, "the data are the DataLoader's; take the key out"),
    "compression_training": _refused(Kind.BLOCK, "compress the model itself; take the key out"),
    "progressive_layer_drop": _refused(Kind.BLOCK, "drop layers in the model; take the key out"),
    "eigenvalue": _refused(Kind.BLOCK, "compress the model itself; take the key out"),
    "quantize_training": _refused(Kind.BLOCK, "compress the model itself; take the key out"),
    "hybrid_engine": _refused(Kind.BLOCK, _PARALLEL),
    "pipeline": _refused(Kind.BLOCK, _PARALLEL),
    "tensor_parallel": _refused(Kind.BLOCK, _PARALLEL),
    "sequence_parallel_size": _refused(Kind.NUMBER, _PARALLEL),
    "use_data_before_expert_parallelism": _refused(Kind.SWITCH, _PARALLEL),
}
"""Every key of a DeepSpeed configuration; a dot leads into a block."""


def table() -> str:
    """Return the keys as a table in Markdown, for the documentation."""
    rows = [f"| `{name}` | {key.fate.value} | {key.becomes} |" for name, key in KEYS.items()]
    return "\n".join(
        ["| key | fate | what it becomes, or what replaces it |", "|---|---|---|", *rows]
    )


def suggestion(given: Iterable[str], names: Mapping[str, str]) -> str:
    """Return a question that suggests the value of the first key close to one of ``given``."""
    for name in given:
        for close in difflib.get_close_matches(name, list(names), 1):
            return f" Did you mean {names[close]!r}?"
    return ""
