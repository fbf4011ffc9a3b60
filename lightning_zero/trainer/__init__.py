"""ZeRO in the Trainer: the strategy, its precision, callbacks and monitors.

- ``strategy``: ``ZeROStrategy``, between the Trainer and the engine
- ``run``: the strategy's state for one call of the Trainer; callbacks adapted to shards; signals
  answered by all ranks together; training data that ends at the same batch on all ranks
- ``deepspeed_config``: what a DeepSpeed configuration asks of the Trainer and the module
- ``precision``: ``ZeROPrecision``: casting, loss scaling and clipping on pieces
- ``memory_monitor``: a callback that logs bytes
- ``internals``: every private name of the Trainer in use; those of Fabric are in ``fabric``
"""

from lightning_zero.trainer.memory_monitor import MemoryMonitor
from lightning_zero.trainer.precision import ZeROPrecision
from lightning_zero.trainer.strategy import ZeROStrategy

__all__ = ["MemoryMonitor", "ZeROPrecision", "ZeROStrategy"]
