"""Lightning's precisions on pieces: casting, loss scaling and clipping over the shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.fabric import ShardedPrecision, grads_of
from lightning_zero.optimizer import clip
from lightning_zero.tensors import internals

if TYPE_CHECKING:
    import lightning.pytorch as pl


class ZeROPrecision(ShardedPrecision, Precision):
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
        scaler: The loss scaler of ``16-mixed``; by default torch's with its own defaults.
        device: The device type, for code that reads it from the plugin.

    Raises:
        ValueError: The precision is unknown, or a scaler is given to one that does not scale.
    """

    runner = "Trainer"
    plugins = Precision, HalfPrecision, DoublePrecision, MixedPrecision

    @override
    def pre_backward(self, tensor: torch.Tensor, module: pl.LightningModule) -> torch.Tensor:  # type: ignore[override]
        if self.scaler is not None:
            tensor = tensor * self.scaler.get_scale()
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
            found_inf = self.unscaled(optimizer)
        self._after_closure(model, optimizer)
        if skipped_backward:
            return closure_result
        internals.update_scale(self.scaler, found_inf=found_inf)
        return None if found_inf else optimizer.step(**kwargs)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        pieces, others, comm = grads_of(optimizer)
        if comm is None or nn.utils.clip_grad_norm_ is not nn.utils.clip_grad.clip_grad_norm_:
            super().clip_grad_by_norm(optimizer, clip_val)  # patched by the user: whole gradients
        else:
            clip.clip_by_norm(pieces, comm, clip_val, others=others)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        pieces, others, comm = grads_of(optimizer)
        if comm is None or nn.utils.clip_grad_value_ is not nn.utils.clip_grad.clip_grad_value_:
            super().clip_grad_by_value(optimizer, clip_val)
        else:
            clip.clip_by_value(pieces, clip_val, others)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Saved under its name in DDP, so that either strategy resumes from the other's file.
        if (state := checkpoint.pop(type(self).__qualname__, None)) is not None:
            checkpoint[MixedPrecision.__qualname__] = state

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if (state := checkpoint.get(MixedPrecision.__qualname__)) is not None:
            checkpoint[type(self).__qualname__] = state
