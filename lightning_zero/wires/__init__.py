"""The ways in which weights and gradients travel between the ranks; ``Comm`` chooses one.

* :class:`Windows`, when all ranks are on one host's CPUs: they read each other's memory.
* :class:`Messages`, for gloo between hosts: point to point, each lands in its place.
* :class:`Backend`, for NCCL and all others: the backend's own collectives.

A :class:`Wire` does two things, and all three give the same bits for two ranks:

    ===========  ==========  =====================================================
    from         to          collective
    ===========  ==========  =====================================================
    SHARDED      REPLICATED  ``gather``, in place: shards land where they lie
    PARTIAL      SHARDED     ``reduce``, a sum in the order of the ranks
    ===========  ==========  =====================================================
"""

from lightning_zero.wires.backend import Backend
from lightning_zero.wires.messages import Messages
from lightning_zero.wires.windows import Windows
from lightning_zero.wires.wire import ReduceBuffer, Shared, Wire, Work

__all__ = ["Backend", "Messages", "ReduceBuffer", "Shared", "Windows", "Wire", "Work"]
