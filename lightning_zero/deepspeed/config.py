"""A DeepSpeed configuration, read as arguments of the strategy and of the Trainer.

``ACTING`` holds the keys that act and ``REFUSED`` those that would change the results; every other
key has no effect, and one warning names all of them. ``"auto"``, ``null`` and values that turn a
key off mean the same as leaving the key out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_zero.deepspeed.optimizer_block import OptimizerBlock, SchedulerBlock
from lightning_zero.plan import Settings, as_dtype, suggestion

_ALIASES = {"bfloat16": "bf16"}
_DEFAULTS = {
    **vars(Settings()),
    "offload_optimizer": None,
    "offload_weights": None,
    "offload_path": None,
}
"""Defaults of the strategy's arguments."""
_MEDIA = ("none", "cpu", "nvme")
_PRECISIONS = {"bf16": ("bf16-mixed", "bf16-true"), "fp16": ("16-mixed", "16-true")}


@dataclass
class Config:
    """The settings that a configuration asks for.

    Attributes:
        arguments: Arguments of the strategy.
        trainer: The Trainer's arguments ``gradient_clip_val`` and ``accumulate_grad_batches``.
        scaler: Entries of the loss scaler's state.
        optimizer: The optimizer to build, unless it is the module's.
        scheduler: The scheduler to build, unless it is the module's.
        enabled: Whether ``bf16`` and ``fp16`` are on; without entries for those not mentioned.
        warnings: Sentences about keys without effect and about a missing stage.
        is_given: Whether there is a configuration at all.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, float] = field(default_factory=dict)
    optimizer: OptimizerBlock | None = None
    scheduler: SchedulerBlock | None = None
    enabled: dict[str, bool] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    is_given: bool = field(default=False, compare=False)

    @classmethod
    def read(cls, source: str | Path | Mapping[str, Any] | None) -> Config:
        """Read a JSON file or a dictionary; ``None`` asks for nothing.

        Raises:
            ValueError: A key has a wrong value, is refused, or looks like a typing error.
        """
        config = cls()
        if source is None:
            return config
        config.is_given = True
        idle = [name for name, value in _leaves(_load(source)) if not config._take(name, value)]
        if idle:
            config.warnings.append(
                "These keys of the DeepSpeed configuration have no effect: " + ", ".join(idle) + "."
            )
        sums = config.arguments.get("reduce_dtype")
        if "reduce_bits" in config.arguments and sums is torch.float32:
            # Gradients in 8 bits are summed in fp32 in any case.
            del config.arguments["reduce_dtype"]
        if config.enabled.get("bf16") and config.enabled.get("fp16"):
            raise ValueError(
                "bf16.enabled and fp16.enabled are both true in the DeepSpeed configuration, but a"
                " run has one precision. Remove one of them."
            )
        return config

    def _take(self, name: str, value: Any) -> bool:
        """Apply a key; return ``False`` if it asks for something and has no effect."""
        if value is None or value == "auto":
            return True
        if name in ACTING:
            kind, act = ACTING[name]
            _check_kind(name, kind, value)
            return act(self, value) is not False
        if name in REFUSED:
            if not _is_off(value) and value != _NEUTRAL.get(name):
                raise ValueError(
                    f"{name} in the DeepSpeed configuration is {json.dumps(value, default=str)},"
                    f" which is not supported and would change the run. {REFUSED[name]}"
                )
            return True
        block, _, last = name.rpartition(".")
        alike = {
            key.rpartition(".")[2]: key for key in _NAMES if block in ("", key.rpartition(".")[0])
        }
        if near := suggestion(last, alike, 0.85):
            raise ValueError(f"The DeepSpeed configuration has an unknown key {name!r}.{near}")
        return _is_off(value) or (name in _ALWAYS and value is True)

    # -- the keys that act -----------------------------------------------------------------------

    def _take_stage(self, value: Any) -> None:
        cure = " For stage 0, use Trainer(strategy='ddp')."
        self.arguments["stage"] = _among((1, 2, 3), "zero_optimization.stage", value, cure)

    def _take_prefetch(self, value: Any) -> bool:
        if value == 0:
            self.arguments["prefetch"] = 0
        return bool(value == 0)

    def _take_dtype(self, value: Any) -> None:
        name = _among(("fp32", "fp16", "bf16"), "communication_data_type", value)
        self.arguments["reduce_dtype"] = as_dtype(name)

    def _take_optimizer_device(self, value: Any) -> None:
        _among(_MEDIA, f"{_ZERO}offload_optimizer.device", value)
        self.arguments |= {} if value == "none" else {"offload_optimizer": value}

    def _take_weights_device(self, value: Any) -> None:
        _among(_MEDIA, f"{_ZERO}offload_param.device", value)
        self.arguments |= {} if value == "none" else {"offload_weights": value}

    def _take_path(self, value: Any) -> None:
        if self.arguments.setdefault("offload_path", value) != value:
            raise ValueError(
                "nvme_path differs between offload_optimizer and offload_param in the DeepSpeed"
                " configuration, but all files go into one folder. Use the same path for both."
            )

    def _take_loss_scale(self, value: Any) -> None:
        if value:
            self.scaler.update(scale=float(value), growth_factor=1.0, backoff_factor=1.0)

    # -- the strategy and the Trainer ------------------------------------------------------------

    def merged(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the strategy's arguments, of which the user gave ``given``.

        Warns of a configuration without a stage, which DeepSpeed reads as stage 0.

        Raises:
            ValueError: One of them contradicts the configuration.
        """
        found = {**given, "reduce_dtype": as_dtype(given.get("reduce_dtype"))}
        wanted = dict(self.arguments)
        for name, value in wanted.items():
            default = _DEFAULTS[name]
            own = found.get(name, default)
            found[name] = _agreed(f"{name}={own!r}", own, value, default)
        stage = found.setdefault("stage", _DEFAULTS["stage"])
        if self.is_given and "stage" not in wanted and stage == _DEFAULTS["stage"]:
            self.warnings.append(
                "zero_optimization.stage is missing from the DeepSpeed configuration. DeepSpeed"
                f" would use stage 0; ZeROStrategy(stage={stage}) is used here. Set it in the"
                " configuration."
            )
        return found

    def check_precision(self, precision: str) -> None:
        """Raise a ``ValueError`` if the Trainer's ``precision`` contradicts the configuration."""
        for name, is_enabled in self.enabled.items():
            names = _PRECISIONS[name]
            if (precision in names) != is_enabled:
                cure = f"Trainer(precision={names[0]!r})" if is_enabled else "precision='32-true'"
                raise ValueError(
                    f"{name}.enabled in the DeepSpeed configuration is {json.dumps(is_enabled)},"
                    f" but the Trainer's precision is {precision!r}. Use {cure}, or remove the key."
                )

    def trainer_value(self, name: str, given: Any, default: Any) -> Any:
        """Return the required value of the Trainer's argument ``name``, which was ``given``."""
        wanted = self.trainer.get(name, given)
        return _agreed(f"Trainer({name}={given!r})", given, wanted, default)


