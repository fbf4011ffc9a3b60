"""ZeRO in Fabric, and what the Trainer's strategy shares with it.

strategy       ``ZeROStrategy`` for ``lightning.Fabric``
checkpointing  its base class that saves and loads
module         what ``fabric.setup`` wraps
precision      precisions on pieces, for Fabric and the Trainer
internals      every private name of Fabric in use
"""

from lightning_zero.fabric.internals import to_device_but_parameters
from lightning_zero.fabric.module import ShardedModule
from lightning_zero.fabric.precision import FabricPrecision, ShardedPrecision, scaler_of
from lightning_zero.fabric.strategy import ZeROStrategy

__all__ = [
    "FabricPrecision",
    "ShardedModule",
    "ShardedPrecision",
    "ZeROStrategy",
    "scaler_of",
    "to_device_but_parameters",
]
