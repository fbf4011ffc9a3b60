"""``step_in_backward`` under a Trainer: which units are stepped amid backward, and which behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar, cast
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, OnExceptionCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

from lightning_zero import MemoryMonitor, TrafficMonitor, ZeROPrecision, ZeROStrategy, grad_norm
from lightning_zero.optimizer import UnitStep
from lightning_zero.trainer import steps
from tests.oracle.by_trainer import Rows, make_trainer, world
from tests.oracle.painted import beside_the_host, late_landings
from tests.oracle.ranks import Pools


class Model(LightningModule):
    """Layers of which each is a unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [5, 8, 8, 8, 8, 1]
        self.layers = nn.ModuleList(map(nn.Linear, widths, widths[1:]))
        self.seen: list[Any] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = batch[0].float() / 11
        for layer in self.layers:
            x = layer(x).tanh()
        loss = (x - 1).square().mean()
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


Fit = tuple[Model, int, list[str]]


def fit(
    folder: str,
    model: Callable[[], Model] = Model,
    *callbacks: Callback,
    stage: int = 3,
    is_early: bool = True,
    medium: str = "nvme",
    ratio: float = 1.0,
    plugin: Any = None,
    **more: Any,
) -> Fit:
    """Returns the module, how many units were stepped amid backward, and what was told of it."""
    strategy = ZeROStrategy(
        stage,
        units=(nn.Linear,),
        min_num_params=0,
        offload_optimizer=medium,
        offload_weights=medium if stage == 3 else None,
        offload_ratio=ratio,
        offload_path=folder if medium == "nvme" else None,
        step_in_backward=is_early,
        precision_plugin=plugin,
    )
    found: list[Any] = []
    told: list[str] = []
    step_ahead = UnitStep.step_ahead

    def count(self: UnitStep, order: Any, landed: Any) -> None:
        found.append(order)
        step_ahead(self, order, landed)

    module = model()
    with (
        patch.object(UnitStep, "step_ahead", count),
        patch.object(steps, "rank_zero_info", told.append),
    ):
        options = {"enable_checkpointing": False, "max_steps": 3, **more}
        make_trainer(world(), strategy, folder, callbacks=[*callbacks], **options).fit(
            module, Rows()
        )
    return module, len(found), told


def assert_equal(found: Fit, expected: Fit) -> None:
    assert found[0].seen == expected[0].seen
    values = expected[0].state_dict()
    assert all(torch.equal(value, values[key]) for key, value in found[0].state_dict().items())


def equal(folder: str) -> None:
    for stage, accumulate in ((1, 1), (2, 3), (3, 1), (3, 3)):
        options: dict[str, Any] = {"stage": stage, "accumulate_grad_batches": accumulate}
        expected = fit(folder, is_early=False, **options)
        lasting = [MemoryMonitor(), TrafficMonitor(), LearningRateMonitor()]
        found = fit(folder, Model, *lasting, logger=DummyLogger(), **options)
        assert_equal(found, expected)
        assert expected[1:] == (0, [])
        # All units but the first, whose gradients come last, in each step.
        assert found[1:] == (3 * 4, [])
        monitor = cast(MemoryMonitor, lasting[0])
        assert monitor.differences == []
        assert monitor.predicted is not None
        # From when the second unit goes backward, as the first is stepped behind its begin.
        staged = {
            (one.unit, one.phase): one.host.get("staging", 0) for one in monitor.predicted.snapshots
        }
        assert staged["layers.4", "backward"] == 0
        assert staged["layers.3", "backward"] == staged["", "step"] > 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_numbers_are_those_of_steps_behind_backward(
    ranks: Pools, tmp_path: Any, num_ranks: int
) -> None:
    ranks(num_ranks).run(equal, str(tmp_path))


def equal_beside_a_device(folder: str) -> None:
    for stage, accumulate, medium, ratio in ((2, 1, "cpu", 0.3), (3, 3, "nvme", 1.0)):
        options: dict[str, Any] = {"stage": stage, "accumulate_grad_batches": accumulate}
        options |= {"medium": medium, "ratio": ratio}
        with beside_the_host(painted=False), late_landings():
            expected = fit(folder, is_early=False, **options)
            monitor = MemoryMonitor()
            found = fit(folder, Model, monitor, TrafficMonitor(), logger=DummyLogger(), **options)
        assert_equal(found, expected)
        assert found[1:] == (3 * 4, [])
        assert monitor.differences == []


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_so_they_are_beside_a_device(ranks: Pools, tmp_path: Any, num_ranks: int) -> None:
    ranks(num_ranks).run(equal_beside_a_device, str(tmp_path))