def _among(choices: Collection[Any], name: str, value: Any, cure: str = "") -> Any:
    if value not in choices:
        raise ValueError(
            f"Expected {name} in the DeepSpeed configuration among"
            f" {', '.join(map(str, choices))}, got {value!r}.{cure}"
        )
    return value


def _agreed(said: str, given: Any, wanted: Any, default: Any) -> Any:
    """Return ``wanted``; raise a ``ValueError`` if ``given`` is neither that nor the default."""
    if given not in (wanted, default):
        raise ValueError(
            f"{said} contradicts the DeepSpeed configuration, which sets {wanted!r}. Remove one of"
            " them."
        )
    return wanted


# -- the keys --------------------------------------------------------------------------------------

Action = Callable[[Config, Any], Any]
"""Applies a value; returns ``False`` if it has no effect."""


def _sets(argument: str, *, above: int = 0, to: int | None = None) -> Action:
    """Return an action that sets an argument to a value ``above`` a number, or to ``to``."""

    def act(config: Config, value: Any) -> None:
        if value > above:
            config.arguments[argument] = int(value) if to is None else to

    return act


def _reads(attribute: str, kind: type[OptimizerBlock] | type[SchedulerBlock]) -> Action:
    return lambda config, value: vars(config).update({attribute: kind.read(value)} if value else {})


