"""Calls a function when a module has been imported: now, later, or never."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def call_when_imported(name: str, function: Callable[[], None]) -> None:
    """Call ``function`` at once if module ``name`` was imported, else right after it is."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _Finder(name, function))


class _Finder(MetaPathFinder):
    """Finds one module, as the other finders would, and watches it being loaded."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name = name
        self._function = function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._function)
        return spec


class _Loader(Loader):
    """Another loader, and a call after it."""

    def __init__(self, loader: Loader, function: Callable[[], None]) -> None:
        self._loader = loader
        self._function = function

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module shall find its own loader, whose data files others may ask for.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._function()
