"""Saving and loading sharded state: the plain file that DDP would have written, or a directory.

=============== ===================================================================================
save            the saves of a run, and each of them: agree, write, rename
dcp             directories of torch.distributed.checkpoint, by torch's planners
load            loading a checkpoint or weights of any format, by all ranks together
safetensors     files of that format
state_dicts     the state dicts of a sharded module and of its optimizers, and loading them
values          ``ShardedValue``: a sharded tensor in a state dict
archive         a file: one pickle, the storages it refers to, where they lie, and reading it
files           names, origin, temporary files, writing at offsets, what ranks of a host share
=============== ===================================================================================
"""

from lightning_zero.checkpoint.dcp import Directory, DirectorySave, is_directory
from lightning_zero.checkpoint.files import Provenance, existing, provenance
from lightning_zero.checkpoint.load import (
    are_safetensors,
    damage,
    load,
    load_weights,
    read_file,
    read_weights,
    require_checkpoint,
)
from lightning_zero.checkpoint.safetensors import read_safetensors, write_safetensors
from lightning_zero.checkpoint.save import FileSave, Saver, collected
from lightning_zero.checkpoint.state_dicts import (
    load_module_state,
    load_optimizer_state,
    loadable,
    module_state,
    optimizer_state,
    with_integer_ids,
)
from lightning_zero.checkpoint.values import ShardedValue