_SWITCH, _NUMBER, _TEXT, _BLOCK = "a boolean", "a non-negative number", "a string", "an object"
_ZERO = "zero_optimization."

ACTING: dict[str, tuple[str, Action]] = {
    f"{_ZERO}stage": (_NUMBER, Config._take_stage),
    f"{_ZERO}stage3_prefetch_bucket_size": (_NUMBER, Config._take_prefetch),
    f"{_ZERO}mics_shard_size": (_NUMBER, _sets("shard")),
    f"{_ZERO}zero_quantized_weights": (_SWITCH, _sets("gather_bits", to=8)),
    f"{_ZERO}zero_quantized_gradients": (_SWITCH, _sets("reduce_bits", to=8)),
    f"{_ZERO}offload_optimizer.device": (_TEXT, Config._take_optimizer_device),
    f"{_ZERO}offload_optimizer.nvme_path": (_TEXT, Config._take_path),
    f"{_ZERO}offload_param.device": (_TEXT, Config._take_weights_device),
    f"{_ZERO}offload_param.nvme_path": (_TEXT, Config._take_path),
    "tensor_parallel.autotp_size": (_NUMBER, _sets("tensor_parallel_size", above=1)),
    "communication_data_type": (_TEXT, Config._take_dtype),
    "optimizer": (_BLOCK, _reads("optimizer", OptimizerBlock)),
    "scheduler": (_BLOCK, _reads("scheduler", SchedulerBlock)),
    "bf16.enabled": (_SWITCH, lambda c, v: c.enabled.update(bf16=v)),
    "fp16.enabled": (_SWITCH, lambda c, v: c.enabled.update(fp16=v)),
    "fp16.loss_scale": (_NUMBER, Config._take_loss_scale),
    "fp16.initial_scale_power": (_NUMBER, lambda c, v: c.scaler.setdefault("scale", 2.0**v)),
    "fp16.loss_scale_window": (_NUMBER, lambda c, v: c.scaler.update(growth_interval=int(v))),
    "gradient_clipping": (_NUMBER, lambda c, v: v and c.trainer.update(gradient_clip_val=float(v))),
    "gradient_accumulation_steps": (
        _NUMBER,
        lambda c, v: c.trainer.update(accumulate_grad_batches=int(v)),
    ),
}
"""The kind of value and the action of every key that acts; a dot leads into a block."""

_OFFLOAD_BLOCKS = "Use the blocks `offload_optimizer` and `offload_param`."
_PRECISION = "Use Trainer(precision=...), and remove the key."
_OF_THE_MODEL = "It belongs to the model or its data. Remove the key."
_PARALLEL = "Only data and tensor parallelism are supported. Remove the key."

