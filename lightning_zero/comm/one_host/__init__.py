"""The transport of ranks that share one host's CPUs: they read each other's memory.

It is a faster way for the same data: what ranks must do together, and in one order, is the same as
with messages. Only ``comm`` knows of it: masters change only while no rank reads them.

window            memory that peers have mapped
shared_memory     the transport: a gather is a copy, a reduction a sum over the peers' buffers,
                  in windows that are reused once peers have read them
"""

from lightning_zero.comm.one_host.shared_memory import SharedMemory
