"""The strategy, its precision and its monitors for projects that import ``pytorch_lightning``.

``pytorch_lightning`` has separate classes and a separate registry, so its Trainer accepts no
strategy or callback of ``lightning.pytorch``. The modules of ``lightning_zero.trainer`` are
therefore executed a second time from the same source, with ``pytorch_lightning`` in their imports:

- ``importer``: finds and compiles them as ``lightning_zero.mirror.trainer``
- ``arrival``: calls a function when a module is imported

None of this happens, and ``pytorch_lightning`` is not imported, until the project imports it::

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
    """Register the strategies with ``pytorch_lightning`` when it is imported, if ever."""
    call_when_imported("pytorch_lightning", _load)


def _load() -> Any:
    return importlib.import_module(f"{__name__}.trainer")
