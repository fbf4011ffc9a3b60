"""Saving and loading sharded state: the plain file that DDP would have written, or a directory.

=============== ===================================================================================
module_state    the state dict of a sharded module, and loading it
optimizer_state the state dicts of optimizers, and loading them
cut_values      whole tensors of parameters that tensor parallelism has cut
descriptions    what ranks tell each other of optimizer states, and the entries made of them
save            one save: agree, write, seal, rename
saver           the saves of a run, in the calling thread or in the background
load            reading a checkpoint, whose large tensors stay in the file
unread          archives of ``torch.save`` whose large tensors are not read yet
open_file       files that are read part by part, some of them repeatedly
stored_bytes    bytes of a file that are checked while they are read
checksums       checksums of records and of their blocks
word_sums       a checksum of blocks that is as fast as memory
weights         ``load_weights``: pretrained weights into a module, sharded or not
safetensors     files of that format
``values/``     stand-ins for tensors in a checkpoint that is written or read
``file/``       the plain file of ``torch.save``
``dcp/``        directories of torch.distributed.checkpoint
=============== ===================================================================================
"""

from lightning_zero.checkpoint.cut_values import local_optimizer_states
from lightning_zero.checkpoint.dcp.directory import Directory, is_directory
from lightning_zero.checkpoint.dcp.directory_save import DirectorySave
from lightning_zero.checkpoint.file.file_save import FileSave
from lightning_zero.checkpoint.file.format import REST, Provenance
from lightning_zero.checkpoint.load import (
    check_values,
    content,
    load,
    provenance,
    read_file,
    refuse_deepspeed,
    rest_of,
)
from lightning_zero.checkpoint.module_state import (
    load_module_state,
    module_state,
)
from lightning_zero.checkpoint.optimizer_state import (
    check_optimizer_states,
    load_optimizer_state,
    optimizer_state,
)
from lightning_zero.checkpoint.safetensors import read_safetensors, write_safetensors
from lightning_zero.checkpoint.saver import Saver, collected
from lightning_zero.checkpoint.stored_bytes import DamageError
from lightning_zero.checkpoint.values.lazy_tensor import LazyTensor, in_memory, make_ordinary
from lightning_zero.checkpoint.values.read_on_use import ReadingAssigned
from lightning_zero.checkpoint.values.sharded_value import (
    ElsewhereError,
    ShardedValue,
    without_gathering,
)
from lightning_zero.checkpoint.weights import (
    are_bare_weights,
    load_bare_weights,
    load_weights,
    read_weights,
)
