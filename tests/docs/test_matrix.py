"""The matrix of versions: what is tried is what is promised, and each row says what came of it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.test_benchmarks import load
from tests.oracle.ranks import ROOT


def test_the_oldest_versions_that_are_promised_are_tried() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    tried = load("matrix").parse([])
    for name, pattern in (
        ("python", r'requires-python = ">=([\d.]+)"'),
        ("torch", r'"torch>=([\d.]+)"'),
        ("lightning", r'"lightning>=([\d.]+),'),
    ):
        (oldest,) = re.findall(pattern, text)
        assert getattr(tried, name)[0] == oldest


def test_the_quick_tests_exist() -> None:
    assert [name for name in load("matrix").QUICK if not (ROOT / name).exists()] == []


def test_every_benchmark_is_in_the_list() -> None:
    folder: Path = ROOT / "examples" / "benchmarks"
    text = (folder / "README.md").read_text()
    assert [path.name for path in folder.glob("*.py") if path.name not in text] == []
    assert re.findall(r"\]\(([^)]+)\)", text)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (folder / link).exists(), link
