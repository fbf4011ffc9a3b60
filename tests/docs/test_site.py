"""The site's pages and the package's facts, which are written in one place and read in others."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_zero
from tests.oracle.ranks import ROOT


def pages(nav: Any) -> list[str]:
    """All pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    values = nav if isinstance(nav, list) else nav.values()
    return [page for value in values for page in pages(value)]


def test_every_page_is_in_the_navigation() -> None:
    found = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(found) == sorted(
        {"index.md", "results.md", *(p.name for p in (ROOT / "docs").glob("*.md"))}
    )


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    named = re.findall(r"^::: lightning_zero\.(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(lightning_zero.__all__)


def test_the_version_is_the_same_everywhere() -> None:
    version = lightning_zero.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_setting_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    rows = re.findall(r"^\| `(\w+)`( †)? \| `([^`]+)` \|", text, re.MULTILINE)
    found = inspect.signature(lightning_zero.ZeROStrategy).parameters
    of_lightning = re.findall(r"`(\w+)`", text[text.rindex("\n\n") :])
    own = {name: one for name, one in found.items() if name not in of_lightning}
    assert {name for name, _, _ in rows} == set(own)
    for name, _, default in rows:
        assert ast.literal_eval(default) == own[name].default, name
    for name, is_of_trainer, _ in rows:
        with pytest.raises(TypeError) if is_of_trainer else contextlib.nullcontext():
            lightning_zero.fabric.ZeROStrategy(**{name: own[name].default})


def imported(path: Path) -> Iterator[str]:
    """The top level of every module that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


OPTIONAL = {"jsonargparse", "matplotlib", "transformers", "peft"}
"""Imported where they are used, with an error that says what to install."""
DISTRIBUTIONS = {"yaml": "pyyaml", "typing_extensions": "typing-extensions"}


def test_what_is_imported_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    declared = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert declared is not None
    names = set(re.findall(r'^    "([\w-]+)', declared[1], re.MULTILINE))
    package = Path(lightning_zero.__file__).parent
    found = {name for path in package.rglob("*.py") for name in imported(path)}
    third = found - sys.stdlib_module_names - OPTIONAL - {"lightning_zero"}
    assert {DISTRIBUTIONS.get(name, name) for name in third} == names
