"""Precisions, the loss scale and clipping through the Trainer, held against DDP."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_zero import MemoryMonitor, ZeROPrecision, ZeROStrategy
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

PRECISIONS = {
    "64-true": torch.float64,
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "16-mixed": torch.float16,
}


class Noting(Regression):
    """Notes norms and dtypes of the gradients, replaces them, and notes the loss scale."""

    def __init__(self, **options: Any) -> None:
        super().__init__(lr=0.05, optimizer=torch.optim.SGD)
        self.notes: list[Any] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [float(p.grad.norm()) for p in self.parameters() if p.grad is not None]
        self.notes.append([norm if norm < 1e30 else "inf" for norm in norms])
        for parameter in self.parameters() if hasattr(Tensor, "grad_dtype") else ():
            self.notes.append(str(parameter.grad.dtype))
            parameter.grad = parameter.grad * 0.5

    def on_train_batch_end(self, *args: Any) -> None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            self.notes.append(
                scaler.scale if isinstance(scaler.scale, float) else scaler.get_scale()
            )


def _train(strategy: Any, precision: str, case: type[Noting] = Noting, **options: Any) -> Run:
    module = case()
    if precision == "16-mixed":
        # On CPU the Trainer itself would turn this precision into "bf16-mixed".
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    else:
        options["precision"] = precision
    run = fit(module, strategy, **{"max_steps": 5, "max_epochs": -1, **options})
    run.notes = module.notes
    return run


@pytest.mark.parametrize(("precision", "stage"), list(zip(PRECISIONS, cycle((1, 2)), strict=False)))
def test_precision_is_that_of_ddp(ranks: Pools, precision: str, stage: int) -> None:
    runs = ranks(2).run(under_all, _train, precision, stages=(stage, 3))
    assert_like_ddp(runs, dtype=PRECISIONS[precision])


class _Overflows(Noting):
    """In the second and third step one element of one rank's gradient is infinite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx in (1, 2) and self.global_rank == 1:
            loss = loss + self.head.bias[5] * float("inf")
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """The norms that are not finite are noted elsewhere."""


@pytest.mark.parametrize(("stage", "options"), [(1, {}), (2, {"gradient_clip_val": 0.5})])
def test_all_ranks_skip_a_step_that_overflows_on_one(
    ranks: Pools, stage: int, options: Any
) -> None:
    stages = (stage, 3)
    runs = ranks(2).run(under_all, _train, "16-mixed", _Overflows, stages=stages, **options)
    assert runs[0]["ddp"].notes == [1024.0, 512.0, 256.0, 256.0, 256.0]
    assert_like_ddp(runs, dtype=torch.float16)


class _OwnClipping(Noting):
    """Clips the head by value, then everything as it is told."""

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        assert gradient_clip_val == 0.05
        torch.nn.utils.clip_grad_value_(self.head.parameters(), 0.01)
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.notes.append([float(p.grad.norm()) for p in self.parameters()])


class _ClipsMainParameters(Noting):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        parameters = list(self.trainer.precision_plugin.main_params(optimizer))
        self.notes.append(float(torch.nn.utils.clip_grad_norm_(parameters, 0.1)))
        self.notes.append([float(p.grad.norm()) for p in self.parameters()])


@pytest.mark.parametrize(("precision", "stages"), [("32-true", (1, 3)), ("16-mixed", (2,))])
def test_clipping_is_that_of_ddp(ranks: Pools, precision: str, stages: Sequence[int]) -> None:
    runs = ranks(3).run(_clip_in_every_way, precision, stages)
    assert_like_ddp(runs, dtype=PRECISIONS[precision])


def _clip_in_every_way(precision: str, stages: Sequence[int]) -> dict[Any, Run]:
    def clip(strategy: Any) -> Run:
        notes = []
        for options in (
            {"gradient_clip_val": 0.1},
            {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
            {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
            {"gradient_clip_val": 0.05, "case": _OwnClipping},
            {"case": _ClipsMainParameters},
        ):
            run = _train(strategy, precision, **{"max_steps": 2, **options})
            notes.append([run.notes, run.params])
        return Run({}, notes=notes)

    return under_all(clip, stages=stages)


class _Looks(Noting):
    """Notes the dtypes of a weight and of its piece."""

    def on_after_backward(self) -> None:
        (optimizer,) = self.trainer.optimizers
        piece = optimizer.param_groups[0]["params"][2]
        self.notes = [self.net.blocks[0].linear.weight.dtype, piece.dtype]

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
    module, monitor = _Starts(optimizer=kind), MemoryMonitor()
    is_ours = isinstance(strategy, int)
    trainer = make_trainer(
        strategy, precision=precision, max_steps=8, callbacks=[monitor] if is_ours else []
    )
    trainer.fit(module, rows())
    # Adagrad has counts of pieces without elements too.
    assert kind is _adagrad or monitor.differences == []
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


class Growing(Regression):
    """Trains its head too from the second step on."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__(lr=0.1, optimizer=torch.optim.SGD)
        self.automatic_optimization = not by_hand
        self.head.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), self.lr)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.head.requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": [*self.head.parameters()]})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            self.manual_backward(loss)
            kinds = ("norm", "value")
            self.clip_gradients(optimizer, 0.01, gradient_clip_algorithm=kinds[batch_idx % 2])
            optimizer.step()
            optimizer.zero_grad()
        return loss


def _grow(strategy: Any, precision: str, by_hand: bool) -> Run:
    how: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # by the name alone it is bf16 on CPUs
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        how = {"plugins": [MixedPrecision(precision, "cpu", scaler)]}
    return fit(Growing(by_hand=by_hand), strategy, max_steps=3, **how)


@pytest.mark.parametrize(
    ("precision", "by_hand", "stage"), [("16-mixed", False, 1), ("32-true", True, 2)]
)
def test_gradients_of_parameters_that_are_added_are_unscaled_and_clipped(
    ranks: Pools, precision: str, by_hand: bool, stage: int
) -> None:
    """On one rank: DDP averages none of what was frozen when it began."""
    runs = ranks(1).run(under_all, _grow, precision, by_hand, stages=(stage, 3))
    assert_like_ddp(runs, dtype=PRECISIONS[precision])


def test_plugin_of_the_strategy_is_kept() -> None:
    plugin = ZeROPrecision("16-mixed", scaler=LossScaler(init_scale=8.0))
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=ZeROStrategy(precision_plugin=plugin), logger=False
    )
    assert trainer.precision_plugin is plugin
    assert trainer.precision == "16-mixed"
    assert trainer.precision_plugin.state_dict()["scale"] == 8.0


def test_foreign_precision_is_refused() -> None:
    class Odd(Precision):
        """A plugin that ZeRO knows nothing of."""

    with pytest.raises(TypeError, match=r"precision plugin Odd. Use Trainer\(precision="):
        ZeROStrategy(precision_plugin=Odd())


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
