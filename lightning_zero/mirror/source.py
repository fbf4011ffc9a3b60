"""Rooms that know Lightning, run again with the names of the mirror package."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_NAMES = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}


class _Renamed(ast.NodeTransformer):
    """Imports of Lightning, and of rooms that have a twin here, under their other names."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        node.module = _renamed(node.module or "")
        return node

    def visit_Import(self, node: ast.Import) -> ast.Import:
        for alias in node.names:
            alias.name = _renamed(alias.name)
        return node


def _renamed(module: str) -> str:
    for name, other in _NAMES.items():
        if f"{module}.".startswith(f"{name}."):
            return other + module.removeprefix(name)
    package, _, room = module.partition(".")
    if package == "lightning_zero" and (_HERE / f"{room}.py").exists():
        return f"lightning_zero.mirror.{room}"
    return module


def run_room(room: str, namespace: dict[str, Any]) -> None:
    """Run the source of ``lightning_zero.<room>`` in the twin's ``namespace``."""
    path = _HERE.parent / f"{room}.py"
    tree = _Renamed().visit(ast.parse(path.read_text(encoding="utf-8"), str(path)))
    exec(compile(tree, str(path), "exec"), namespace)
