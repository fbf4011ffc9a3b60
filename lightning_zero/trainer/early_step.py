"""The conditions under which units may be stepped during a backward pass.

Between the pass and the optimizer's step, Lightning calls hooks and clips gradients. A unit stepped
within the pass has its new masters by then, so none of these may look at weights or change
gradients: a unit is stepped once, with exactly what the optimizer's step would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.strategies import DDPStrategy

from lightning_zero.trainer.precision import ZeROPrecision
from lightning_zero.trainer.run import callbacks_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

_OF_MODULE = (
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "clip_gradients",
    "optimizer_step",
)
_OF_CALLBACKS = ("on_after_backward", "on_before_optimizer_step")
_OF_STRATEGY = ("post_backward", "optimizer_step")
_OWN = [f"{__package__}.{name}" for name in ("memory_monitor", "traffic_monitor")]
_OF_PRECISION = ("backward", "post_backward", "optimizer_step", "clip_gradients")


def obstacle_to_early_steps(trainer: pl.Trainer) -> str | None:
    """Return why units cannot be stepped during a backward pass, ``None`` if they can."""
    return next(_obstacles(trainer), None)


def _obstacles(trainer: pl.Trainer) -> Iterator[str]:
    callbacks = callbacks_of(trainer)
    if not trainer.lightning_module.automatic_optimization:
        yield "the module uses manual optimization"
    if len(trainer.optimizers) > 1:
        yield "there are several optimizers"
    if trainer.gradient_clip_val:
        yield "gradients are clipped"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        yield "the loss is scaled"
    if any(isinstance(callback, BatchSizeFinder) for callback in callbacks):
        yield "BatchSizeFinder continues after failed steps"
    for things, base, names in (
        ([trainer.lightning_module], LightningModule, _OF_MODULE),
        (callbacks, Callback, _OF_CALLBACKS),
        ([trainer.strategy], DDPStrategy, _OF_STRATEGY),
        ([trainer.precision_plugin], ZeROPrecision, _OF_PRECISION),
    ):
        for thing in things:
            for name in names:
                if _is_replaced(thing, base, name):
                    yield f"{type(thing).__name__} overrides {name}"


def _is_replaced(thing: Any, base: type, name: str) -> bool:
    """Return whether a method was overridden by a subclass or assigned to the object."""
    function = getattr(getattr(thing, name), "__func__", None)
    # This package's own monitors only count there.
    return function is not getattr(base, name) and getattr(function, "__module__", "") not in _OWN
