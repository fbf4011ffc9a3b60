"""Precision plugins of the Trainer: dtypes, and the loss scale of torch and of ours."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_zero import ZeROPrecision
from tests.oracle.projects import Regression, make_trainer, rows
from tests.oracle.ranks import Pools


class _Looks(Regression):
    """Notes the dtypes in which a weight computes, and of its master."""

    def on_fit_start(self) -> None:
        layer = self.net.blocks[0].linear
        layer.register_forward_hook(lambda *_: setattr(self, "computes", layer.weight.dtype))

    def on_after_backward(self) -> None:
        (optimizer,) = self.trainer.optimizers
        piece = optimizer.param_groups[0]["params"][2]
        self.notes = [self.computes, piece.dtype]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """The dtypes are all there is to note."""


def _kinds_of_state() -> None:
    for precision, weight, master in (
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
        ("64-true", torch.float64, torch.float64),
    ):
        module = _Looks()
        trainer = make_trainer(3, precision=precision, fast_dev_run=1)
        assert trainer.precision == precision
        assert isinstance(trainer.precision_plugin, ZeROPrecision)
        trainer.fit(module, rows())
        assert module.notes == [weight, master]
        assert {p.dtype for p in module.parameters()} == {master}


def test_weights_and_masters_have_the_dtypes_of_the_table(ranks: Pools) -> None:
    ranks(2).run(_kinds_of_state)


def test_a_scaler_that_is_disabled() -> None:
    """By torch, as there is no CUDA for what Lightning chooses everywhere; or on purpose."""
    by_torch = ZeROPrecision.of(MixedPrecision("16-mixed", "cuda"))
    assert by_torch.scaler is not None
    assert by_torch.scaler.scale == 2.0**16
    on_purpose = torch.amp.GradScaler("cpu", enabled=False)
    ours = ZeROPrecision.of(MixedPrecision("16-mixed", "cpu", on_purpose))
    assert ours.scaler is not None
    for found_inf in (True, False):
        assert ours.scaler.scale == on_purpose.get_scale() == 1.0
        ours.scaler.update(found_inf=found_inf)
