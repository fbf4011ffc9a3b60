"""The matrix of versions: what is tried is what is promised, and each row says what came of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_benchmarks import load
from tests.oracle.ranks import ROOT

ONE = ["--torch", "2.13", "--lightning", "2.6"]


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


def test_what_cannot_be_had_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = load("matrix")
    assert matrix.main(["--python", "9.9", *ONE]) == 0
    assert "| 9.9 | 2.13 | 2.6 |  | skipped: no interpreter 9.9 here |" in capsys.readouterr().out
    monkeypatch.setattr(matrix, "interpreter", lambda version: version)
    monkeypatch.setattr(matrix, "install", lambda *_: "No matching distribution")
    assert matrix.main(["--python", "3.11", *ONE]) == 0
    assert "| skipped: No matching distribution |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        (0, "....\n=== 4 passed in 1s ===\n", "passed (4 passed in 1s)"),
        (1, "FAILED tests/x.py::test_y - no\n1 failed\n", "failed: tests/x.py::test_y - no"),
        (4, "no such file\n", "failed: no such file"),
    ],
)
def test_a_row_has_the_result_of_the_tests(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    text: str,
    said: str,
) -> None:
    matrix = load("matrix")

    def run(command: list[str]) -> tuple[int, Any]:
        return (code, text) if "pytest" in command else (0, "2.13.0 2.6.6\n")

    monkeypatch.setattr(matrix, "interpreter", lambda version: version)
    monkeypatch.setattr(matrix, "install", lambda *_: "")
    monkeypatch.setattr(matrix, "run", run)
    assert matrix.main(["--python", "3.11", *ONE]) == (code != 0)
    out = capsys.readouterr().out
    assert f"| 3.11 | 2.13 | 2.6 | 2.13.0 2.6.6 | {said} |" in out


def test_every_benchmark_is_in_the_list() -> None:
    folder: Path = ROOT / "examples" / "benchmarks"
    text = (folder / "README.md").read_text()
    assert [path.name for path in folder.glob("*.py") if path.name not in text] == []
    assert re.findall(r"\]\(([^)]+)\)", text)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (folder / link).exists(), link
