"""Optimizers that hold what no copy can: they step the module's own parameters, all at once."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.optimizer import Way, stepper_of
from tests.oracle.own_optimizers import Own
from tests.oracle.projects import Regression, Run, assert_like_ddp, make_trainer, rows, under_all
from tests.oracle.ranks import Pools


def by_weight(weight: Any, p: Tensor) -> float:
    return float(1 / (1 + weight.detach().norm() + weight.grad.norm()))


Held = tuple[Callable[[nn.Module], Any], Callable[[Any, Tensor], float]]
HELD: dict[str, Held] = {
    "a lock": (lambda m: threading.Lock(), lambda held, p: 1 - held.locked()),
    "a module": (lambda m: m, lambda held, p: by_weight(held.head.weight, p)),
    "a closure": (lambda m: lambda: m.net.blocks[1].linear.weight, lambda f, p: by_weight(f(), p)),
    "parameters": (lambda m: {p: 1 / p.dim() for p in m.parameters()}, lambda held, p: held[p]),
    "their ids": (lambda m: {id(m.head.bias): 0.1}, lambda held, p: held.get(id(p), 1.0)),
    "a table": (lambda m: torch.linspace(0, 1, 9), lambda held, p: float(held[p.numel() % 9])),
}


class Holding(Own):
    """SGD with momentum, at rates that follow from what an attribute holds."""

    def __init__(self, module: nn.Module, kind: str) -> None:
        super().__init__(module.parameters())
        make, self.factor_of = HELD[kind]
        self.held = make(module)

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(grad, 0.5)
        p.sub_(mean, alpha=group["lr"] * self.factor_of(self.held, p))
        grad.mul_(2)  # as under DDP, code after the step sees it


class Holder(Regression):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.notes: list[Any] = []

    def configure_optimizers(self) -> Any:
        return Holding(self, self.kind)

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer: Any = self.optimizers()
        self.notes += [[p.grad.clone() for p in self.parameters()]]
        self.notes += [copy.deepcopy(optimizer.state_dict()["state"]), stepper_of(optimizer).way]


def hold(strategy: Any, kind: str, folder: str) -> Run:
    """Two steps, and two more from the checkpoint."""
    path, notes = f"{folder}/{strategy}.ckpt", []
    for max_steps, given in ((2, None), (4, path)):
        module = Holder(kind)
        trainer = make_trainer(strategy, max_steps=max_steps)
        trainer.fit(module, rows(), ckpt_path=given)
        trainer.save_checkpoint(path)
        notes += module.notes
    run = Run.of(module, trainer)
    ways = {note for note in notes if isinstance(note, Way)}
    assert ways == {Way.BY_ELEMENT if strategy == "ddp" else Way.ALL_AT_ONCE}
    run.notes = [note for note in notes if not isinstance(note, Way)]
    return run


@pytest.mark.parametrize("kind", HELD)
def test_what_cannot_be_copied_is_held_as_under_ddp(
    ranks: Pools, tmp_path: Path, kind: str
) -> None:
    stages = (3 - list(HELD).index(kind) % 3,)
    assert_like_ddp(ranks(2).run(under_all, hold, kind, str(tmp_path), stages=stages))
