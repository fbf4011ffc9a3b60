"""Lightning's precisions on pieces: casting, loss scaling and clipping over the shards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import nn
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.comm import Communicator
from lightning_zero.engine import Engine
from lightning_zero.optimizer import FindPiece, LossScaler, clip, members, parameter_of, pieces_of
from lightning_zero.parameters import Piece
from lightning_zero.plan import RECIPES, Recipe

if TYPE_CHECKING:
    import lightning.pytorch as pl

_CASTERS: dict[str, Callable[[], Precision]] = {
    "64-true": DoublePrecision,
    "bf16-true": lambda: HalfPrecision("bf16-true"),
    "16-true": lambda: HalfPrecision("16-true"),
}
"""Lightning's own plugins that convert modules and inputs; the other precisions convert nothing."""


class ZeROPrecision(Precision):
    """The precision plugin of ``ZeROStrategy``, built from ``Trainer(precision=...)``.

    ============================  =======  ======  ==================================
    precision                     weight   master  forward
    ============================  =======  ======  ==================================
    ``32-true``, ``64-true``      own      itself  plain
    ``bf16-mixed``                bf16     fp32    autocast
    ``16-mixed``                  fp16     fp32    autocast, dynamic loss scale
    ``bf16-true``, ``16-true``    half     itself  default dtype
    ============================  =======  ======  ==================================

    In mixed precision, weights that autocast would not cast stay in fp32.

    Args:
        precision: A name from the first column.
        scaler: The loss scaler of ``16-mixed``; by default one with the settings of
            ``torch.amp.GradScaler``.
        device: The device type, for code that reads it from the plugin.

    Raises:
        ValueError: The precision is unknown, or a scaler is given to one that does not scale.
    """

    def __init__(
        self, precision: str = "32-true", scaler: LossScaler | None = None, device: str = "cpu"
    ) -> None:
        if precision not in RECIPES:
            raise ValueError(
                f"Expected a precision among {', '.join(map(repr, RECIPES))}, got {precision!r}."
            )
        if scaler is not None and not RECIPES[precision].loss_scaled:
            raise ValueError(
                f"precision={precision!r} does not scale the loss; only '16-mixed' takes a scaler."
            )
        self.precision = precision  # type: ignore[assignment]
        self.scaler = (scaler or LossScaler()) if RECIPES[precision].loss_scaled else None
        self.device = device
        self.comm: Communicator | None = None
        # A weak reference: the plugin outlives the engine.
        self._find_piece: Callable[[], FindPiece | None] = _nothing
        self._caster = _CASTERS.get(precision, Precision)()

    @classmethod
    def of(cls, plugin: Precision) -> ZeROPrecision:
        """Return a plugin that does what Lightning's ``plugin`` does under DDP.

        Raises:
            TypeError: There is none.
        """
        if isinstance(plugin, cls):
            return plugin
        if isinstance(plugin, MixedPrecision):
            return cls(plugin.precision, _scaler_of(plugin), plugin.device)
        if type(plugin) in (Precision, HalfPrecision, DoublePrecision):
            return cls(plugin.precision)
        raise TypeError(
            f"ZeROStrategy does not support the precision plugin {type(plugin).__name__}. Use"
            f" Trainer(precision=...) with one of {', '.join(map(repr, RECIPES))}."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "comm": None, "_find_piece": _nothing}

    def attach(self, engine: Engine) -> None:
        """Act on the gradients of ``engine``, without keeping it alive."""
        self.comm = engine.comm
        self._find_piece = weakref.WeakMethod(engine.sharded.piece)

    @property
    def recipe(self) -> Recipe:
        """The dtypes of weights, reductions and autocast under this precision."""
        return RECIPES[str(self.precision)]

    @override
    def convert_module(self, module: Module) -> Module:
        return self._caster.convert_module(module)

    @override
    def convert_input(self, data: Any) -> Any:
        return self._caster.convert_input(data)

    @override
    def convert_output(self, data: Any) -> Any:
        return self._caster.convert_output(data)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self._caster.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self._caster.module_init_context()

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        dtype = self.recipe.autocast
        if dtype is None:
            with self._caster.forward_context():
                yield
        else:
            device = self.comm.device.type if self.comm else "cpu"
            with torch.autocast(device, dtype=dtype, cache_enabled=False):
                yield

    @override
    def pre_backward(self, tensor: torch.Tensor, module: pl.LightningModule) -> torch.Tensor:  # type: ignore[override]
        if self.scaler is not None:
            tensor = tensor * self.scaler.scale
        return super().pre_backward(tensor, module)

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        # Whether to skip is decided before the step, so the closure runs outside it.
        closure_result = closure()
        skipped_backward = closure_result is None and model.automatic_optimization
        found_inf = False
        if not skipped_backward:
            found_inf = clip.unscale(self._pieces_of(optimizer), self._ranks, self.scaler.scale)
        self._after_closure(model, optimizer)
        if skipped_backward:
            return closure_result
        self.scaler.update(found_inf=found_inf)
        return None if found_inf else optimizer.step(**kwargs)

    @classmethod
    @override
    def main_params(cls, optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
        # Parameters, not pieces: a parameter's gradient has the norm over all ranks.
        yield from map(parameter_of, members(optimizer))

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        if nn.utils.clip_grad_norm_ is not nn.utils.clip_grad.clip_grad_norm_:
            super().clip_grad_by_norm(optimizer, clip_val)  # patched by the user: whole gradients
        else:
            clip.clip_by_norm(self._pieces_of(optimizer), self._ranks, clip_val)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        if nn.utils.clip_grad_value_ is not nn.utils.clip_grad.clip_grad_value_:
            super().clip_grad_by_value(optimizer, clip_val)
        else:
            clip.clip_by_value(self._pieces_of(optimizer), clip_val)

    def _pieces_of(self, optimizer: Optimizer) -> list[Piece]:
        return pieces_of(optimizer, self._find_piece())

    @property
    def _ranks(self) -> Communicator:
        assert self.comm is not None, "the strategy sets the ranks before a step"
        return self.comm

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict() if self.scaler is not None else {}

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Saved under its name in DDP, so that either strategy resumes from the other's file.
        if (state := checkpoint.pop(type(self).__qualname__, None)) is not None:
            checkpoint[MixedPrecision.__qualname__] = state

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if (state := checkpoint.get(MixedPrecision.__qualname__)) is not None:
            checkpoint[type(self).__qualname__] = state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)


def _nothing() -> None:
    """Return nothing."""


def _scaler_of(plugin: MixedPrecision) -> LossScaler | None:
    if plugin.scaler is None:
        return None
    scaler = LossScaler(init_scale=plugin.scaler.get_scale())
    scaler.growth_factor = plugin.scaler.get_growth_factor()
    scaler.backoff_factor = plugin.scaler.get_backoff_factor()
    scaler.growth_interval = plugin.scaler.get_growth_interval()
    return scaler
