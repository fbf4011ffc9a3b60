"""Ranks that differ before a step: one error, the same on all ranks, names what differs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.comm import Communicator
from lightning_zero.engine import Engine, rank_check
from lightning_zero.engine import engine as engine_module
from lightning_zero.plan import Settings
from tests.oracle.projects import communicator_by
from tests.oracle.ranks import Pools


def test_what_cannot_be_compared_is_left_out() -> None:
    values = [0.1, {nn.ReLU, nn.Linear}, torch.device("cuda:3"), torch.zeros(2), object()]
    lines = [line for x in values for line in rank_check.lines_of({"It": {"x": x}})]
    classes = "{torch.nn.modules.activation.ReLU, torch.nn.modules.linear.Linear}"
    assert lines == ["It: x 0.1", f"It: x {classes}", "It: x cuda"]


# -- the engine ------------------------------------------------------------------------------------


class Model(nn.Module):
    """Two linears and a buffer."""

    def __init__(self, *, width: int = 4, is_reversed: bool = False, tie: bool = False) -> None:
        super().__init__()
        for name in ("b", "a") if is_reversed else ("a", "b"):
            setattr(self, name, nn.Linear(4, width) if name == "a" else nn.Linear(width, 4))
        if tie:
            self.b.weight = self.a.weight
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def linears(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def sgd(model: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    a, *others = model.parameters()
    return torch.optim.SGD([{"params": [a]}, {"params": others}], lr=0.1)


def adopts(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[], None]:
    return lambda: Engine(model := Model(), Settings()).adopt(make(model))


def engine(
    change: Callable[[Model], Any] = lambda m: None, make: Any = Model, **settings: Any
) -> Callable[[], Any]:
    def set_up() -> None:
        change(model := make())
        Engine(model, Settings(**settings))

    return set_up


FORM = "shape (4, 4), float32, trained"
OTHERWISE: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "width": (
        engine(make=partial(Model, width=5)),
        [f"{{usual}}: Parameter 'a.weight': {FORM}", "{odd}: Parameter 'a.weight': shape (5, 4)"],
    ),
    "order": (
        engine(make=partial(Model, is_reversed=True)),
        ["another order: Parameter 'a.weight'", "another order: Parameter 'b.weight'"],
    ),
    "frozen": (
        engine(lambda m: m.a.weight.requires_grad_(False)),
        ["{odd}: Parameter 'a.weight': shape (4, 4), float32, frozen"],
    ),
    "tie": (
        engine(make=partial(Model, tie=True)),
        [f"{{odd}}: Parameter 'b.weight': {FORM}, tied to 'a.weight'"],
    ),
    "buffer": (
        engine(lambda m: m.register_buffer("shift", torch.zeros(5))),
        ["{usual}: Buffer 'shift': shape (3,)", "{odd}: Buffer 'shift': shape (5,)"],
    ),
    "stage": (
        engine(stage=2),
        ["{usual}: The strategy: stage 3", "{odd}: The strategy: stage 2"],
    ),
    "units": (engine(units=linears), ["{odd}: Unit 'a'"]),
    "refused": (
        engine(units=(nn.Conv2d,)),
        ["{odd}: Unit 'units=Conv2d matches no module of Model"],
    ),
    "optimizer's class": (
        adopts(lambda model: torch.optim.AdamW(model.parameters(), lr=0.1)),
        ["{usual}: Optimizer 0: class torch.optim.sgd.SGD", "{odd}: Optimizer 0: class torch.opt"],
    ),
    "optimizer's lr": (
        adopts(lambda model: sgd(model, lr=torch.tensor(0.25))),
        ["{usual}: Group 0 of optimizer 0: lr 0.1", "{odd}: Group 0 of optimizer 0: lr 0.25"],
    ),
    "optimizer's groups": (
        adopts(two_groups),
        ["{odd}: Parameter 'a.bias' of optimizer 0: in group 1"],
    ),
}
"""What a rank does otherwise, and what the error says of it."""


def differs(way: str) -> dict[str, str]:
    """The last rank does each thing otherwise; every rank returns its errors."""
    is_odd = dist.get_rank() == dist.get_world_size() - 1
    errors = {}
    for name, (otherwise, _) in OTHERWISE.items():
        comm = communicator_by(way)
        usual = adopts(sgd) if "optimizer" in name else engine()
        engine_module.Communicator = lambda device, comm=comm, **_: comm  # type: ignore[assignment]
        try:
            with pytest.raises(RuntimeError, match="The ranks differ") as caught:
                (otherwise if is_odd else usual)()
        finally:
            engine_module.Communicator = Communicator
            comm.control.watchdog.leave()
            comm.transport.release()
        errors[name] = str(caught.value)
    return errors


def test_a_rank_that_differs_is_named_on_all_ranks(ranks: Pools) -> None:
    first, *others = ranks(3).run(differs, "windows")
    assert all(other == first for other in others)
    for name, (_, texts) in OTHERWISE.items():
        for text in texts:
            assert text.format(usual="ranks 0, 1", odd="rank 2") in first[name]
