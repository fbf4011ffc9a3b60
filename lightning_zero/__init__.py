"""ZeRO for PyTorch Lightning: weights, gradients and optimizer states partitioned over the ranks.

Importing the package registers its strategies with Lightning::

    import lightning_zero
    trainer = Trainer(strategy="zero3")
"""

import importlib
import sys
from pathlib import Path

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

# `lightning-zero --help` and `python -m lightning_zero --help` do not wait for torch.
_words = sys.orig_argv[1:]
_is_script = Path("".join(_words[:1])).name == "lightning-zero"
_is_command = _is_script or _words[:2] == ["-m", "lightning_zero"]

if not (_is_command and {"-h", "--help", "--version"} & set(_words)):
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_zero import fabric
    from lightning_zero.checkpoint import load_weights
    from lightning_zero.engine import full_grad, gathered, grad_norm, join
    from lightning_zero.memory import estimate
    from lightning_zero.trainer import MemoryMonitor, ZeROPrecision, ZeROStrategy

    ZeROStrategy.register_strategies(StrategyRegistry)
    fabric.ZeROStrategy.register_strategies(STRATEGY_REGISTRY)
    if {"pytorch_lightning", "lightning_fabric"} & set(sys.modules):
        importlib.import_module("lightning_zero.mirror")
