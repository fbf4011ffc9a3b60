"""The user's settings of a run, validated when they are made, and the strategies with names."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from lightning_zero.plan.plan import RECIPES, STAGES, Home, Offload, Plan, Recipe

_SENDS_LESS = "use reduce_bits=8 or reduce_dtype='bfloat16' to send less"
CURES = {
    "find_unused_parameters": "remove it: a step may leave out any parameters",
    "gradient_as_bucket_view": "remove it: no gradient is copied to a bucket",
    "static_graph": "remove it: the order of modules is learned, and may change",
    "bucket_cap_mb": "gradients are reduced unit by unit; min_num_params sets the least unit",
    "ddp_comm_hook": _SENDS_LESS,
    "ddp_comm_state": _SENDS_LESS,
    "ddp_comm_wrapper": _SENDS_LESS,
    "model_averaging_period": "remove it: every step averages gradients",
    "start_method": "use launcher='spawn', 'fork' or 'notebook'",
    "sharding_strategy": "use stage=3 for FULL_SHARD; with reshard_after_forward=False it is"
    " SHARD_GRAD_OP, with shard='node' HYBRID_SHARD",
    "auto_wrap_policy": "remove it, or name the classes in units={...}",
    "activation_checkpointing_policy": "use activation_checkpointing=True, or {...} of classes",
    "cpu_offload": "use offload_optimizer='cpu' and offload_weights='cpu'",
    "mixed_precision": "use precision='bf16-mixed' of the Trainer, or of Fabric",
    "state_dict_type": "use checkpoint='file' or checkpoint='dcp'",
    "backward_shard": "use shard='node' (hybrid sharding), which gathers within a node",
    "verify_checkpoint": "remove it: every load verifies the checksums of the whole file",
    "use_orig_params": "remove it: parameters keep their shapes",
}
"""A cure for each argument of other strategies that ours lack."""

Init = TypeVar("Init", bound=Callable[..., None])


def suggestion(given: str, names: Iterable[str], cutoff: float = 0.75) -> str:
    """Return a question that suggests the name close to ``given``, or the value of that key."""
    for close in difflib.get_close_matches(given, list(names), 1, cutoff=cutoff):
        return f" Did you mean {(names[close] if isinstance(names, Mapping) else close)!r}?"
    return ""


def refuse(names: Iterable[str], known: Iterable[str]) -> None:
    """Raise a ``TypeError`` that says what to do if one of the arguments is none of ours."""
    for name in names:
        if name in CURES:
            raise TypeError(f"ZeROStrategy has no argument {name!r}: {CURES[name]}.")
        if name not in known:
            raise TypeError(f"ZeROStrategy has no argument {name!r}.{suggestion(name, known)}")


def refuses_others(init: Init) -> Init:
    """Return a constructor with the same signature that refuses arguments of other strategies."""
    known = [*inspect.signature(init).parameters]

    @functools.wraps(init)
    def checked(*args: Any, **kwargs: Any) -> None:
        refuse(kwargs, known)
        init(*args, **kwargs)

    return cast(Init, checked)


MIN_NUMEL = 2**16
"""Default minimum of elements in a unit: below it, a collective's latency costs more."""

UnitPolicy = str | Iterable[type[nn.Module]] | Callable[[nn.Module], bool]

START_METHODS = {"subprocess": "popen", "spawn": "spawn", "fork": "fork", "notebook": "fork"}
"""Lightning's start method of each launcher."""


def _to(medium: str) -> dict[str, str]:
    return {"offload_optimizer": medium, "offload_weights": medium}


STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1": ("ZeRO stage 1", {"stage": 1}),
    "zero2": ("ZeRO stage 2", {"stage": 2}),
    "zero3": ("ZeRO stage 3", {"stage": 3}),
    "zero2_offload": (
        "ZeRO stage 2, optimizer offloaded to the host",
        {"stage": 2, "offload_optimizer": "cpu"},
    ),
    "zero3_offload": ("ZeRO stage 3, offloaded to the host", {"stage": 3, **_to("cpu")}),
    "zero3_nvme": ("ZeRO stage 3, offloaded to files", {"stage": 3, **_to("nvme")}),
}
"""The registered strategies, by name: description and arguments."""


def strategy_arguments(name: str) -> dict[str, Any]:
    """Return the arguments of a registered strategy, such as ``zero3`` or ``zero3_spawn``."""
    for launcher in START_METHODS:
        bare = name.removesuffix(f"_{launcher}")
        if bare in STRATEGIES:
            return {**STRATEGIES[bare][1], "launcher": "subprocess" if bare == name else launcher}
    raise ValueError(f"Expected a strategy among {', '.join(STRATEGIES)}, got {name!r}.")


_CHOICES: dict[str, Collection[Any]] = {
    "launcher": START_METHODS,
    "checkpoint": ("file", "dcp"),
    "stage": STAGES,
    "cast_weights": ("autocast", "all", "none"),
    "gather_bits": (8, None),
    "reduce_bits": (8, None),
    "accumulate": (None, "reduce", "local"),
}
"""The values that settings may have."""

