"""Every number on the page about memory is what the estimator prints."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

from lightning_zero.commands import main
from tests.oracle.launch import run_here
from tests.oracle.ranks import ROOT, Pools

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
    assert len(pairs) == 5
    for said, printed in pairs:
        assert printed.rstrip() == said.rstrip()


def test_the_callback_block_runs(ranks: Pools, tmp_path: Path) -> None:
    (text,) = [t for language, t in blocks() if language == "python" and "Trainer" in t]
    ranks(1).run(run_here, text, cwd=tmp_path)
    assert (tmp_path / "memory" / "memory.json").exists()
