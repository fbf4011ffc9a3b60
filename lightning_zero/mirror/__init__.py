"""The strategy, its precision and its monitors for projects that import ``pytorch_lightning``.

The mirror package has class trees and a registry of its own, so its Trainer takes no strategy and
no callback of ``lightning.pytorch``. The rooms that know Lightning are therefore run a second time
from the same source, with the mirror's names in their imports (``source.py``). Nothing of this
happens, and ``pytorch_lightning`` is not imported, until the project imports it itself::

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
from typing import TYPE_CHECKING, Any

from lightning_zero.mirror.arrival import call_when_imported

if TYPE_CHECKING:
    from lightning_zero.mirror.monitor import MemoryMonitor
    from lightning_zero.mirror.precision import ZeROPrecision
    from lightning_zero.mirror.strategy import ZeROStrategy
    from lightning_zero.mirror.traffic import TrafficMonitor

__all__ = [
    "MemoryMonitor",
    "TrafficMonitor",
    "ZeROPrecision",
    "ZeROStrategy",
    "register_when_imported",
]

_ROOMS = {
    "MemoryMonitor": "monitor",
    "TrafficMonitor": "traffic",
    "ZeROPrecision": "precision",
    "ZeROStrategy": "strategy",
}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(importlib.import_module(f"{__name__}.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register_when_imported() -> None:
    """Register the strategies' names with the mirror as soon as it is imported, if ever."""
    call_when_imported("pytorch_lightning", _register)


def _register() -> None:
    registry = importlib.import_module("pytorch_lightning.strategies").StrategyRegistry
    __getattr__("ZeROStrategy").register_strategies(registry)
