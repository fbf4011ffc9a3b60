"""The only folder that knows Lightning: the strategy, its precision, callbacks and monitors.

- ``strategy``: ``ZeROStrategy``, between the Trainer and the engine
- ``checkpointing``: its base class, which saves and loads
- ``steps``: the base class of that, which runs steps in the engine's
- ``early_step``: what keeps units from being stepped amid a backward pass
- ``ranks``: the base class of ``steps``, which joins and leaves the ranks
- ``run``: its state for one call of the Trainer
- ``options``: the arguments that the engine does not need
- ``deepspeed_config``: demands of a DeepSpeed configuration on the Trainer and the module
- ``precision``: ``ZeROPrecision``: casting, loss scale and clipping on pieces
- ``callbacks``: Lightning's callbacks that read or write weights
- ``weight_average``: averages of weights in shards
- ``dataloader``: training data that ends on all ranks together
- ``signals``: signals answered by all ranks at one batch
- ``graph_logging``: loggers that draw the model's graph
- ``memory_monitor``, ``traffic_monitor``: callbacks that log bytes
- ``writing_bar``: a progress bar while weights are written to files
- ``internals``: every private name of Lightning in use
"""

from lightning_zero.trainer.memory_monitor import MemoryMonitor
from lightning_zero.trainer.precision import ZeROPrecision
from lightning_zero.trainer.strategy import ZeROStrategy
from lightning_zero.trainer.traffic_monitor import TrafficMonitor

__all__ = ["MemoryMonitor", "TrafficMonitor", "ZeROPrecision", "ZeROStrategy"]
