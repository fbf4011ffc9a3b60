"""Precisions, the loss scale and clipping through the Trainer, held against DDP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_zero import ZeROPrecision, ZeROStrategy
from lightning_zero.optimizer import LossScaler
from tests.oracle.projects import (
    Regression,
    Run,
    assert_like_ddp,
    fit,
    make_trainer,
    rows,
    under_all,
)
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


def _kinds_of_state(stage: int) -> None:
    for precision, weight, master in (
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
        ("64-true", torch.float64, torch.float64),
    ):
        module = _Looks()
        trainer = make_trainer(stage, precision=precision, fast_dev_run=1)
        assert trainer.precision == precision
        assert isinstance(trainer.precision_plugin, ZeROPrecision)
        trainer.fit(module, rows())
        assert module.notes == [weight, master]
        assert {p.dtype for p in module.parameters()} == {master}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_and_masters_have_the_dtypes_of_the_table(ranks: Pools, stage: int) -> None:
    ranks(2).run(_kinds_of_state, stage)


class _Made(torch.optim.Optimizer):
    """Makes its states with itself, in every way in which it can know the weights' dtype."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].update(
                    sum=torch.full_like(p, 0.1),
                    new=p.new_full(p.shape, 0.1),
                    listed=[torch.zeros(p.shape, dtype=p.dtype)],
                    own=torch.zeros_like(p, dtype=torch.float64),
                )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                for total in (state["sum"], state["new"], *state["listed"], state["own"]):
                    total.add_(p.grad**2)
                p.sub_(group["lr"] * p.grad / state["sum"].sqrt())
        return loss


def _adagrad(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr, initial_accumulator_value=0.1)


class _Starts(Regression):
    """Notes its states before the first step."""

    def on_train_start(self) -> None:
        (optimizer,) = self.trainer.optimizers
        leaves = [(k, v) for s in optimizer.state.values() for k, v in s.items() if k != "step"]
        tensors = [(k, t) for k, v in leaves for t in tree_leaves(v) if t.numel()]
        self.notes = sorted({(k, str(t.dtype), float(t.max())) for k, t in tensors})


def _made(strategy: Any, path: str, kind: Any, precision: str) -> Run:
    module = _Starts(optimizer=kind)
    trainer = make_trainer(strategy, precision=precision, max_steps=8)
    trainer.fit(module, rows())
    trainer.save_checkpoint(f"{path}/{strategy}.ckpt")
    trainer.strategy.barrier()
    (saved,) = torch.load(f"{path}/{strategy}.ckpt")["optimizer_states"]
    states = [[t for t in tree_leaves(s) if t.dim()] for s in saved["state"].values()]
    run = Run.of(module, trainer)
    run.notes = [module.notes, states, [str(t.dtype) for state in states for t in state]]
    return run


def _makers(path: str, precision: str, stages: Sequence[int]) -> dict[Any, list[Run]]:
    def make(strategy: Any) -> list[Run]:
        return [_made(strategy, path, kind, precision) for kind in (_adagrad, _Made)]

    return under_all(make, stages=stages)


@pytest.mark.parametrize(("precision", "stages"), [("bf16-mixed", (1, 3)), ("bf16-true", (2,))])
def test_states_made_in_a_constructor_are_those_of_ddp(
    ranks: Pools, tmp_path: Path, precision: str, stages: Sequence[int]
) -> None:
    runs = ranks(2).run(_makers, str(tmp_path), precision, stages)
    for number in range(2):
        each = [{name: made[number] for name, made in of_rank.items()} for of_rank in runs]
        assert_like_ddp(each, dtype=torch.bfloat16)
        for run in each[0].values():
            assert run.notes[0] == each[0]["ddp"].notes[0]


def test_plugin_of_the_strategy_is_kept() -> None:
    plugin = ZeROPrecision("16-mixed", scaler=LossScaler(init_scale=8.0))
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=ZeROStrategy(precision_plugin=plugin), logger=False
    )
    assert trainer.precision_plugin is plugin
    assert trainer.precision == "16-mixed"
    assert trainer.precision_plugin.state_dict()["scale"] == 8.0


def test_scaler_reads_that_of_torch() -> None:
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7)
    ours = ZeROPrecision.of(MixedPrecision("16-mixed", "cpu", torch_scaler))
    assert ours.state_dict() == torch_scaler.state_dict()
    ours.load_state_dict({**torch_scaler.state_dict(), "scale": 32.0, "_growth_tracker": 3})
    torch_scaler.load_state_dict(ours.state_dict())
    assert torch_scaler.get_scale() == 32.0


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


class _Scaled(Regression):
    """Multiplies its outputs by a parameter that it does not own."""

    def __init__(self) -> None:
        super().__init__(lr=0.05, optimizer=torch.optim.SGD)
        self.factor = [torch.nn.Parameter(torch.ones(()))]
        self.notes: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.factor[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.factor], lr=0.05)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.notes.append(float(self.factor[0].grad))


def _step_scaled(stage: int) -> tuple[list[float], list[float]]:
    module = _Scaled()
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))]
    fit(module, stage, plugins=plugins, max_steps=1, max_epochs=-1)
    return module.notes, module.losses


def test_parameters_of_no_module_are_unscaled(ranks: Pools) -> None:
    for notes, losses in ranks(2).run(_step_scaled, 2):
        assert notes == pytest.approx(losses[:1], rel=1e-2)
