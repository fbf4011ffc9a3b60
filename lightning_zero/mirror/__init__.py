"""The strategies, precision and monitor for ``pytorch_lightning`` and ``lightning_fabric``.

These packages have classes and registries of their own, so their Trainer and Fabric accept no
strategy or callback of ``lightning``. The folders ``lightning_zero.trainer`` and ``.fabric`` are
therefore executed a second time from the same source, with other names in their imports
(``importer``), and register their strategies with these packages::

    import lightning_zero.mirror
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

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lightning_zero.mirror.importer import MirrorFinder

sys.meta_path.insert(0, MirrorFinder())

if TYPE_CHECKING:
    from lightning_zero import fabric
    from lightning_zero.trainer import MemoryMonitor, ZeROPrecision, ZeROStrategy
else:
    fabric = import_module("lightning_zero.mirror.fabric")

    if find_spec("pytorch_lightning"):
        from lightning_zero.mirror.trainer import MemoryMonitor, ZeROPrecision, ZeROStrategy

__all__ = ["MemoryMonitor", "ZeROPrecision", "ZeROStrategy", "fabric"]
