"""Which optimizers are proved to step unit by unit as they step at once, and what tells others."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_optimizer
import schedulefree
import torch
from torch import nn

from lightning_zero.optimizer import Way, verdict_of
from lightning_zero.optimizer.probe import probe
from tests.oracle.own_optimizers import BY_UNIT, NOT_BY_UNIT, Own


def mixed(num_groups: int = 2) -> list[dict[str, Any]]:
    """Groups of parameters of several shapes, with equal options."""
    shapes = [(8, 6), (8,), ()]
    return [
        {"params": [nn.Parameter(torch.randn(shape)) for shape in shapes]}
        for _ in range(num_groups)
    ]


@pytest.mark.parametrize("cls", [*BY_UNIT, Own], ids=lambda cls: cls.__name__)
def test_what_is_proved(cls: type[Own]) -> None:
    verdict = probe(cls(mixed()), by_unit=True)
    assert verdict.way is Way.BY_ELEMENT, verdict.reason
    assert verdict.against_units == ""


@pytest.mark.parametrize("cls", NOT_BY_UNIT, ids=lambda cls: cls.__name__)
def test_what_is_not_is_refused_with_what_was_found(cls: type[Any]) -> None:
    groups = mixed(1 if cls.__name__ == "ByPlace" else 2)
    optimizer = cls(groups[0]["params"] if len(groups) == 1 else groups)
    words = f"^{cls.__name__} .*{NOT_BY_UNIT[cls]}.*AdamW.*remove offload_optimizer"
    with pytest.raises(ValueError, match=words):
        verdict_of(optimizer, by_unit=True)
    verdict_of(optimizer)


OF_PACKAGES: dict[str, tuple[Any, str]] = {
    "Lion": (pytorch_optimizer.Lion, ""),
    "AdEMAMix": (pytorch_optimizer.AdEMAMix, ""),
    "AggMo": (pytorch_optimizer.AggMo, ""),
    "schedulefree": (schedulefree.AdamWScheduleFree, ""),
    "a subclass": (type("Mine", (torch.optim.Adagrad,), {}), ""),
    "Muon": (lambda p: torch.optim.Muon(p[0]["params"][:1]), "mixes the elements"),
    "a wrapper": (
        lambda p: pytorch_optimizer.Lookahead(torch.optim.AdamW(p)),
        "a state_dict with its own format",
    ),
}


@pytest.mark.parametrize("name", OF_PACKAGES)
def test_other_packages(name: str) -> None:
    make, words = OF_PACKAGES[name]
    found = probe(make(mixed()), by_unit=True).against_units
    assert (words in found) if words else not found


def test_one_that_is_stepped_already_is_proved_from_its_states() -> None:
    for cls in BY_UNIT:
        groups = mixed(1)
        optimizer: Any = cls(groups)
        if hasattr(optimizer, "train"):
            optimizer.train()
        for p in groups[0]["params"]:
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert probe(optimizer, by_unit=True).against_units == "", cls