# ---------------------------------------------------------------------------- what keeps units


class Norms(Callback):
    """Reads gradients, and weights."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        pl_module.seen.append(grad_norm(pl_module).item())
        pl_module.seen.append([p.detach().sum().item() for p in pl_module.parameters()])


class Halves(Model):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)


class Warmup(Model):
    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:  # type: ignore[override]
        def closure_and_rate() -> Any:
            result = closure()
            optimizer.param_groups[0]["lr"] = 0.01 * (index + 1)
            return result

        optimizer.step(closure=closure_and_rate)


class Clips(Model):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.01, "norm")


class After(Model):
    def on_after_backward(self) -> None:
        self.seen.append([p.detach().sum().item() for p in self.parameters()])


class Twice(Model):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        optimizer = cast(Any, self.optimizers())

        def closure() -> Tensor:
            loss = super(Manual, self).training_step(batch, index)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        return cast(Tensor, optimizer.step(closure))


def kept(folder: str) -> None:
    for model, callbacks, options, told in (
        (Model, [Norms], {}, "Norms overrides on_before_optimizer_step"),
        (Halves, [], {}, "Halves overrides on_before_optimizer_step"),
        (Warmup, [], {}, "Warmup overrides optimizer_step"),
        (Clips, [], {}, "Clips overrides configure_gradient_clipping"),
        (After, [], {}, "After overrides on_after_backward"),
        (Twice, [], {}, "Twice overrides backward"),
        (Manual, [], {}, "uses manual optimization"),
        (Model, [], {"gradient_clip_val": 0.01}, "gradients are clipped"),
        (Model, [], {"plugin": "16-mixed"}, "the loss is scaled"),
    ):
        runs = []
        for is_early in (False, True):
            more: dict[str, Any] = dict(options)
            if "plugin" in more:
                more["plugin"] = ZeROPrecision("16-mixed")
            made = [callback() for callback in callbacks]
            runs.append(fit(folder, model, *made, is_early=is_early, max_steps=2, **more))
        assert_equal(runs[1], runs[0])
        assert runs[0][1:] == (0, [])
        assert runs[1][1] == 0
        [text] = runs[1][2]
        assert told in text


def test_what_comes_between_keeps_units_until_backward_has_ended(
    ranks: Pools, tmp_path: Any
) -> None:
    ranks(1).run(kept, str(tmp_path))


class Fails(Model):
    """Ends amid its second backward pass."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if index == 1:
            self.layers[0].weight.register_hook(lambda _: 1 / 0)
        return loss


class Seen(Callback):
    """Notes what is left of the run."""

    engines: ClassVar[list[Any]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.engines.append(cast(ZeROStrategy, trainer.strategy).engine)


def torn(folder: str) -> None:
    for medium in ("nvme", "cpu"):
        beside = beside_the_host(painted=False) if medium == "cpu" else nullcontext()
        saver = OnExceptionCheckpoint(folder)
        with beside, pytest.raises(RuntimeError, match="ended half-way"):
            fit(folder, Fails, saver, enable_checkpointing=True, medium=medium)


def left_by_an_exception(folder: str) -> list[bool]:
    for is_early in (True, False):
        with pytest.raises(ZeroDivisionError):
            fit(folder, Fails, Seen(), is_early=is_early)
    return [engine.is_restored for engine in Seen.engines]


def test_a_module_that_is_stepped_in_parts_is_not_made_whole(ranks: Pools, tmp_path: Any) -> None:
    assert ranks(1).run(left_by_an_exception, str(tmp_path)) == [[False, True]]


def test_an_exception_amid_backward_is_told_as_torn_and_not_saved(
    ranks: Pools, tmp_path: Any
) -> None:
    ranks(1).run(torn, str(tmp_path))
    assert not list(tmp_path.glob("*.ckpt"))