REFUSED: dict[str, str] = {
    f"{_ZERO}cpu_offload": _OFFLOAD_BLOCKS,
    f"{_ZERO}cpu_offload_param": _OFFLOAD_BLOCKS,
    f"{_ZERO}offload_optimizer.ratio": "The optimizer is offloaded as a whole. Remove the key.",
    f"{_ZERO}zenflow": "A step updates all parameters. Remove the key.",
    f"{_ZERO}zero_quantized_nontrainable_weights": "Use `zero_quantized_weights`, for all weights.",
    f"{_ZERO}zeropp_loco_param": "Gradients are rounded stochastically. Remove the key.",
    "bf16.bf16_master_weights_and_grads": "Use Trainer(precision='bf16-true') for no fp32 masters.",
    "bf16.bf16_optimizer_states": "Use Trainer(precision='bf16-true') for no fp32 states.",
    "fp16.fp16_master_weights_and_grads": "Use Trainer(precision='16-true') for no fp32 masters.",
    "amp": _PRECISION,
    "torch_autocast": _PRECISION,
    "sparse_attention": _OF_THE_MODEL,
    "data_efficiency": _OF_THE_MODEL,
    "curriculum_learning": _OF_THE_MODEL,
    "compression_training": _OF_THE_MODEL,
    "quantize_training": _OF_THE_MODEL,
    "progressive_layer_drop": _OF_THE_MODEL,
    "elasticity": "The DataLoader sets the batch size; torchrun restarts ranks. Remove the key.",
    "hybrid_engine": _PARALLEL,
    "pipeline.stages": _PARALLEL,
    "sequence_parallel_size": _PARALLEL,
    "use_data_before_expert_parallelism": _PARALLEL,
}
"""The remedy for every key that would change the run and is not supported."""

_NAMES = {
    ".".join(key.split(".")[: depth + 1])
    for key in (*ACTING, *REFUSED)
    for depth in range(key.count(".") + 1)
}
"""The known keys, and the blocks that hold them."""

_NEUTRAL = {
    "sequence_parallel_size": 1,
    "pipeline.stages": 1,
    f"{_ZERO}offload_optimizer.ratio": 1,
}
"""Values of ``REFUSED`` keys that ask for nothing, beside those that every key has."""

_ALWAYS = {
    *("managed_gradient_accumulation", f"{_ZERO}overlap_comm", f"{_ZERO}contiguous_gradients"),
    *(f"{_ZERO}reduce_scatter", f"{_ZERO}allgather_partitions", f"{_ZERO}elastic_checkpoint"),
    *(f"{_ZERO}load_from_fp32_weights", f"{_ZERO}ignore_unused_parameters"),
    f"{_ZERO}stage3_gather_16bit_weights_on_model_save",
    f"{_ZERO}stage3_gather_fp16_weights_on_model_save",
    *(f"{_ZERO}offload_optimizer.pin_memory", f"{_ZERO}offload_param.pin_memory"),
}
"""Keys whose value ``true`` describes what this package does in any case."""


def _load(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    try:
        loaded = json.loads(Path(source).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"Expected config to be a dictionary or the path of a DeepSpeed JSON file, got"
            f" {str(source)!r}: {error}."
        ) from error
    if not isinstance(loaded, dict):
        raise ValueError(f"Expected an object in the DeepSpeed file {source}, got {loaded!r}.")
    return loaded


def _leaves(block: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key with its value, entering the blocks that hold known keys."""
    for name, value in block.items():
        full_name = path + _ALIASES.get(name, name)
        if full_name not in _NAMES or full_name in ACTING or full_name in REFUSED:
            yield full_name, value
        elif value not in (None, "auto"):
            _check_kind(full_name, _BLOCK, value)
            is_off = value.get("enabled") is False or value.get("device") == "none"
            for key, inner in _leaves(value, f"{full_name}."):
                yield key, None if is_off and not key.endswith(".enabled") else inner


def _check_kind(name: str, kind: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = {
        _SWITCH: isinstance(value, bool),
        _NUMBER: is_number and (value >= 0 or name.endswith("mics_shard_size")),
        _TEXT: isinstance(value, str),
        _BLOCK: isinstance(value, Mapping),
    }
    if not fits[kind]:
        raise ValueError(
            f"Expected {name} in the DeepSpeed configuration to be {kind}, got {value!r}."
        )


def _is_off(value: Any) -> bool:
    """Return whether a value, or every value of a block, turns its key off."""
    if isinstance(value, Mapping):
        is_disabled = value.get("enabled") is False or value.get("device") == "none"
        return is_disabled or all(_is_off(inner) for inner in value.values())
    return value is None or value is False or value in (0, -1, "none", "auto")
