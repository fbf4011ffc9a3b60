"""Saving and loading sharded state: the plain file that DDP would have written, or a directory.

=============== ===================================================================================
state           the state dict of a sharded module, and loading it
optimizer_state the state dicts of optimizers, and loading them
cut_values      whole tensors of parameters that tensor parallelism has cut
state_entries   what ranks tell each other of optimizer states, and the entries made of it
save            one save: agree, write, seal, rename
saver           the saves of a run, in the calling thread or in the background
load            reading a checkpoint; each rank reads its own ranges
unread          archives whose large tensors are neither read nor mapped
open_file       files that are read part by part, some of them repeatedly
source          where a parameter's values lie, for weights that are read on every use
checksums       checksums of records and of their blocks, and checking what is read
read_ahead      reading ahead in mapped files
kept_parts      parts that are copied as soon as they are checked
word_sums       a checksum of blocks that is as fast as memory
crc             CRC-32 of concatenated byte strings
weights         ``load_weights``: pretrained weights into a module, sharded or not
safetensors     files of that format
``values/``     stand-ins for tensors in a checkpoint that is written or read
``file/``       the plain file of ``torch.save``
``dcp/``        directories of torch.distributed.checkpoint
=============== ===================================================================================
"""

from lightning_zero.checkpoint.cut_values import local_optimizer_states
from lightning_zero.checkpoint.dcp.directory import Directory, is_directory
from lightning_zero.checkpoint.dcp.save import DirectorySave
from lightning_zero.checkpoint.file.format import REST, Provenance
from lightning_zero.checkpoint.file.save import FileSave
from lightning_zero.checkpoint.load import (
    check_values,
    content,
    load,
    mapped,
    provenance,
    rest_of,
    unreadable,
)
from lightning_zero.checkpoint.optimizer_state import (
    check_optimizer_states,
    load_optimizer_state,
    optimizer_state,
    ranges_of_optimizers,
)
from lightning_zero.checkpoint.safetensors import read_safetensors, write_safetensors
from lightning_zero.checkpoint.saver import Saver, collected
from lightning_zero.checkpoint.state import (
    ModuleLoad,
    check_ranges,
    load_module_state,
    module_state,
)
from lightning_zero.checkpoint.values.lazy_tensor import LazyTensor, in_memory
from lightning_zero.checkpoint.values.sharded_value import ElsewhereError, ShardedValue
from lightning_zero.checkpoint.weights import (
    are_bare_weights,
    load_bare_weights,
    load_weights,
    read_weights,
)

__all__ = [
    "REST",
    "Directory",
    "DirectorySave",
    "ElsewhereError",
    "FileSave",
    "LazyTensor",
    "ModuleLoad",
    "Provenance",
    "Saver",
    "ShardedValue",
    "are_bare_weights",
    "check_optimizer_states",
    "check_ranges",
    "check_values",
    "collected",
    "content",
    "in_memory",
    "is_directory",
    "load",
    "load_bare_weights",
    "load_module_state",
    "load_optimizer_state",
    "load_weights",
    "local_optimizer_states",
    "mapped",
    "module_state",
    "optimizer_state",
    "provenance",
    "ranges_of_optimizers",
    "read_safetensors",
    "read_weights",
    "rest_of",
    "unreadable",
    "write_safetensors",
]
