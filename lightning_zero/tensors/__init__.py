"""Torch tensors, their memory and files, on which everything else builds; nothing about ZeRO.

========== =====================================================================================
contexts   ordinary tensors, leaving modes, random numbers, no garbage, profiler ranges
nested     the tensors in nested values, and in tensors that wrap others
properties torch's functions, grouped by what they need of a tensor's memory
memory     chunk sizes, huge pages, mapped files
transfers  copies between a device, its host and files by threads and streams, for offload
scratch    unnamed files that hold tensors
internals  every private name of torch in use, with the reason
========== =====================================================================================
"""

from lightning_zero.tensors.contexts import (
    lasting_tensors,
    outside,
    runs_outside,
    span,
    uncollected,
    unseen,
    without_draws,
)
from lightning_zero.tensors.memory import (
    LARGE_BYTES,
    ask_for_large_pages,
    fault_in,
    mapped_storage,
    numel_at_a_time,
)
from lightning_zero.tensors.nested import (
    bytes_held,
    can_wrap,
    is_wrapper,
    rewrapped,
    tensors_in,
    unwrapped,
    wrapper_of,
)
from lightning_zero.tensors.scratch import Scratch, StagedFile
from lightning_zero.tensors.transfers import (
    CHUNK_BYTES,
    NUM_BUFFERS,
    PAGE,
    Buffer,
    HostCopies,
    Job,
    StagingMemory,
    Wait,
    Work,
    in_pages,
    threads,
    wait_for,
)
