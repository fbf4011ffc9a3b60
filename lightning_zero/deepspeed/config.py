"""A DeepSpeed configuration, read as arguments of the strategy and demands on the Trainer.

No key is ignored silently: ``keys.KEYS`` holds the fate of each, and a warning names others at the
top level, which DeepSpeed ignores. ``"auto"`` and ``null`` mean the same as leaving the key out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_zero.deepspeed.keys import KEYS, Fate, Kind, suggestion
from lightning_zero.deepspeed.optimizer_block import OptimizerBlock, SchedulerBlock
from lightning_zero.plan import Settings, as_dtype

_ALIASES = {"bfloat16": "bf16"}
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_DEFAULTS = {
    **vars(Settings()),
    "offload_optimizer": None,
    "offload_weights": None,
    "offload_path": None,
}
"""Defaults of the strategy's arguments."""
_PRECISIONS = {"bf16": ("bf16-mixed", "bf16-true"), "fp16": ("16-mixed", "16-true")}


@dataclass
class Config:
    """The settings that a configuration asks for.

    Attributes:
        arguments: Arguments of the strategy.
        trainer: The Trainer's arguments ``gradient_clip_val`` and ``accumulate_grad_batches``.
        scaler: Attributes of the loss scaler.
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
            ValueError: A key in a block is unknown, or a key has a wrong value or asks for what is
                not supported.
        """
        config = cls()
        if source is None:
            return config
        config.is_given = True
        given = _load(source)
        blocks = {key.partition(".")[0] for key in KEYS}
        unknown = [name for name in given if _ALIASES.get(name, name) not in blocks]
        for name in unknown:
            config.warnings.append(
                f"The DeepSpeed configuration has an unknown key {name!r}, which has no effect."
                f"{_near(name)}"
            )
        known = {name: value for name, value in given.items() if name not in unknown}
        for name, value in _leaves(known):
            config._take(name, value)
        sums = config.arguments.get("reduce_dtype")
        if "reduce_bits" in config.arguments and sums is torch.float32:
            del config.arguments["reduce_dtype"]
            config.warnings.append(
                'communication_data_type in the DeepSpeed configuration is "fp32", beside'
                " zero_quantized_gradients: gradients travel in 8 bits and are summed in fp32."
            )
        if config.enabled.get("bf16") and config.enabled.get("fp16"):
            raise ValueError(
                "bf16.enabled and fp16.enabled are both true in the DeepSpeed configuration, but a"
                " run has one precision. Remove one of them."
            )
        return config

    def _take(self, name: str, value: Any) -> None:
        key = KEYS[name]
        if value is None or value == "auto":
            return
        _check_kind(name, key.kind, value)
        if key.fate is Fate.ACTS:
            _ACTIONS[name](self, value)
            return
        if value == key.fitting if key.fate is Fate.ALWAYS else _is_off(value):
            return
        if key.fate is not Fate.REFUSED:
            self._warn(name, value)
            return
        raise ValueError(
            f"{name} in the DeepSpeed configuration is {_shown(value)}, but {key.becomes}."
        )

    def _warn(self, name: str, value: Any) -> None:
        self.warnings.append(
            f"{name} in the DeepSpeed configuration is {_shown(value)} and has no effect:"
            f" {KEYS[name].becomes}."
        )

    # -- the keys that act -----------------------------------------------------------------------

    def _take_stage(self, value: Any) -> None:
        cure = " For stage 0, use Trainer(strategy='ddp')."
        self.arguments["stage"] = _among((1, 2, 3), "zero_optimization.stage", value, cure)

    def _take_prefetch(self, value: Any) -> None:
        if value == 0:
            self.arguments["prefetch"] = 0
        else:
            self._warn("zero_optimization.stage3_prefetch_bucket_size", value)

    def _take_dtype(self, value: Any) -> None:
        name = _among(_DTYPES, "communication_data_type", value)
        self.arguments["reduce_dtype"] = _DTYPES[name]

    def _take_medium(self, block: str, argument: str, value: Any) -> None:
        _among(("none", "cpu", "nvme"), f"zero_optimization.{block}.device", value)
        if value != "none":
            self.arguments[argument] = value

    def _take_ratio(self, value: Any) -> None:
        if value != 1:
            raise ValueError(
                "zero_optimization.offload_optimizer.ratio in the DeepSpeed configuration is"
                f" {_shown(value)}, but the optimizer is offloaded as a whole or not at all. Remove"
                " the key, or the block to offload nothing."
            )

    def _take_path(self, value: Any) -> None:
        if self.arguments.setdefault("offload_path", value) != value:
            raise ValueError(
                "nvme_path differs between offload_optimizer and offload_param in the DeepSpeed"
                " configuration, but all files go into one folder. Use the same path for both."
            )

    def _take_loss_scale(self, value: Any) -> None:
        if value:
            self.scaler.update(scale=float(value), growth_factor=1.0, backoff_factor=1.0)

    def _take_optimizer(self, value: Any) -> None:
        if value:
            self.optimizer = OptimizerBlock.read(value)

    def _take_scheduler(self, value: Any) -> None:
        if value:
            self.scheduler = SchedulerBlock.read(value)

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
                    f"{name}.enabled in the DeepSpeed configuration is {_shown(is_enabled)}, but"
                    f" the Trainer's precision is {precision!r}. Use {cure}, or remove the key."
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


