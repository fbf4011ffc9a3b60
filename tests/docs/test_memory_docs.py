"""Every number on the page about memory is what the estimator prints."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_zero.commands import main
from tests.oracle.launch import run_here, run_script
from tests.oracle.ranks import ROOT, Pools

COMPARISON = "examples/compare_stages.py"
PAGE = ROOT / "docs" / "memory.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """The language and the text of each block."""
    return BLOCK.findall(PAGE.read_text())


def outputs() -> list[tuple[str, str]]:
    """Return what the page says that a block prints, and what it prints."""
    found: list[tuple[str, str]] = []
    names: dict[str, Any] = {"__name__": "memory"}
    printed = ""
    for language, text in blocks():
        if language == "text":
            found.append((text, printed))
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            if language == "python" and "Trainer" not in text:
                exec(compile(text, str(PAGE), "exec"), names)
            if language == "console":
                command, said = text.split("\n", 1)
                assert main(shlex.split(command.removeprefix("$ "))[1:]) == 0
                found.append((said, out.getvalue()))
        printed = out.getvalue()
    return found


def test_the_page_says_what_is_printed() -> None:
    pairs = outputs()
    assert len(pairs) == 8
    for said, printed in pairs:
        assert printed.rstrip() == said.rstrip()


def test_the_callback_block_runs(ranks: Pools, tmp_path: Path) -> None:
    (text,) = [t for language, t in blocks() if language == "python" and "Trainer" in t]
    ranks(1).run(run_here, text, cwd=tmp_path)
    assert (tmp_path / "memory" / "memory.html").exists()


def comparison_on_ranks(*words: str) -> str:
    """Return the table that the example prints, by these ranks in place of its own."""
    example = SimpleNamespace(**runpy.run_path(str(ROOT / COMPARISON)))
    options = example.parse(words)
    results = {strategy: example.train(strategy, options) for strategy in example.STRATEGIES}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        example.show(results, options)
    return printed.getvalue()


@pytest.mark.parametrize("how", ["ranks", pytest.param("script", marks=pytest.mark.slow)])
def test_the_comparison_equals_its_formulas(ranks: Pools, how: str) -> None:
    words = ["--width", "128", "--depth", "4", "--steps", "3"]
    if how == "script":
        out = run_script(COMPARISON, *words, launcher="plain").stdout
    else:
        out = ranks(2).run(comparison_on_ranks, *words)[0]
    rows = [line for line in out.splitlines() if line]
    assert [line.split()[0] for line in rows[1:]] == [
        "per", "weights", "gradients", "master", "states", "total", "formula", "saved", "formula",
        "sent", "formula", "step",
    ]  # fmt: skip
    saved, formula = (re.findall(r"([\d.]+)%", rows[index]) for index in (8, 9))
    assert formula == ["0.0", "37.5", "37.5", "50.0"]
    assert [float(part) for part in saved] == pytest.approx(list(map(float, formula)), abs=0.3)
    sent = [int(count.replace(",", "")) for count in rows[10].split()[1:]]
    by_formula = [int(count.replace(",", "")) for count in rows[11].split()[1:]]
    assert sent[:2] == pytest.approx(by_formula[1:3], rel=0.01)
    assert 0.75 * by_formula[3] < sent[2] <= 1.01 * by_formula[3]
