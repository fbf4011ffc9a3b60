"""ZeRO for PyTorch Lightning: weights, gradients and optimizer states partitioned over the ranks.

Importing the package registers its strategies with Lightning::

    import lightning_zero
    trainer = Trainer(strategy="zero3")
"""

import importlib
import sys

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_zero import fabric
from lightning_zero.checkpoint import load_weights
from lightning_zero.engine import full_grad, gathered, grad_norm, join
from lightning_zero.memory import estimate
from lightning_zero.trainer import MemoryMonitor, ZeROPrecision, ZeROStrategy

__version__ = "0.1.0"

__all__ = [
    "MemoryMonitor",
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
if {"pytorch_lightning", "lightning_fabric"} & set(sys.modules):
    importlib.import_module("lightning_zero.mirror")
