"""The transport of ranks that share one host's CPUs: they read each other's memory.

Nothing outside of this folder knows of it but those who choose it, and through one word: where a
transport ``reads_peers``, a gather needs no peer to take part, and masters change only while no
rank reads them.

window            memory that peers have mapped
shared_memory     the transport: a gather is a copy, a reduction a sum over the peers' buffers,
                  in windows that are reused once peers have read them
sync_windows      sync points through memory instead of messages
dry_shared_memory the transport in a dry run
"""

from lightning_zero.comm.one_host.dry_shared_memory import DrySharedMemory
from lightning_zero.comm.one_host.shared_memory import SharedMemory
from lightning_zero.comm.one_host.sync_windows import SyncWindows
