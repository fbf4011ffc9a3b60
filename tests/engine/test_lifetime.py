"""What is left of a training when it has ended: nothing that nobody holds.

Collection is asked for by `gc.collect()`, never waited for.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine import Engine
from lightning_zero.plan import RECIPES, Settings
from tests.oracle.models import Block
from tests.oracle.projects import (
    WIDTH,
    Regression,
    make_strategy,
    make_trainer,
    rows,
)
from tests.oracle.ranks import Pools

Watched = dict[str, Any]
"""Weak references by name."""


def _parts_of(engine: Engine) -> Watched:
    """The engine and everything that it made."""
    parts: dict[str, Any] = {"engine": engine}
    for unit in engine.sharded.units:
        parts[f"unit {unit.label}"] = unit
        for flat in unit.flat_parameters:
            name = flat.layout.slots[0].name
            parts[f"bundle of {name}"] = flat
            parts[f"weights of {name}"] = flat.weight.tensor.untyped_storage()
            if flat.plan.rests_apart:
                parts[f"masters of {name}"] = flat.master.untyped_storage()
            grads = [piece.grad for piece in flat.pieces if piece.grad is not None]
            if grads:
                parts[f"gradients of {name}"] = grads[0].untyped_storage()
    parts |= {f"piece of {piece.range.slot.name}": piece for piece in engine.sharded.pieces}
    return _watch(parts)


def _watch(parts: dict[str, Any]) -> Watched:
    return {name: weakref.ref(part) for name, part in parts.items()}


def _require_gone(watched: dict[str, Watched]) -> None:
    gc.collect()
    found = {
        case: [name for name, part in parts.items() if part() is not None]
        for case, parts in watched.items()
    }
    assert found == {case: [] for case in watched}


# ----------------------------------------------------------------------------- the Trainer


class _Keeper(Regression):
    """Keeps what modules keep by habit or by mistake: its loss with the graph, views, gradients."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.fails and batch_idx == 1:
            raise ArithmeticError
        self.kept = super().training_step(batch, batch_idx)
        self.views = [self.head.weight[0], self.net.blocks[1].linear.weight.data]
        return self.kept

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.used = optimizer
        self.grads = [parameter.grad for parameter in self.parameters()]


def _fit_and_drop(strategy: Any, *, fails: bool = False, **options: Any) -> Watched:
    module = _Keeper(fails=fails)
    trainer = make_trainer(strategy, limit_train_batches=2, **options)
    try:
        trainer.fit(module, rows(8), rows(4))
    except ArithmeticError:
        assert fails
    parts = {"module": module, "trainer": trainer, "strategy": trainer.strategy}
    watched = _watch({**parts, **dict(module.named_parameters())})
    return watched | _parts_of(trainer.strategy.engine)


def _drop_fits() -> None:
    watched = {
        "stage 1": _fit_and_drop(make_strategy(1)),
        "at rest": _fit_and_drop(make_strategy(3, restore_weights=False)),
        "failed": _fit_and_drop(make_strategy(3), fails=True),
        "mixed, local": _fit_and_drop(
            make_strategy(2, accumulate="local"), precision="bf16-mixed", accumulate_grad_batches=2
        ),
    }
    _require_gone(watched)


def test_a_fit_leaves_nothing_when_module_and_trainer_are_dropped(ranks: Pools) -> None:
    ranks(2).run(_drop_fits)


# ----------------------------------------------------------------------------- the plain loop


def _closed(stage: int, *, restore: bool = True, precision: str = "32-true") -> tuple[Any, Watched]:
    """Train a module for two steps and close; return it, and what the engine made."""
    module = Regression()
    settings = Settings(stage=stage, units={Block}, recipe=RECIPES[precision])
    engine = Engine(module, settings)
    optimizer = torch.optim.AdamW(module.parameters())
    engine.adopt(optimizer)
    dtype = engine.sharded.units[0].flat_parameters[0].weight.tensor.dtype
    for _ in range(2):
        optimizer.zero_grad()
        with engine.step() as watch, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = module(torch.ones(2, WIDTH)).sum()
            watch(loss)
        loss.backward()
        optimizer.step()
    watched = _parts_of(engine)
    engine.close(restore=restore)
    return module, watched | _parts_of(engine)


def _dropped(stage: int) -> Watched:
    module, watched = _closed(stage)
    return watched | _watch({"module": module, **dict(module.named_parameters())})


def _close_all() -> None:
    watched, held = {f"stage {stage}, dropped": _dropped(stage) for stage in (1, 3)}, []
    ways = itertools.product((1, 3), ("32-true", "bf16-mixed"), (True, False))
    for stage, precision, restore in ways:
        module, parts = _closed(stage, restore=restore, precision=precision)
        held.append(module)
        if not restore and stage < 3:
            # The parameters go on living in the buffers of whole weights.
            parts = {n: p for n, p in parts.items() if not n.startswith("weights of")}
        watched[f"stage {stage}, held, {precision}, {restore}"] = parts
    _require_gone(watched)


def test_a_closed_engine_goes_though_its_module_stays(ranks: Pools) -> None:
    ranks(2).run(_close_all)
