"""Methods of optimizers that users replace, and that they call in hooks, do what they do under DDP.

Weights and calls are DDP's. Where a case says nothing else, its optimizer is Adam: with
gradients that are not cleared, or cleared in part, its steps differ from the usual ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import schedulefree
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_zero import ZeROStrategy
from tests.oracle.by_trainer import Rows, assert_close, make_trainer, world
from tests.oracle.own_optimizers import Layers
from tests.oracle.ranks import Pools


class Module(Layers):
    """Notes what was called, and what the hooks saw."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.seen: list[Any] = []

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.seen.append(self.loss(batch).item())

    def configure_optimizers(self) -> Any:
        return Adam(self.parameters(), 0.05)


def noted(module: Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``method`` and notes the call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        module.calls.append(method.__name__)
        return method(*args, **kwargs)

    return call


# -- methods that are replaced ---------------------------------------------------------------------


class InAHook(Module):
    """Clears every second time."""

    def on_train_start(self) -> None:
        [optimizer] = self.trainer.optimizers
        clear = optimizer.zero_grad

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            self.calls.append("sometimes")
            if len(self.calls) % 2:
                clear(*args, **kwargs)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


class Halving(SGD):
    """Keeps half of its gradients, as some ways to accumulate do."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)


class Keeping(Module):
    def configure_optimizers(self) -> Any:
        return Halving(self.parameters(), 0.05, momentum=0.5)


class Patched(Module):
    """The class is patched in the run."""

    patching: pytest.MonkeyPatch

    def on_train_start(self) -> None:
        self.patching.setattr(Adam, "zero_grad", lambda *_, **__: self.calls.append("patched"))


class Dropping(SGD):
    """Drops its gradients itself, at the end of a step."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.zero_grad()
        return loss


class WithinAStep(Module):
    def configure_optimizers(self) -> Any:
        optimizer = Dropping(self.parameters(), 0.05, momentum=0.5, weight_decay=0.1)
        optimizer.zero_grad = noted(self, optimizer.zero_grad)  # type: ignore[method-assign]
        return optimizer

    def optimizer_zero_grad(self, *args: Any) -> None:
        pass


class OwnedWithinAStep(WithinAStep):
    """Its optimizer steps whole parameters."""

    def configure_optimizers(self) -> Any:
        class Sign(Optimizer):
            def step(self, closure: Any = None) -> Any:
                loss = None if closure is None else closure()
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            p.data.sub_(p.grad / (1 + p.grad.norm()), alpha=group["lr"])
                self.zero_grad()
                return loss

        optimizer = Sign(self.parameters(), {"lr": 0.05})
        optimizer.zero_grad = noted(self, optimizer.zero_grad)  # type: ignore[method-assign]
        return optimizer


class Twice(Adam):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        super().step()
        return loss


class SteppedTwice(Module):
    def configure_optimizers(self) -> Any:
        return Twice(self.parameters(), 0.05)


class SteppedByOwnRule(Module):
    """Goes through the param groups by itself, without the optimizer's own step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()

        def step(closure: Any = None) -> Any:
            loss = closure()
            with torch.no_grad():
                for p in self.parameters():
                    p.sub_(p.grad, alpha=0.1)
            return loss

        optimizer.step = step
        return optimizer


class HooksOfAll(Module):
    """Hooks on the steps of all optimizers are called for the user's own ones only."""

    def configure_optimizers(self) -> Any:
        self.handles = [
            register_optimizer_step_pre_hook(lambda *_: self.calls.append("pre")),
            register_optimizer_step_post_hook(lambda *_: self.calls.append("post")),
        ]

        class New(Adam):  # which no rank has proved yet
            pass

        return New(self.parameters(), 0.05)

    def on_train_end(self) -> None:
        for handle in self.handles:
            handle.remove()


class Bare(Optimizer):
    """Wraps an optimizer without the constructor of its base, as some do."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.defaults = optimizer, optimizer.defaults
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class WithoutAConstructor(Module):
    def configure_optimizers(self) -> Any:
        return Bare(super().configure_optimizers())


# -- methods that are called through what `self.optimizers()` returns ------------------------------


class Manual(Module):
    """Steps by hand; the optimizer's own ``zero_grad`` is never called so under DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.zero_grad = noted(self, optimizer.zero_grad)
        return optimizer

    def training_step(self, batch: list[Tensor], index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        if index % 2:
            optimizer.zero_grad()
        self.seen.append([p.grad is None for p in self.parameters()])


class ScheduleFree(Module):
    """Trains and evaluates in the optimizer's modes."""

    def configure_optimizers(self) -> Any:
        return schedulefree.AdamWScheduleFree(self.parameters(), 0.05)  # type: ignore[attr-defined]

    @property
    def optimizer(self) -> Any:
        return self.optimizers()

    def on_train_start(self) -> None:
        self.optimizer.train()

    def on_validation_start(self) -> None:
        self.optimizer.eval()

    def on_validation_end(self) -> None:
        self.optimizer.train()


class CountingModes(schedulefree.AdamWScheduleFree):  # type: ignore[name-defined, misc]
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[str] = []

    def eval(self) -> None:
        self.calls.append("eval")
        super().eval()

    def train(self) -> None:
        self.calls.append("train")
        super().train()


class ScheduleFreeBySubclass(ScheduleFree):
    """Counts the calls of the methods that it overrides."""

    def configure_optimizers(self) -> Any:
        return CountingModes(self.parameters(), 0.05)

    def on_train_end(self) -> None:
        self.calls = self.trainer.optimizers[0].calls  # type: ignore[attr-defined]


MODULES = [
    InAHook,
    Keeping,
    Patched,
    WithinAStep,
    OwnedWithinAStep,
    SteppedTwice,
    SteppedByOwnRule,
    HooksOfAll,
    WithoutAConstructor,
    Manual,
    ScheduleFree,
    ScheduleFreeBySubclass,
]


def fit(kind: type[Module], strategy: Any) -> list[Any]:
    """Return weights, calls and what hooks saw."""
    module = kind()
    options: dict[str, Any] = {"max_steps": 4, "val_check_interval": 2, "limit_val_batches": 1}
    trainer = make_trainer(world(), strategy, "/nowhere", enable_checkpointing=False, **options)
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(module, Patched):
            module.patching = patch
        trainer.fit(module, Rows(), Rows())
    return [[p.tolist() for p in module.parameters()], module.calls, module.seen]


def under(kind: type[Module], stage: int) -> None:
    strategy = ZeROStrategy(stage, units=(nn.Linear,), min_num_params=0)
    for found, value in zip(fit(kind, strategy), fit(kind, "ddp"), strict=True):
        assert_close(found, value, f"stage {stage}")


@pytest.mark.parametrize("kind", MODULES)
def test_methods_have_their_effect(ranks: Pools, kind: type[Module]) -> None:
    """Stages take turns."""
    ranks(2).run(under, kind, 3 - MODULES.index(kind) % 3)
