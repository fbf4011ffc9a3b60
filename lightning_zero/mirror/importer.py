"""Imports ``lightning_zero.trainer`` once more, as ``lightning_zero.mirror.trainer``.

The modules are executed a second time from the same source, in which every import of Lightning, and
of ``lightning_zero.trainer`` itself, has the mirror's name.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

_PACKAGE = Path(__file__).resolve().parents[1]
_MIRROR = "lightning_zero.mirror.trainer"
_NAMES = {
    "lightning.pytorch": "pytorch_lightning",
    "lightning.fabric": "lightning_fabric",
    "lightning_zero.trainer": _MIRROR,
}


class MirrorFinder(MetaPathFinder):
    """Finds the mirror's modules in the files of ``lightning_zero.trainer``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Describe the mirror's module of this name, if it is one."""
        if not f"{fullname}.".startswith(f"{_MIRROR}."):
            return None
        place = _PACKAGE.joinpath(*fullname.split(".")[2:])
        is_package = place.is_dir()
        file = place / "__init__.py" if is_package else place.with_suffix(".py")
        if not file.exists():
            return None
        return spec_from_file_location(
            fullname,
            file,
            loader=_MirrorLoader(fullname, str(file)),
            submodule_search_locations=[str(place)] if is_package else None,
        )


class _MirrorLoader(SourceFileLoader):
    """Compiles a module with other names in its imports, without touching its cached bytecode.

    Lines and file are the source's own, so tracebacks and ``inspect.getsource`` show it.
    """

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, and register the strategies' names when they are all there."""
        super().exec_module(module)
        if module.__name__ == _MIRROR:
            # Not when the mirror is imported: that may be in the middle of this.
            registry = import_module("pytorch_lightning.strategies").StrategyRegistry
            module.ZeROStrategy.register_strategies(registry)

    def get_code(self, fullname: str) -> CodeType:
        """Compile the module of that file under the mirror's names."""
        tree = _Renamed().visit(ast.parse(self.get_data(self.path), self.path))
        return compile(tree, self.path, "exec", dont_inherit=True)


class _Renamed(ast.NodeTransformer):
    """Gives imports the mirror's names."""

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
    return module