Action = Callable[[Config, Any], Any]


def _sets(argument: str, *, above: int = 0, to: int | None = None) -> Action:
    """Return an action that sets an argument to a value ``above`` a number, or to ``to``."""

    def act(config: Config, value: Any) -> None:
        if value > above:
            config.arguments[argument] = int(value) if to is None else to

    return act


def _sets_medium(block: str, argument: str) -> Action:
    return lambda config, value: config._take_medium(block, argument, value)


_ACTIONS: dict[str, Action] = {
    "zero_optimization.stage": Config._take_stage,
    "zero_optimization.stage3_prefetch_bucket_size": Config._take_prefetch,
    "zero_optimization.mics_shard_size": _sets("shard"),
    "zero_optimization.zero_quantized_weights": _sets("gather_bits", to=8),
    "zero_optimization.zero_quantized_gradients": _sets("reduce_bits", to=8),
    "zero_optimization.offload_optimizer.device": _sets_medium(
        "offload_optimizer", "offload_optimizer"
    ),
    "zero_optimization.offload_optimizer.ratio": Config._take_ratio,
    "zero_optimization.offload_param.device": _sets_medium("offload_param", "offload_weights"),
    "zero_optimization.offload_optimizer.nvme_path": Config._take_path,
    "zero_optimization.offload_param.nvme_path": Config._take_path,
    "tensor_parallel.autotp_size": _sets("tensor_parallel_size", above=1),
    "communication_data_type": Config._take_dtype,
    "optimizer": Config._take_optimizer,
    "scheduler": Config._take_scheduler,
    "bf16.enabled": lambda config, value: config.enabled.update(bf16=value),
    "fp16.enabled": lambda config, value: config.enabled.update(fp16=value),
    "fp16.loss_scale": Config._take_loss_scale,
    "fp16.initial_scale_power": lambda config, value: config.scaler.setdefault("scale", 2.0**value),
    "fp16.loss_scale_window": lambda config, value: config.scaler.update(
        growth_interval=int(value)
    ),
    "gradient_clipping": lambda config, value: config.trainer.update(
        {"gradient_clip_val": float(value)} if value else {}
    ),
    "gradient_accumulation_steps": lambda config, value: config.trainer.update(
        accumulate_grad_batches=int(value)
    ),
}


def _agreed(said: str, given: Any, wanted: Any, default: Any) -> Any:
    """Return ``wanted``; raise a ``ValueError`` if ``given`` is neither that nor the default."""
    if given not in (wanted, default):
        raise ValueError(
            f"{said} contradicts the DeepSpeed configuration, which sets {wanted!r}. Remove one of"
            " them."
        )
    return wanted


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
    """Yield every known key with its value, entering blocks that have no key of their own."""
    for name, value in block.items():
        full_name = path + _ALIASES.get(name, name)
        if full_name in KEYS:
            yield full_name, value
            continue
        if not any(key.startswith(f"{full_name}.") for key in KEYS):
            raise ValueError(
                f"The DeepSpeed configuration has an unknown key {path + name!r}.{_near(full_name)}"
            )
        if value is not None:
            _check_kind(full_name, Kind.BLOCK, value)
            is_off = value.get("enabled") is False or value.get("device") == "none"
            for key, inner in _leaves(value, f"{full_name}."):
                yield key, None if is_off and not key.endswith(".enabled") else inner


def _near(name: str) -> str:
    """Suggest the known key nearest to ``name``, or else to its last part."""
    last = name.rpartition(".")[2]
    tails = {key.rpartition(".")[2]: key for key in KEYS}
    blocks = {key.partition(".")[0]: key.partition(".")[0] for key in KEYS}
    names = {**blocks, **tails, **{key: key for key in KEYS}}
    return suggestion((name, last), names) or " Remove it."


def _check_kind(name: str, kind: Kind, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = {
        Kind.SWITCH: isinstance(value, bool),
        Kind.NUMBER: is_number and (value >= 0 or name.endswith("mics_shard_size")),
        Kind.TEXT: isinstance(value, str),
        Kind.BLOCK: isinstance(value, Mapping),
    }
    if not fits[kind]:
        raise ValueError(
            f"Expected {name} in the DeepSpeed configuration to be {kind.value}, got {value!r}."
        )


def _is_off(value: Any) -> bool:
    """Return whether a value turns its key off."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False or value.get("device") in ("none", "auto")
    return value is False or value in (0, -1, "none")


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)
