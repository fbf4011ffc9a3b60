"""Saving and loading: sharded state as the plain file that DDP would have written."""

from lightning_zero.checkpoint.conversion import add_convert_command, convert
from lightning_zero.checkpoint.directory_save import DirectorySave
from lightning_zero.checkpoint.inspection import add_inspect_command, damage, describe
from lightning_zero.checkpoint.mapped_file import load
from lightning_zero.checkpoint.provenance import Provenance
from lightning_zero.checkpoint.save import Save
from lightning_zero.checkpoint.saver import Saver, collected
from lightning_zero.checkpoint.spread import Spread
from lightning_zero.checkpoint.state import (
    check_optimizer_states,
    load_module_state,
    load_optimizer_state,
    module_state,
    optimizer_state,
    rehearse,
)
from lightning_zero.checkpoint.weights import load_weights

__all__ = [
    "DirectorySave",
    "Provenance",
    "Save",
    "Saver",
    "Spread",
    "add_convert_command",
    "add_inspect_command",
    "check_optimizer_states",
    "collected",
    "convert",
    "damage",
    "describe",
    "load",
    "load_module_state",
    "load_optimizer_state",
    "load_weights",
    "module_state",
    "optimizer_state",
    "rehearse",
]
