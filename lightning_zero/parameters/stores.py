"""Where weights and gradients rest, and how they come to the device and leave it.

A store allocates all resting memory, and is asked where weights become whole and where gradients
end. Masters in files are mapped memory, from which gathers read as from any other. A store for a
medium that the device cannot read overrides what it allocates, brings its bytes up before the ranks
gather, and takes reduced gradients down; nothing above it changes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lightning_zero.comm import Arrived, Communicator, Placements, Scratch, Shared, Work
from lightning_zero.parameters.buffer import Buffer
from lightning_zero.plan import Layout, Medium, Placement, Plan
from lightning_zero.tensors import lasting_tensors


class Store:
    """The memory in which one group of parameters rests: the device's, or files.

    1. :meth:`weights` and :attr:`shared` at the beginning.
    2. :attr:`fetch` whenever weights become whole: ``fetch(out, unit=, tag=)`` starts to fill
       ``out`` (``[num_shards * n]``) from every rank's shard.
    3. :meth:`gradients` for the result of a reduction, then :meth:`flush` with it, and
       :attr:`join` with what rests, where it is not to stay the sum of one copy.
    4. :meth:`retire` at the end.

    Attributes:
        layout: Where the parameters lie.
        plan: Their homes.
        comm: The ranks.
        shared: The masters.
        has_copies: Whether other ranks hold the same shard.
        gather: The verb that makes shards whole.
        reduce: The verb that leaves this rank the sum of its shard, within its copy.
        join: The verb that sums the shard over the copies, in place.
    """

    def __init__(
        self, layout: Layout, plan: Plan, comm: Communicator, scratch: Scratch | None = None
    ) -> None:
        self.layout, self.plan, self.comm = layout, plan, comm
        self.has_copies = comm.mesh.replicate.size > 1
        self._shard_numel = layout.shard_numel
        # Whole weights and masters share one storage if they rest in the same form.
        self._whole: Tensor | None = None
        if plan.gives_weights_back or plan.has_master:
            files = scratch if plan.master.medium is Medium.DISK else None
            shared = comm.transport.share(layout.shard_numel, plan.master.dtype, files)
        else:
            whole = comm.transport.share(layout.numel, plan.weight.dtype)
            self._whole, shared = whole.own, whole.sharded(comm.mesh.shard)
        self.gather = comm.redistribution(plan.master.placement, Placement.REPLICATED)
        of_copy = Placements(plan.master.placement, Placement.PARTIAL)
        self.reduce = comm.redistribution(Placement.PARTIAL, of_copy)
        self.join = comm.redistribution(of_copy, plan.master.placement)
        self._rest(shared)

    def _rest(self, shared: Shared) -> None:
        self.shared = shared
        # Not a method, which would be one more call for each gather.
        self.fetch = functools.partial(self.gather, source=shared)

    def weights(self) -> Buffer:
        """Return a buffer of whole weights, in the masters' storage where they may share it."""
        home = self.plan.weight
        return Buffer(self.layout, home.dtype, home.device, self._whole)

    def gradients(self) -> Tensor:
        """Return memory for this rank's shard of reduced gradients; its content is undefined."""
        home = self.plan.master
        with lasting_tensors():
            return torch.empty(self._shard_numel, dtype=home.dtype, device=home.device)

    def flush(self, source: Tensor, resting: Tensor | None) -> tuple[Tensor, Work]:
        """Start to bring a reduced shard to where gradients rest, added to those that do.

        Returns the tensor that rests, which may be read when the work has been waited for.
        """
        return (source if resting is None else resting.add_(source)), Arrived()

    def retire(self, master: Tensor) -> None:
        """Let ``master`` be all that rests."""
        self._whole = None
        self._rest(Shared(master))
