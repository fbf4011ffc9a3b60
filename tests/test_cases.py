"""Every case of `tests/cases` gives under every way what it gives under DDP."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from pathlib import Path

import pytest

from tests import cases
from tests.oracle.play import CASES, TRANSPORTS, play_all
from tests.oracle.ranks import Pools

for _, _name, _ in pkgutil.iter_modules(cases.__path__, "tests.cases."):
    importlib.import_module(_name)
ITEMS = [(each.where, name, world) for name, each in CASES.items() for world in each.worlds]
"""The module, the name and the world size of each case."""


@pytest.mark.parametrize(
    ("module", "name", "world"),
    [pytest.param(*item, marks=[pytest.mark.slow] * CASES[item[1]].is_slow) for item in ITEMS],
    ids=[f"{CASES[name].feature}-{name}-{world}" for _, name, world in ITEMS],
)
def test_case(ranks: Pools, tmp_path: Path, module: str, name: str, world: int) -> None:
    limit = 300 if CASES[name].is_slow else 120
    answers = ranks(world).run(play_all, module, name, world, str(tmp_path), timeout=limit)
    found = [f"rank {rank}, {text}" for rank, texts in enumerate(answers) for text in texts]
    assert not found, "\n".join(found[:12])


DIMENSIONS: dict[str, tuple[object, ...]] = {
    "strategy": (1, 2, 3),
    "precision": ("32-true", "bf16-mixed"),
    "transport": TRANSPORTS,
    "world": (1, 2),
}
"""What every feature is played with."""
EXEMPT = {
    ("complex", "precision", "bf16-mixed"): "autocast knows no complex numbers",
    ("transforms", "strategy", 3): "refused at stage 3",
    ("tensor parallel", "world", 1): "there is nothing to cut over",
}
"""Pairs that are left out, and why."""
Pair = tuple[str, str, object]


def covered() -> Counter[Pair]:
    """Return how many ways have each feature with each value."""
    counts: Counter[Pair] = Counter()
    for case in CASES.values():
        for way in (way for world in case.worlds for way in case.ways(world)):
            # A rank alone sends nothing.
            kinds = [kind for kind in DIMENSIONS if kind != "transport" or way.world > 1]
            counts.update((case.feature, kind, getattr(way, kind)) for kind in kinds)
    return counts


def test_every_pair_is_covered() -> None:
    counts = covered()
    values = [(kind, value) for kind, each in DIMENSIONS.items() for value in each]
    pairs = {(case.feature, *each) for case in CASES.values() for each in values}
    assert {pair for pair in pairs if not counts[pair]} == set(EXEMPT)
