"""The strategies, precision and monitors for ``pytorch_lightning`` and ``lightning_fabric``.

These packages have classes and registries of their own, so their Trainer and Fabric accept no
strategy or callback of ``lightning``. The modules of ``lightning_zero.trainer`` and ``.fabric`` are
therefore executed a second time from the same source, with the other names in their imports:

- ``importer``: finds and compiles them as ``lightning_zero.mirror.trainer`` and ``.fabric``
- ``arrival``: calls a function when a module is imported

None of this happens, and neither is imported, until the project imports it::

    import lightning_zero
    from pytorch_lightning import Trainer

    trainer = Trainer(strategy="zero3")
    trainer = Trainer(
        strategy=lightning_zero.mirror.ZeROStrategy(stage=2),
        callbacks=[lightning_zero.mirror.MemoryMonitor()],
    )

    from lightning_fabric import Fabric

    fabric = Fabric(strategy="zero3")
    fabric = Fabric(strategy=lightning_zero.mirror.fabric.ZeROStrategy(stage=2))
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from lightning_zero.mirror.arrival import call_when_imported
from lightning_zero.mirror.importer import MirrorFinder

if TYPE_CHECKING:
    from lightning_zero.trainer import (
        MemoryMonitor,
        TrafficMonitor,
        ZeROPrecision,
        ZeROStrategy,
    )

__all__ = [
    "MemoryMonitor",
    "TrafficMonitor",
    "ZeROPrecision",
    "ZeROStrategy",
    "register_when_imported",
]

sys.meta_path.insert(0, MirrorFinder())


def __getattr__(name: str) -> Any:
    if name == "fabric":
        return _load_fabric()
    if name in __all__:
        return getattr(_load(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register_when_imported() -> None:
    """Register the strategies with the packages when they are imported, if ever."""
    call_when_imported("pytorch_lightning", _load)
    call_when_imported("lightning_fabric", _load_fabric)


def _load() -> Any:
    return importlib.import_module(f"{__name__}.trainer")


def _load_fabric() -> Any:
    return importlib.import_module(f"{__name__}.fabric")
