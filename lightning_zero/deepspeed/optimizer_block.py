"""The `optimizer` and `scheduler` blocks of a DeepSpeed configuration, as torch's classes.

A block is read and checked when the strategy is made, and built when the parameters exist. Defaults
are DeepSpeed's, which differ from torch's: "Adam" means AdamW unless ``adam_w_mode`` is false, and
neither has weight decay. Learning rates are pure functions of the number of optimizer steps taken,
so a scheduler is a ``LambdaLR``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lightning_zero.plan import suggestion

Rate = Callable[[int], float]
"""The learning rate after a number of optimizer steps."""


@dataclass(frozen=True)
class OptimizerBlock:
    """An optimizer class of torch and its options."""

    kind: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, block: Mapping[str, Any]) -> OptimizerBlock:
        """Read ``{"type": ..., "params": {...}}``, if torch has such an optimizer and options."""
        name, options = _read("optimizer", block)
        kind = _kind(name, options)
        if "betas" in options:
            options["betas"] = tuple(options["betas"])
        _check_options("optimizer", name, kind, options)
        return cls(kind, options)

    def build(self, parameters: Iterable[Parameter]) -> Optimizer:
        """Return the optimizer of the trainable ``parameters``."""
        return self.kind([p for p in parameters if p.requires_grad], **self.options)


@dataclass(frozen=True)
class SchedulerBlock:
    """A scheduler, stepped after every optimizer step, and its options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, block: Mapping[str, Any]) -> SchedulerBlock:
        """Read ``{"type": ..., "params": {...}}``, if such a scheduler and options exist."""
        name, options = _read("scheduler", block)
        make: Any = _RATES.get(name) or getattr(lr_scheduler, name, None)
        is_torchs = inspect.isclass(make) and issubclass(make, LRScheduler)
        # ReduceLROnPlateau needs a metric.
        if name not in _RATES and (not is_torchs or name == "ReduceLROnPlateau"):
            raise ValueError(
                f"scheduler.type in the DeepSpeed configuration is {name!r}, which is neither one"
                f" of {', '.join(_RATES)} nor a torch scheduler that needs no metric."
                f"{_near(name, _RATES)} Return the scheduler from `configure_optimizers`, and"
                " remove the block."
            )
        _check_options("scheduler", name, make, options)
        return cls(name, options)

    def build(self, optimizer: Optimizer, num_steps: Callable[[], float]) -> LRScheduler:
        """Return the scheduler of ``optimizer``.

        ``num_steps`` returns the run's optimizer steps, in case ``total_num_steps`` was left out.
        """
        if self.name not in _RATES:
            scheduler: LRScheduler = getattr(lr_scheduler, self.name)(optimizer, **self.options)
            return scheduler
        make, options = _RATES[self.name], dict(self.options)
        if "total_num_steps" in inspect.signature(make).parameters:
            options.setdefault("total_num_steps", num_steps())
            if not math.isfinite(options["total_num_steps"]):
                raise ValueError(
                    f"scheduler.params.total_num_steps of {self.name} is missing or 'auto' in the"
                    " DeepSpeed configuration, but the Trainer has no last step. Set a number, or"
                    " pass max_steps or max_epochs to the Trainer."
                )
        groups = optimizer.param_groups
        rates = [
            make(group["lr"], **_of_group(options, index, len(groups)))
            for index, group in enumerate(groups)
        ]
        for group in groups:
            # These rates are absolute, but LambdaLR multiplies the group's.
            group["lr"] = 1.0
        return LambdaLR(optimizer, rates)


# -- reading ---------------------------------------------------------------------------------------


