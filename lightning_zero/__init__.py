"""ZeRO for PyTorch Lightning: weights, gradients and optimizer states partitioned over the ranks.

Importing the package registers its strategies with Lightning::

    import lightning_zero
    trainer = Trainer(strategy="zero3")
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_zero import fabric, mirror
from lightning_zero.checkpoint import load_weights
from lightning_zero.engine import full_grad, gathered, grad_norm, join
from lightning_zero.memory import estimate
from lightning_zero.trainer import MemoryMonitor, TrafficMonitor, ZeROPrecision, ZeROStrategy

__version__ = "0.1.0"

__all__ = [
    "MemoryMonitor",
    "TrafficMonitor",
    "ZeROPrecision",
    "ZeROStrategy",
    "estimate",
    "full_grad",
    "gathered",
    "grad_norm",
    "join",
    "load_weights",
]

ZeROStrategy.register_strategies(StrategyRegistry)
fabric.ZeROStrategy.register_strategies(STRATEGY_REGISTRY)
mirror.register_when_imported()
