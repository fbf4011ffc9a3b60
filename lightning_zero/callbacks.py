"""Lightning's callbacks that read or write weights between steps, when a sharded one is at rest.

They come unmodified, so for the time of a fit their hooks are wrapped: each runs with the whole
weights in the master's precision, and what it does to them stays. Their averages are whole copies
of the model on every rank, as under DDP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.callbacks import (
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
)

from lightning_zero.engine import Engine

try:
    from lightning.pytorch.callbacks import WeightAveraging
except ImportError:  # before Lightning 2.6
    WeightAveraging = None  # type: ignore[assignment, misc]

_READ, _WRITE = False, True
_HOOKS: dict[type[Callback], dict[str, bool]] = {
    StochasticWeightAveraging: {"on_train_epoch_start": _WRITE, "on_train_end": _WRITE},
}
if WeightAveraging is not None:
    _HOOKS[WeightAveraging] = {
        "on_train_batch_end": _READ,
        "on_train_epoch_end": _READ,
        "on_validation_epoch_start": _WRITE,
        "on_validation_epoch_end": _WRITE,
        "on_train_end": _WRITE,
    }


class WholeWeights:
    """The hooks of ``callbacks`` that see whole weights, until :meth:`remove`.

    Raises:
        NotImplementedError: A callback replaces parameters while they are sharded.
    """

    def __init__(self, callbacks: Iterable[Callback], engine: Engine) -> None:
        self._wrapped: list[tuple[Callback, str]] = []
        for callback in callbacks:
            if isinstance(callback, ModelPruning):
                raise NotImplementedError(
                    f"{type(callback).__name__} replaces parameters during training, which cannot"
                    " be done to those that are sharded. Prune the module before or after `fit`, or"
                    " use strategy='ddp'."
                )
            for cls, hooks in _HOOKS.items():
                for name, modify in hooks.items() if isinstance(callback, cls) else ():
                    hook = functools.partial(_gathered, getattr(callback, name), engine, modify)
                    setattr(callback, name, hook)
                    self._wrapped.append((callback, name))

    def remove(self) -> None:
        """Give the callbacks their own hooks back."""
        for callback, name in self._wrapped:
            delattr(callback, name)
        self._wrapped = []


def _gathered(
    hook: Callable[..., Any], engine: Engine, modify: bool, *args: Any, **kwargs: Any
) -> Any:
    with engine.gathered(modify=modify):
        return hook(*args, **kwargs)
