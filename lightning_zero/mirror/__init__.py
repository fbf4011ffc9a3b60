"""The strategy, its precision and its monitors for projects that import ``pytorch_lightning``.

The mirror package has class trees and a registry of its own, so its Trainer takes no strategy and
no callback of ``lightning.pytorch``. So the modules of ``lightning_zero.trainer`` are executed
a second time from the same source, with the mirror's names in their imports:

- ``importer``: finds and compiles them as ``lightning_zero.mirror.trainer``
- ``arrival``: calls a function when a module is imported

Nothing of this happens, and ``pytorch_lightning`` is not imported, until the project imports it
itself::

    import lightning_zero
    from pytorch_lightning import Trainer

    trainer = Trainer(strategy="zero3")
    trainer = Trainer(
        strategy=lightning_zero.mirror.ZeROStrategy(stage=2),
        callbacks=[lightning_zero.mirror.MemoryMonitor()],
    )
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
    if name in __all__:
        return getattr(_load(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register_when_imported() -> None:
    """Register the strategies' names with the mirror as soon as it is imported, if ever."""
    call_when_imported("pytorch_lightning", _load)


def _load() -> Any:
    return importlib.import_module(f"{__name__}.trainer")
