"""A second import of the folders that import Lightning, as ``lightning_zero.mirror.trainer`` etc.

The modules are executed again from the same source, in which every import of Lightning, and of
these folders themselves, is renamed to the mirror's.
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
_MIRROR = "lightning_zero.mirror"
_REGISTRIES = {
    "fabric": ("lightning_fabric.strategies", "STRATEGY_REGISTRY"),
    "trainer": ("pytorch_lightning.strategies", "StrategyRegistry"),
}
"""The folders that are imported again, each with the registry of its strategy."""
_NAMES = {
    "lightning.pytorch": "pytorch_lightning",
    "lightning.fabric": "lightning_fabric",
    **{f"lightning_zero.{folder}": f"{_MIRROR}.{folder}" for folder in _REGISTRIES},
}


class MirrorFinder(MetaPathFinder):
    """A finder of the mirror's modules in the files of the folders that import Lightning."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the mirror's module of this name, if there is one."""
        inner = fullname.removeprefix(f"{_MIRROR}.").split(".")
        if not fullname.startswith(f"{_MIRROR}.") or inner[0] not in _REGISTRIES:
            return None
        place = _PACKAGE.joinpath(*inner)
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
    """A loader that renames a module's imports, without touching its cached bytecode.

    Line numbers and file are those of the source, so tracebacks and ``inspect.getsource`` show it.
    """

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module; register the strategies once a whole folder is executed."""
        super().exec_module(module)
        where = _REGISTRIES.get(module.__name__.removeprefix(f"{_MIRROR}."))
        if where is not None:
            # Not when pytorch_lightning is imported: that may be in the middle of this.
            registry = getattr(import_module(where[0]), where[1])
            module.ZeROStrategy.register_strategies(registry)

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source with its imports renamed."""
        tree = _Renamed().visit(ast.parse(self.get_data(self.path), self.path))
        return compile(tree, self.path, "exec", dont_inherit=True)


class _Renamed(ast.NodeTransformer):
    """Renames imports to those of the mirror."""

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
