"""Every private name of Fabric in use, each with its reason.

Lightning may change them in any release, so nothing else in this folder uses one. ``ZeROStrategy``
also inherits or assigns some of ``DDPStrategy``:

- ``_precision``: read by the connector to see whether the user passed a precision plugin
- ``_backward_sync_control``: read by ``fabric.no_backward_sync``
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.fabric.strategies import _StrategyRegistry
from lightning.fabric.strategies.strategy import (
    _apply_filter,
    _BackwardSyncControl,
    _validate_keys_for_strict_loading,
)
from lightning.fabric.utilities.device_dtype_mixin import (
    _DeviceDtypeModuleMixin,
    _update_properties,
)
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.fabric.utilities.types import _Stateful
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_zero.plan import stays_whole

StrategyRegistry = _StrategyRegistry
"""The type in the signature of ``Strategy.register_strategies``."""
BackwardSyncControl = _BackwardSyncControl
"""The base class of what ``fabric.no_backward_sync`` asks for."""
Stateful = _Stateful
"""The protocol of objects whose ``state_dict`` Fabric saves."""
apply_filter = _apply_filter
"""Puts the entries of a state that the user's filter keeps into a checkpoint."""
require_keys = _validate_keys_for_strict_loading
"""Raises a ``KeyError`` if a checkpoint lacks what is to be loaded, though loading is strict."""
random_states = partial(_collect_rng_states, include_cuda=False)
"""Returns the states of the host's generators, as Lightning saves and isolates them."""
set_random_states = _set_rng_states
"""Sets them."""


def to_device_but_parameters(module: nn.Module, device: torch.device) -> None:
    """Move buffers and metrics as ``module.to`` does, but no parameters that are to be sharded."""
    for child in module.modules():
        if isinstance(child, Metric):
            child.to(device)
        for name, buffer in child._buffers.items():
            if buffer is not None and not buffer.is_meta:
                child._buffers[name] = buffer.to(device)
        for name, parameter in child._parameters.items():
            if parameter is not None and stays_whole(parameter) and parameter.device != device:
                child._parameters[name] = nn.Parameter(parameter.to(device), requires_grad=False)
    if isinstance(module, _DeviceDtypeModuleMixin):
        _update_properties(module, device=device)  # sets `module.device`


def count_once(module: nn.Module, tensor_size: int) -> None:
    """Make metrics count ranks once that have parts of one model; size 1 undoes it."""
    for child in module.modules():
        if isinstance(child, Metric):
            way = child.dist_sync_fn
            if way is None or getattr(way, "func", None) is _gather:
                gather = partial(_gather, tensor_size=tensor_size)
                child.dist_sync_fn = gather if tensor_size > 1 else None


def _gather(value: Tensor, group: Any = None, *, tensor_size: int) -> list[Tensor]:
    """Gather a metric's state, the same on all ranks, which may decide by it."""
    values = gather_all_tensors(value, group)
    return values[::tensor_size] if group is None else values
