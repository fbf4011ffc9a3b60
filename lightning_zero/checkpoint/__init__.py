"""Saving and loading: sharded state as the plain file that DDP would have written."""

from lightning_zero.checkpoint.load import load
from lightning_zero.checkpoint.save import Provenance
from lightning_zero.checkpoint.saver import Saver, collected
from lightning_zero.checkpoint.state import (
    check_optimizer_states,
    load_module_state,
    load_optimizer_state,
    module_state,
    optimizer_state,
)

__all__ = [
    "Provenance",
    "Saver",
    "check_optimizer_states",
    "collected",
    "load",
    "load_module_state",
    "load_optimizer_state",
    "module_state",
    "optimizer_state",
]
