"""Facts about torch tensors, and memory and files for them, on which everything else builds.

=========== ====================================================================================
lasting     ordinary tensors, even when created in inference mode
outside     a place outside of the contexts of torch that user code is in
nested      the tensors in nested values
garbage     no search for reference cycles while very many objects are made
properties  torch's functions, grouped by what they need of a tensor's memory
chunks      the chunk size in which large tensors are processed
storages    storages, counted while they are alive
pages       huge pages of host memory, and pages of files brought in ahead
wrapped     tensors that wrap others, taken apart and made again
work        what is in flight, and may be waited for
staging     buffers through which threads move chunks between device, host and files
uploads     copies to a device of what threads bring to pinned memory first
host_copies copies between a device and its host, for offload
scratch     unnamed files, in which tensors rest
profiling   the package's verbs as named ranges in a profile
internals   every private name of torch in use, with the reason
=========== ====================================================================================
"""

from lightning_zero.tensors.chunks import numel_at_a_time
from lightning_zero.tensors.garbage import uncollected
from lightning_zero.tensors.host_copies import (
    HostCopies,
    Landing,
    pinned_bytes,
    require_abilities,
)
from lightning_zero.tensors.lasting import lasting_tensors
from lightning_zero.tensors.nested import named_tensors, tensors_in
from lightning_zero.tensors.outside import outside, runs_outside
from lightning_zero.tensors.pages import LARGE_BYTES, ask_for_large_pages, fault_in, mapped_storage
from lightning_zero.tensors.profiling import span, unseen
from lightning_zero.tensors.scratch import Scratch, StagedFile
from lightning_zero.tensors.staging import (
    CHUNK_BYTES,
    NUM_BUFFERS,
    PAGE,
    Job,
    StagingMemory,
    Threads,
    in_pages,
)
from lightning_zero.tensors.storages import Storages
from lightning_zero.tensors.uploads import RING_BYTES, UploadPart
from lightning_zero.tensors.work import Work
from lightning_zero.tensors.wrapped import (
    bytes_held,
    can_wrap,
    is_wrapper,
    rewrapped,
    wrapper_of,
)
