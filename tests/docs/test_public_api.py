"""What a user may rely on: names, arguments, registered strategies, declared dependencies."""

import ast
import contextlib
import inspect
import re
import sys
from pathlib import Path

import pytest
from lightning.pytorch.strategies import StrategyRegistry

import lightning_zero
from tests.oracle.ranks import ROOT

NAMES = [
    "MemoryMonitor",
    "ZeROPrecision",
    "ZeROStrategy",
    "estimate",
    "full_grad",
    "gathered",
    "grad_norm",
    "join",
    "load_weights",
]

STRATEGIES = {
    f"zero{name}{suffix}": (int(name[0]), launcher)
    for name in ("1", "2", "3", "2_offload", "3_offload", "3_nvme")
    for suffix, launcher in (
        ("", "subprocess"),
        ("_spawn", "spawn"),
        ("_fork", "fork"),
        ("_notebook", "notebook"),
    )
}


def test_names_are_frozen() -> None:
    assert sorted(lightning_zero.__all__) == NAMES
    assert all(inspect.getdoc(getattr(lightning_zero, name)) for name in NAMES)


def test_arguments_are_given_by_name() -> None:
    parameters = inspect.signature(lightning_zero.ZeROStrategy).parameters.values()
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters if p.name != "stage")


def test_strategies_are_registered() -> None:
    ours = {name for name in StrategyRegistry if name.startswith("zero")}
    assert ours == set(STRATEGIES)
    for name, (stage, launcher) in STRATEGIES.items():
        strategy = StrategyRegistry.get(name)
        assert isinstance(strategy, lightning_zero.ZeROStrategy)
        assert strategy.settings.stage == stage
        expected = {"subprocess": "popen", "notebook": "fork"}.get(launcher, launcher)
        assert strategy._start_method == expected


def test_every_setting_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    rows = re.findall(r"^\| `(\w+)`( †)? \| `([^`]+)` \|", text, re.MULTILINE)
    found = inspect.signature(lightning_zero.ZeROStrategy).parameters
    of_lightning = re.findall(r"`(\w+)`", text[text.rindex("\n\n") :])
    own = {name: one for name, one in found.items() if name not in of_lightning}
    assert {name for name, _, _ in rows} == set(own)
    for name, is_of_trainer, default in rows:
        assert ast.literal_eval(default) == own[name].default, name
        with pytest.raises(TypeError) if is_of_trainer else contextlib.nullcontext():
            lightning_zero.fabric.ZeROStrategy(**{name: own[name].default})


OPTIONAL = {"jsonargparse", "matplotlib", "transformers", "peft"}
"""Imported where they are used, with an error that says what to install."""
DISTRIBUTIONS = {"yaml": "pyyaml", "typing_extensions": "typing-extensions"}


def test_what_is_imported_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    declared = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert declared is not None
    names = set(re.findall(r'^    "([\w-]+)', declared[1], re.MULTILINE))
    found = set()
    for path in Path(lightning_zero.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = node.names if isinstance(node, ast.Import) else []
            found |= {alias.name.partition(".")[0] for alias in named}
            if isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    third = found - sys.stdlib_module_names - OPTIONAL - {"lightning_zero"}
    assert {DISTRIBUTIONS.get(name, name) for name in third} == names
