"""Every case of `tests/cases` gives under every way what it gives under DDP."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

from tests import cases
from tests.oracle.play import CASES, play_all
from tests.oracle.ranks import Pools

ITEMS = []
"""The module, the name and the world size of each case."""

for _, _name, _ in pkgutil.iter_modules(cases.__path__, "tests.cases."):
    _known = set(CASES)
    importlib.import_module(_name)
    ITEMS += [(_name, n, w) for n, c in CASES.items() if n not in _known for w in c.worlds]


@pytest.mark.parametrize(
    ("module", "name", "world"),
    ITEMS,
    ids=[f"{CASES[name].feature}-{name}-{world}" for _, name, world in ITEMS],
)
def test_case(ranks: Pools, tmp_path: Path, module: str, name: str, world: int) -> None:
    answers = ranks(world).run(play_all, module, name, world, str(tmp_path), timeout=120)
    found = [f"rank {rank}, {text}" for rank, texts in enumerate(answers) for text in texts]
    assert not found, "\n".join(found[:12])
