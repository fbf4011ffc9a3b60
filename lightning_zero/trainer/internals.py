"""Every private name of Lightning in use, each with its reason.

Lightning may change them in any release, so nothing else in this folder uses one, and a test checks
that Lightning still has them. ``ZeROStrategy`` also inherits some from ``DDPStrategy``:

- ``_precision_plugin``: read by the connector to see whether the user passed a precision plugin
- ``_layer_sync``: converts batch norms, as in ``DDPStrategy.setup``, which is overridden
- ``_lightning_optimizers``: what ``self.optimizers()`` returns, which calls methods on itself
- ``_configure_launcher``, ``_launcher``: where it chooses what starts the ranks
- ``_forward_redirection``: runs step methods of a module by way of ``self.model``, as DDP does
- ``_model``: what ``self.model`` returns, if it is another than the module
- ``_timeout``, ``_get_process_group_backend``: for a process group made before Lightning makes it
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch.optim import Optimizer

VERSION = pl.__version__
SubprocessLauncher = _SubprocessScriptLauncher
"""Starts the other ranks; nothing public runs before it does."""
optimizer_to_device = _optimizer_to_device
"""Moves optimizer states as ``Strategy.teardown`` does, which is overridden."""

ANSWERS_REQUEUE = "_slurm_sigusr_handler_fn"
ANSWERS_END = "_sigterm_notifier_fn"
"""Handlers that answer a signal at once, on one rank; there is no public way to answer later."""
ASKS_FOR_END = "_broadcast_sigterm_tensor"
"""Asks rank 0 at each batch whether it was told to end, and waits until its device has answered."""


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the user's optimizer, for which ``LightningOptimizer`` has no public name."""
    inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    assert isinstance(inner, Optimizer)
    return inner


def trainer_of(module: pl.LightningModule) -> Any:
    """Return the module's Trainer, or ``None``, where ``module.trainer`` raises."""
    return module._trainer


def set_device_mesh(module: pl.LightningModule, mesh: Any) -> None:
    """Give a module what ``device_mesh`` returns in ``configure_model``; nothing public does."""
    module._device_mesh = mesh


def signal_connector(trainer: Any) -> Any:
    """Return the object that registers the Trainer's signal handlers."""
    return trainer._signal_connector


def draws_graphs(logger: Any) -> bool:
    """Return whether a logger's ``log_graph`` is enabled; TensorBoard's is off by default."""
    return bool(getattr(logger, "_log_graph", True))
