"""The user's options of a run besides the engine's settings, checked when they are made."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lightning_zero.engine import ActivationCheckpointing, ActivationOffload, Engine
from lightning_zero.plan import Offload, Settings, as_dtype

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


@dataclass(frozen=True)
class Options:
    """The user's options of a run, as documented by ``ZeROStrategy``."""

    activation_checkpointing: bool | Iterable[type[nn.Module]] = False
    activation_offload: bool = False
    restore_weights: bool = True
    checkpoint: str = "file"
    async_checkpoint: bool = False
    verify_checkpoint: bool = False
    launcher: str = "subprocess"

    def __post_init__(self) -> None:
        if self.launcher not in START_METHODS:
            raise ValueError(
                f"Expected launcher among {', '.join(START_METHODS)}, got {self.launcher!r}."
            )
        if self.checkpoint not in ("file", "dcp"):
            raise ValueError(f"Expected checkpoint among 'file', 'dcp', got {self.checkpoint!r}.")
        if not self.restore_weights and self.launcher != "subprocess":
            raise ValueError(
                f"launcher={self.launcher!r} returns the trained weights to this process, which"
                " restore_weights=False prevents. Remove one of them."
            )

    def wrap_units(self, engine: Engine, until: ExitStack) -> None:
        """Checkpoint and offload the units' activations until ``until`` is closed."""
        units = engine.sharded.units
        choice, modules = self.activation_checkpointing, [unit.module for unit in units[:-1]]
        until.callback(ActivationCheckpointing.chosen(choice, engine.module, modules).remove)
        if self.activation_offload:
            until.callback(ActivationOffload.beside(engine.comm, units).remove)

    def offload(
        self, optimizer: str | None, weights: str | None, path: str | Path | None, ratio: float
    ) -> Offload | None:
        """Return the offload that the arguments ``offload_*`` ask for, or ``None``."""
        for name, medium in (("offload_optimizer", optimizer), ("offload_weights", weights)):
            if medium not in (None, "cpu", "nvme"):
                raise ValueError(f"Expected {name}='cpu', 'nvme' or None, got {medium!r}.")
        if path is not None and "nvme" not in (optimizer, weights):
            raise ValueError(
                f"offload_path={str(path)!r} has no effect without offload to files. Remove it, or"
                " set offload_optimizer='nvme'."
            )
        if optimizer is None and weights is None:
            if ratio != 1:
                raise ValueError(
                    f"offload_ratio={ratio!r} has no effect without offload. Remove it, or set"
                    " offload_optimizer='cpu'."
                )
            return None
        if self.async_checkpoint:
            raise ValueError(
                "async_checkpoint=True copies masters and optimizer states to host memory, which"
                " defeats offload. Remove one of them."
            )
        return Offload(optimizer, weights, ratio)


_OPTIONS = (
    "activation_checkpointing",
    "activation_offload",
    "async_checkpoint",
    "verify_checkpoint",
)
"""Those of the Trainer's options that mean something in Fabric."""


def chosen(stage: int, *, launcher: str, **given: Any) -> tuple[Settings, Options]:
    """Return the engine's settings and the options that a user's arguments ask for.

    Raises:
        TypeError: An argument is unknown.
        ValueError: An argument is out of range or contradicts another.
    """
    if unknown := set(given) & {"recipe", "device", "broadcast_in_calls"}:
        raise TypeError(f"ZeROStrategy sets {', '.join(unknown)} itself. Remove it.")
    options = Options(
        launcher=launcher, **{name: given.pop(name) for name in _OPTIONS if name in given}
    )
    path = given.pop("offload_path", None)
    media = [given.pop(f"offload_{what}", None) for what in ("optimizer", "weights")]
    offload = options.offload(media[0], media[1], path, 1.0)
    reduce_dtype = as_dtype(given.pop("reduce_dtype", None))
    settings = Settings(
        stage=stage,
        offload=offload,
        offload_path=str(path or ""),
        reduce_dtype=reduce_dtype,
        **given,
    )
    return settings, options
