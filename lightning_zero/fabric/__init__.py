"""ZeRO in Fabric, and what the Trainer's strategy shares with it.

strategy       ``ZeROStrategy`` for ``lightning.Fabric``
checkpointing  ``Checkpoints`` of Fabric and the Trainer
sharding       the base class of both strategies: ranks, and how a module is sharded and wrapped
precision      precisions on pieces, for Fabric and the Trainer
internals      every private name of Fabric in use
"""

from lightning_zero.fabric.checkpointing import Checkpoints, writes_files
from lightning_zero.fabric.internals import count_once
from lightning_zero.fabric.precision import FabricPrecision, ShardedPrecision, grads_of
from lightning_zero.fabric.sharding import ShardedModule, Sharding, init_device
from lightning_zero.fabric.strategy import ZeROStrategy

__all__ = [
    "Checkpoints",
    "FabricPrecision",
    "ShardedModule",
    "ShardedPrecision",
    "Sharding",
    "ZeROStrategy",
    "count_once",
    "grads_of",
    "init_device",
    "writes_files",
]
