"""Ranks that differ before a step: one error, the same on all ranks, names what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.engine import rank_check
from tests.oracle.checkpoints import told
from tests.oracle.projects import Regression, make_strategy, make_trainer, rows
from tests.oracle.ranks import Pools


def test_what_cannot_be_compared_is_left_out() -> None:
    values = [0.1, {nn.ReLU, nn.Linear}, torch.device("cuda:3"), torch.zeros(2), object()]
    lines = [line for x in values for line in rank_check.lines_of({"It": {"x": x}})]
    classes = "{torch.nn.modules.activation.ReLU, torch.nn.modules.linear.Linear}"
    assert lines == ["It: x 0.1", f"It: x {classes}", "It: x cuda"]


def tie(m: Any) -> None:
    m.head.weight = m.net.stem.weight


def two_groups(m: Any) -> None:
    first, *others = m.parameters()
    groups = [{"params": others}, {"params": [first]}]
    m.configure_optimizers = lambda: torch.optim.AdamW(groups, m.lr)


SETTINGS: dict[str, dict[str, Any]] = {
    "stage": {"stage": 2},
    "units": {"units": {nn.LayerNorm}},
    "refused": {"units": {nn.Conv2d}},
}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "width": lambda m: setattr(m, "head", nn.Linear(6, 5)),
    "order": lambda m: m._modules.update(net=m._modules.pop("net")),
    "frozen": lambda m: m.head.weight.requires_grad_(False),
    "tie": tie,
    "buffer": lambda m: m.register_buffer("shift", torch.zeros(5)),
    "optimizer's class": lambda m: setattr(m, "optimizer", torch.optim.SGD),
    "optimizer's lr": lambda m: setattr(m, "lr", torch.tensor(0.25)),
    "optimizer's groups": two_groups,
}
"""What a rank does otherwise."""
USUAL, ODD, FORM = "ranks 0, 1: ", "rank 2: ", "shape (6, 6), float32, trained"
TEXTS = {
    "stage": [f"{USUAL}The strategy: stage 3", f"{ODD}The strategy: stage 2"],
    "units": [f"{ODD}Unit 'net.blocks.0.norm'"],
    "refused": [f"{ODD}Unit 'units=Conv2d matches no module of Regression"],
    "width": [f"{USUAL}Parameter 'head.weight': {FORM}", f"{ODD}Parameter 'head.weight': shape (5"],
    "order": ["another order: Parameter 'head.weight'", "another order: Parameter 'net.stem.weig"],
    "frozen": [f"{ODD}Parameter 'head.weight': shape (6, 6), float32, frozen"],
    "tie": [f"{ODD}Parameter 'head.weight': {FORM}, tied to 'net.stem.weight'"],
    "buffer": [f"{USUAL}Buffer 'shift': shape (3,)", f"{ODD}Buffer 'shift': shape (5,)"],
    "optimizer's class": [
        f"{USUAL}Optimizer 0: class torch.optim.adamw.AdamW",
        f"{ODD}Optimizer 0: class torch.optim.sgd.SGD",
    ],
    "optimizer's lr": [
        f"{USUAL}Group 0 of optimizer 0: lr 0.05",
        f"{ODD}Group 0 of optimizer 0: lr 0.25",
    ],
    "optimizer's groups": [f"{ODD}Parameter 'net.stem.weight' of optimizer 0: in group 1"],
}
"""What the error says of it."""


def differs() -> dict[str, str]:
    """The last rank does each thing otherwise; every rank returns its errors."""
    errors, is_odd = {}, dist.get_rank() == dist.get_world_size() - 1
    for name in TEXTS:
        module = Regression()
        module.register_buffer("shift", torch.zeros(3))
        if is_odd:
            CHANGES.get(name, id)(module)
        settings = {"stage": 3, **(SETTINGS.get(name, {}) if is_odd else {})}
        trainer = make_trainer(make_strategy(settings.pop("stage"), **settings))
        errors[name] = told(trainer.fit, module, rows())
    return errors


def test_a_rank_that_differs_is_named_on_all_ranks(ranks: Pools) -> None:
    first, *others = ranks(3).run(differs)
    assert all(other == first for other in others)
    for name, texts in TEXTS.items():
        assert "RuntimeError: The ranks differ" in first[name]
        for text in texts:
            assert text in first[name], (name, first[name])
