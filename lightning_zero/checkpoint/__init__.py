"""Saving and loading sharded state: the plain file that DDP would have written, or a directory.

=============== ===================================================================================
saver           the saves of a run, in the calling thread or in the background
save            one save: agree, write, rename; and ``FileSave``, to one plain file
dcp             directories of torch.distributed.checkpoint, by torch's planners
load            reading a checkpoint: checksums, and tensors mapped to memory
weights         ``load_weights``: pretrained weights into a module, sharded or not
safetensors     files of that format
module_state    the state dict of a sharded module, and loading it
optimizer_state the state dicts of optimizers, and loading them
values          ``ShardedValue``: a sharded tensor in a state dict
skeleton        a checkpoint as one pickle and the storages it refers to
archive         where every byte of a file lies, and its checksums: arithmetic
writer          writing at offsets of a file, large parts by direct I/O
atomic          temporary files and folders that get their names once they are complete
host_file       a temporary file that the ranks of one host share
reading         errors that name the file, on all ranks alike
provenance      the record of a checkpoint's origin
=============== ===================================================================================
"""

from lightning_zero.checkpoint.dcp import Directory, DirectorySave, is_directory
from lightning_zero.checkpoint.load import (
    EXPECTED,
    are_safetensors,
    damage,
    load,
    provenance,
    read_file,
    read_weights,
    rest_of,
)
from lightning_zero.checkpoint.module_state import load_module_state, module_state
from lightning_zero.checkpoint.optimizer_state import (
    check_optimizer_states,
    load_optimizer_state,
    local_optimizer_state,
    matched,
    optimizer_state,
    with_integer_ids,
)
from lightning_zero.checkpoint.provenance import Provenance
from lightning_zero.checkpoint.reading import DamageError
from lightning_zero.checkpoint.safetensors import read_safetensors, write_safetensors
from lightning_zero.checkpoint.save import FileSave
from lightning_zero.checkpoint.saver import Saver, collected
from lightning_zero.checkpoint.values import ShardedValue
from lightning_zero.checkpoint.weights import load_weights