_COUNTED = {"prefetch": "units", "min_num_params": "parameters"}
_GROUPS = {"shard": "all", "tensor_parallel_size": 1}
_STEPS = ("element", "parameter", "model")


@dataclass(frozen=True)
class Settings:
    """The user's settings of a run; ``ZeROStrategy`` documents each of them."""

    stage: int = 3
    recipe: Recipe = RECIPES["32-true"]
    units: UnitPolicy = "auto"
    prefetch: int = 1
    reshard_after_forward: bool = True
    reduce_dtype: torch.dtype | None = None
    cast_weights: str = "autocast"
    min_num_params: int = MIN_NUMEL
    accumulate: str | None = None
    broadcast_buffers: bool = True
    shard: int | str = "all"
    tensor_parallel_size: int | str = 1
    gather_bits: int | None = None
    reduce_bits: int | None = None
    optimizer_step: Mapping[str, str] = field(default_factory=dict)
    stochastic_rounding: bool = False
    offload: Offload | None = None
    offload_path: str = "."
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    activation_checkpointing: bool | Iterable[type[nn.Module]] = False
    activation_offload: bool = False
    restore_weights: bool = True
    checkpoint: str = "file"
    async_checkpoint: bool = False
    launcher: str = "subprocess"

    @classmethod
    def of(
        cls,
        *,
        offload_optimizer: str | None = None,
        offload_weights: str | None = None,
        offload_path: str | Path | None = None,
        reduce_dtype: torch.dtype | str | None = None,
        optimizer_step: Mapping[str, str] | None = None,
        **others: Any,
    ) -> Settings:
        """Return the settings that arguments of ``ZeROStrategy`` ask for."""
        refuse(others, ARGUMENTS)
        offload = Offload(offload_optimizer, offload_weights)
        media = {offload_optimizer, offload_weights}
        if offload_path is not None and "nvme" not in media:
            raise ValueError(
                f"offload_path={str(offload_path)!r} has no effect without offload to files. Remove"
                " it, or set offload_optimizer='nvme'."
            )
        return cls(
            offload=None if media == {None} else offload,
            offload_path="" if offload_path is None else str(offload_path),
            reduce_dtype=as_dtype(reduce_dtype),
            optimizer_step={} if optimizer_step is None else optimizer_step,
            **others,
        )

    def __post_init__(self) -> None:
        for name, meaning in self._mistakes():
            raise ValueError(f"Expected {name} to be {meaning}, got {getattr(self, name)!r}.")
        for is_given, fault in self._contradictions():
            if is_given:
                raise ValueError(fault)

    def _mistakes(self) -> Iterator[tuple[str, str]]:
        """Yield settings that are wrong by themselves, and in words what they may be."""
        for name, values in _CHOICES.items():
            if getattr(self, name) not in values:
                *others, last = map(repr, values)
                yield name, f"{', '.join(others)} or {last}"
        for name, noun in _COUNTED.items():
            if not isinstance(value := getattr(self, name), int) or value < 0:
                yield name, f"a number of {noun} >= 0"
        for name, word in _GROUPS.items():
            value = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if value not in (word, "node") and not is_number:
                yield name, f"{word!r}, 'node' or a number of ranks >= 1"
        if self.reduce_dtype is not None and not self.reduce_dtype.is_floating_point:
            yield "reduce_dtype", "a floating-point dtype"
        steps = self.optimizer_step
        if not isinstance(steps, Mapping) or not all(
            isinstance(name, str) and word in _STEPS for name, word in steps.items()
        ):
            words = "'element', 'parameter' or 'model'"
            yield "optimizer_step", f"names of optimizer classes, each with {words}"

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        """Yield settings that exclude each other: whether both are given, and the error."""
        offload, on_host = self.offload or Offload(), self.device.type == "cpu"
        media = {offload.optimizer, offload.weights}
        yield (
            not self.restore_weights and self.launcher != "subprocess",
            f"launcher={self.launcher!r} returns the trained weights to this process, which"
            " restore_weights=False prevents. Remove one of them.",
        )
        yield (
            self.tensor_parallel_size != 1 and self.launcher != "subprocess",
            f"launcher={self.launcher!r} returns weights to a process that has no ranks, over"
            f" which tensor_parallel_size={self.tensor_parallel_size!r} cuts them. Remove one.",
        )
        yield (
            self.offload is not None and self.async_checkpoint,
            "async_checkpoint=True copies masters and optimizer states to host memory, which"
            " defeats offload. Remove one of them.",
        )
        yield (
            self.reduce_bits is not None and self.reduce_dtype is not None,
            f"reduce_dtype={self.reduce_dtype} contradicts reduce_bits={self.reduce_bits}, which"
            " encodes gradients and sums them in fp32. Remove one of them.",
        )
        yield (
            self.stage == 1 and self.accumulate == "reduce",
            "accumulate='reduce' contradicts stage=1, which keeps whole gradients between"
            " microbatches. Use stage=2, or remove accumulate.",
        )
        yield (
            self.stage < 3 and not self.reshard_after_forward,
            f"stage={self.stage} never releases whole weights, so reshard_after_forward=False has"
            " no effect. Remove it, or use stage=3.",
        )
        yield (
            self.offload is not None and self.stochastic_rounding,
            "stochastic_rounding=True steps bf16 parameters in fp32 on the device, but offload"
            " steps parameters where they rest. Remove one of them.",
        )
        yield (
            self.stage < 3 and offload.weights is not None,
            f"stage={self.stage} keeps whole weights on every rank, so offload_weights has no"
            " effect. Remove it, or use stage=3.",
        )
        yield (
            self.stage == 3
            and offload.weights not in (None, offload.optimizer)
            and ("cpu" in media or not on_host),
            f"stage=3 does not support offload_optimizer={offload.optimizer!r} with"
            f" offload_weights={offload.weights!r}: offloaded weights rest beside their masters."
            f" Set offload_optimizer={offload.weights!r}.",
        )
        yield (
            self.gather_bits is not None and self.offload is not None and not on_host,
            f"gather_bits={self.gather_bits} encodes shards on the device, but offload keeps them"
            " on an accelerator's host. Remove one of them.",
        )

    def division(self, world_size: int, ranks_on_node: int | None = None) -> dict[str, Any]:
        """Return the arguments of a ``Communicator`` that say how it divides the ranks.

        Ranks do not read each other's memory if anything is quantized: codes are sent as messages.

        Raises:
            ValueError: The ranks cannot be divided so, or it is not known how many share a node.
        """
        is_coded = self.gather_bits is not None or self.reduce_bits is not None
        tensor_size = self._group("tensor_parallel_size", world_size, ranks_on_node)
        world_size //= tensor_size
        if ranks_on_node is not None:
            ranks_on_node = max(ranks_on_node // tensor_size, 1)
        return {
            "reads_peers": False if is_coded else None,
            "tensor_size": tensor_size,
            "num_shards": self._group("shard", world_size, ranks_on_node),
        }

    def _group(self, name: str, world_size: int, ranks_on_node: int | None) -> int:
        """Return the number of ranks per group that a setting asks for."""
        asked = getattr(self, name)
        found = {"all": world_size, "node": ranks_on_node}.get(asked, asked)
        if found is None:
            raise ValueError(
                f"{name}='node' needs the number of ranks per node, which is known under a Trainer"
                " only. Pass a number of ranks instead."
            )
        if world_size % found:
            raise ValueError(
                f"{name}={asked!r} makes groups of {found} ranks, but {world_size} ranks cannot be"
                " divided into groups of that size. Use a divisor of the number of ranks."
            )
        return int(found)

    def on_device(self) -> Settings:
        """Return the settings without an offload that moves nothing from the device, now known."""
        moves = self.offload is None or self.offload.runs_on(self.device)
        return self if moves else replace(self, offload=None)

    def plan(self, dtype: torch.dtype, *, is_cast: bool = True, trainable: bool = True) -> Plan:
        """Return the plan for parameters of ``dtype``; ``is_cast`` lets the recipe cast fp32."""
        recipe = self.recipe if is_cast and dtype is torch.float32 else Recipe()
        is_floating = dtype.is_floating_point
        reduce_dtype = self.reduce_dtype if is_floating else None
        plan = Plan(
            Home(recipe.weight or dtype, self.device),
            Home(reduce_dtype or recipe.reduce or dtype, self.device),
            Home(dtype, self.device),
            STAGES[self.stage].weights,
            {None: STAGES[self.stage].gradients, "reduce": True, "local": False}[self.accumulate],
        )
        if self.offload is not None:
            plan = self.offload.of(plan, trainable=trainable)
        return replace(
            plan,
            # Weights that are the masters may not lose precision.
            gather_bits=self.gather_bits if is_floating and plan.rests_apart else None,
            reduce_bits=self.reduce_bits if is_floating else None,
            stochastic_rounding=self.stochastic_rounding and dtype is torch.bfloat16,
        )


_OFFLOAD = {"offload_optimizer", "offload_weights", "offload_path"}
_NOT_GIVEN = {"recipe", "offload", "device"}
ARGUMENTS = {one.name for one in fields(Settings)} - _NOT_GIVEN | _OFFLOAD
"""The arguments of ``ZeROStrategy`` that :meth:`Settings.of` takes."""


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def as_dtype(value: torch.dtype | str | None, setting: str = "reduce_dtype") -> torch.dtype | None:
    """Return a floating dtype, also given by name (``bf16``, ``bfloat16``, ``torch.bfloat16``)."""
    if not isinstance(value, str):
        return value
    dtype = getattr(torch, _SHORT.get(value, value.removeprefix("torch.")), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            f"Expected {setting} to be a floating-point dtype such as 'bfloat16', got {value!r}."
        )
    return dtype
