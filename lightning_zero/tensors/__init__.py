"""Facts about torch tensors, on which everything else stands.

=========== ====================================================================================
lasting     ordinary tensors, also made within inference mode
nested      the tensors in nested values
properties  what can be done to a tensor, by what it needs of the tensor's memory
chunks      parts of large tensors that are worked on one after the other
storages    memory that is counted for as long as somebody holds it
large_pages memory that is taken in large pages
lent_memory memory that is lent again when nothing refers to it any more
profiling   the package's verbs as named ranges in a profile
internals   every private name of torch in use, with its reason
=========== ====================================================================================
"""

from lightning_zero.tensors.chunks import numel_at_a_time
from lightning_zero.tensors.large_pages import LARGE_BYTES, ask_for_large_pages
from lightning_zero.tensors.lasting import lasting_tensors
from lightning_zero.tensors.lent_memory import SECTOR, LentMemory
from lightning_zero.tensors.nested import named_tensors, tensors_in
from lightning_zero.tensors.profiling import span, unseen
from lightning_zero.tensors.storages import Storages

__all__ = [
    "LARGE_BYTES",
    "SECTOR",
    "LentMemory",
    "Storages",
    "ask_for_large_pages",
    "lasting_tensors",
    "named_tensors",
    "numel_at_a_time",
    "span",
    "tensors_in",
    "unseen",
]