def _read(block_name: str, block: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the type and the options of a block, without options that are ``"auto"`` or null."""
    for key in block:
        if key not in ("type", "params") and block[key]:
            raise ValueError(
                f"The DeepSpeed configuration has an unknown key '{block_name}.{key}'. This block"
                " only takes type and params. Remove the key."
            )
    name, params = block.get("type"), block.get("params") or {}
    if not isinstance(name, str) or not isinstance(params, Mapping):
        raise ValueError(
            f"Expected {block_name} in the DeepSpeed configuration to have a type, which is a"
            f" string, and params, which is an object, got {dict(block)!r}."
        )
    return name, {
        key: value
        for key, value in params.items()
        if value not in (None, "auto", _DEFAULTS.get(key))
    }


_DEFAULTS = {"last_batch_iteration": -1, "max_grad_norm": 0}
"""Options without a counterpart in torch, with the values that ask for nothing."""


def _kind(name: str, options: dict[str, Any]) -> type[Optimizer]:
    """Return the class for a type of DeepSpeed, and put DeepSpeed's defaults into ``options``."""
    known = name.lower()
    if known in ("adam", "adamw"):
        is_decoupled = options.pop("adam_w_mode", True) or known == "adamw"
        is_torchs = options.pop("torch_adam", False)
        if not is_torchs:
            if not options.pop("bias_correction", True):
                raise ValueError(
                    "optimizer.params.bias_correction in the DeepSpeed configuration is false, but"
                    f" torch's {name} always corrects the bias. Remove the key."
                )
            options.setdefault("weight_decay", 0.0)
        return torch.optim.AdamW if is_decoupled else torch.optim.Adam
    kind = torch.optim.Adagrad if known == "adagrad" else getattr(torch.optim, name, None)
    # DeepSpeed's Muon is two optimizers in one, unlike torch's.
    if known == "muon" or not (inspect.isclass(kind) and issubclass(kind, Optimizer)):
        raise ValueError(
            f"optimizer.type in the DeepSpeed configuration is {name!r}, which is not in"
            f" torch.optim.{_near(name, dir(torch.optim))} Return an optimizer from"
            " `configure_optimizers`, and remove the block."
        )
    return kind


def _check_options(
    block_name: str, name: str, make: Callable[..., Any], options: Mapping[str, Any]
) -> None:
    _, *parameters = inspect.signature(make).parameters.values()
    known = {parameter.name for parameter in parameters} - {"last_epoch", "options"}
    if make is _warmup_decay:
        known |= set(inspect.signature(_warmup).parameters) - {"base"}
    for key in options:
        if key not in known:
            raise ValueError(
                f"{block_name}.params in the DeepSpeed configuration has {key!r}, which"
                f" {name} does not accept.{_near(key, known)} Remove it."
            )
    for parameter in parameters:
        is_needed = parameter.default is parameter.empty and parameter.name not in options
        if is_needed and parameter.name not in ("total_num_steps", "options"):
            raise ValueError(
                f"{block_name}.params in the DeepSpeed configuration lacks {parameter.name!r},"
                f" which {name} requires. Add it."
            )


def _near(name: str, names: Iterable[str]) -> str:
    return suggestion(name, list(names), 0.85)


def _of_group(options: Mapping[str, Any], index: int, count: int) -> dict[str, Any]:
    """Return the options of one param group; lists have one value per group."""
    chosen = {}
    for key, value in options.items():
        if isinstance(value, (list, tuple)) and len(value) != count:
            raise ValueError(
                f"Expected scheduler.params.{key} in the DeepSpeed configuration to be a number or"
                f" a list of {count}, one for each param group, got {value!r}."
            )
        chosen[key] = value[index] if isinstance(value, (list, tuple)) else value
    return chosen


# -- learning rates --------------------------------------------------------------------------------


def _warmup(
    base: float,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Rate:
    if warmup_type not in ("log", "linear"):
        raise ValueError(
            "Expected scheduler.params.warmup_type in the DeepSpeed configuration to be 'log' or"
            f" 'linear', got {warmup_type!r}."
        )
    top = base if warmup_max_lr is None else warmup_max_lr
    warm = max(2, warmup_num_steps)

    def rate(step: int) -> float:
        # DeepSpeed counts from -1, and the rate is lowest at -1 and 0.
        count = min(max(step - 1, 0), warm)
        share = count / warm if warmup_type == "linear" else math.log(count + 1) / math.log(warm)
        return warmup_min_lr + (top - warmup_min_lr) * min(share, 1.0)

    return rate


def _warmup_decay(
    base: float, total_num_steps: int, warmup_max_lr: float = 0.001, **options: Any
) -> Rate:
    warmed = _warmup(base, warmup_max_lr=warmup_max_lr, **options)
    warm = max(2, options.get("warmup_num_steps", 1000))
    low = options.get("warmup_min_lr", 0.0)

    def rate(step: int) -> float:
        if step - 1 < warm:
            return warmed(step)
        share = max(0.0, (total_num_steps - step + 1) / max(1, total_num_steps - warm))
        return float(low + (warmup_max_lr - low) * share)

    return rate


_RATES: dict[str, Callable[..., Rate]] = {"WarmupLR": _warmup, "WarmupDecayLR": _warmup_decay}
