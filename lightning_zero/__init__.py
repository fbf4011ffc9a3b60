"""ZeRO for PyTorch Lightning: weights, gradients and optimizer states partitioned over the ranks.

Importing the package registers its strategies with Lightning::

    import lightning_zero
    trainer = Trainer(strategy="zero3")
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_zero.access import full_grad, gathered, grad_norm
from lightning_zero.checkpoint import load_weights
from lightning_zero.precision import ZeROPrecision
from lightning_zero.strategy import ZeROStrategy

__all__ = ["ZeROPrecision", "ZeROStrategy", "full_grad", "gathered", "grad_norm", "load_weights"]

ZeROStrategy.register_strategies(StrategyRegistry)
