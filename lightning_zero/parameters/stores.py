"""Where weights and gradients rest, and how they come to the device and leave it.

A store allocates all resting memory, and is asked where weights become whole and where gradients
end. On CPUs masters in files are mapped memory, from which gathers read as from any other. A device
reads no memory of its host's: there a :class:`HostStore` brings shards up before the ranks gather,
and takes reduced gradients down; nothing above it changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from lightning_zero.comm import (
    Arrived,
    Cargo,
    Codec,
    Communicator,
    Placements,
    Scratch,
    Shared,
    Work,
)
from lightning_zero.parameters.buffer import Buffer
from lightning_zero.plan import Layout, Medium, Placement, Plan
from lightning_zero.tensors import lasting_tensors


class Store:
    """The memory in which one group of parameters rests: the device's, or files.

    1. :meth:`weights` and :attr:`shared` at the beginning.
    2. :attr:`fetch_weights` whenever weights become whole: ``fetch_weights(out, unit=, tag=)``
       starts to fill ``out`` (``[num_shards * n]``) from every rank's shard, in few bits if the
       plan says so; :attr:`fetch` for whole masters, which lose nothing.
    3. :meth:`reduced` for the result of a reduction, then :meth:`flush` with it, and
       :attr:`join` with what rests, where it is not to stay the sum of one copy.
    4. Where :attr:`keeps_weights`, :meth:`keep` when whole weights are released until a backward
       pass, :meth:`forget` when the step ends.
    5. :meth:`retire` at the end.

    Attributes:
        layout: Where the parameters lie.
        plan: Their homes.
        comm: The ranks.
        shared: The masters.
        gather: The verb that makes shards whole.
        reduce: The verb that leaves this rank the sum of its shard, within its copy.
        join: The verb that sums the shard over the copies, in place.
        is_stream: Whether there are no masters: weights are read from elsewhere.
    """

    is_stream = False
    keeps_weights: ClassVar[bool] = False
    """Whether a part of whole weights is kept between forward and backward."""

    def __init__(
        self, layout: Layout, plan: Plan, comm: Communicator, scratch: Scratch | None = None
    ) -> None:
        self.layout, self.plan, self.comm = layout, plan, comm
        # Whole weights and masters share one storage if they rest in the same form.
        self._whole: Tensor | None = None
        self._files = scratch if plan.master.medium is Medium.DISK else None
        if plan.gives_weights_back or plan.has_master:
            shared = self._masters()
        else:
            whole = comm.transport.share(layout.numel, plan.weight.dtype)
            self._whole, shared = whole.own, whole.sharded(comm.mesh.shard)
        self.gather = comm.redistribution(plan.master.placement, Placement.REPLICATED)
        of_copy = Placements(plan.master.placement, Placement.PARTIAL)
        redistribution = functools.partial(
            comm.redistribution, bits=plan.reduce_bits, cargo=Cargo.GRADIENTS
        )
        self.reduce = redistribution(Placement.PARTIAL, of_copy, keeps_errors=plan.error_feedback)
        self.join = redistribution(of_copy, plan.master.placement)
        self._gather_weights = comm.redistribution(
            plan.master.placement, Placement.REPLICATED, bits=plan.gather_bits
        )
        self._rest(shared)

    @property
    def has_copies(self) -> bool:
        """Return whether other ranks hold the same shard."""
        return self.comm.mesh.replicate.size > 1

    def settle(self) -> bool:
        """Let masters rest here, to be changed; whether they were elsewhere; a collective."""
        return False

    def _masters(self) -> Shared:
        dtype = self.plan.master.dtype
        return self.comm.transport.share(self.layout.shard_numel, dtype, self._files)

    def _rest(self, shared: Shared) -> None:
        self.shared = shared
        # Not methods, which would be one more call for each gather.
        self.fetch: Callable[..., Work] = functools.partial(self.gather, source=shared)
        self.fetch_weights: Callable[..., Work] = functools.partial(
            self._gather_weights, source=shared
        )

    def as_weights(self, masters: Tensor) -> Tensor:
        """Return what whole weights show of shards of masters, to be cast; one after the other."""
        bits = self.plan.gather_bits
        if bits is None:
            return masters
        codec = Codec(bits, self.layout.shard_numel)
        num_shards = masters.numel() // max(1, self.layout.shard_numel)
        with lasting_tensors():
            codes = torch.empty(num_shards * codec.nbytes, dtype=torch.uint8, device=masters.device)
            shown = torch.empty_like(masters)
        codec.encode(masters, codes)
        codec.decode(codes, shown)
        return shown

    def weights(self) -> Buffer:
        """Return a buffer of whole weights, in the masters' storage where they may share it."""
        home = self.plan.weight
        return Buffer(self.layout, home.dtype, home.device, self._whole)

    def whole_masters(self) -> Buffer:
        """Return a new buffer of whole masters, where weights are whole."""
        return Buffer(self.layout, self.plan.master.dtype, self.plan.weight.device)

    def reduced(self) -> Tensor:
        """Return memory for this rank's shard of a reduction's result; its content is undefined."""
        return self._shard(self.plan.weight.device)

    def gradients(self) -> Tensor:
        """Return memory for this rank's shard of resting gradients; its content is undefined."""
        return self._shard(self.plan.master.device)

    def _shard(self, device: torch.device) -> Tensor:
        with lasting_tensors():
            return torch.empty(self.layout.shard_numel, dtype=self.plan.master.dtype, device=device)

    def flush(self, source: Tensor, resting: Tensor | None, *, unit: str) -> tuple[Tensor, Work]:
        """Start to bring a unit's reduced shard to where gradients rest, added to those that do.

        Returns the tensor that rests, which may be read when the work has been waited for.
        """
        return (source if resting is None else resting.add_(source)), Arrived()

    def keep(self, whole: Tensor) -> None:
        """Keep a part of ``whole`` weights for the gathers of this step, if the store does that."""

    def forget(self) -> None:
        """Keep no part of whole weights any more."""

    def retire(self, master: Tensor) -> None:
        """Let ``master`` be all that rests."""
        self._whole = None
        self._rest(Shared(master))


class HostStore(Store):
    """The store of a device for what rests in its host's memory, or in files that the host maps.

    Every rank brings its own shard up, into its place in the whole, and the devices gather.
    """

    def __init__(
        self, layout: Layout, plan: Plan, comm: Communicator, scratch: Scratch | None = None
    ) -> None:
        super().__init__(layout, plan, comm, scratch)
        self._join_devices, self.join = self.join, self._join

    def _masters(self) -> Shared:
        # Peers read nothing of it: they get it from this rank's device.
        files, copies = self._files, self.comm.host_copies
        allocate = copies.lasting_memory if files is None else files.tensor
        return Shared(allocate(self.layout.shard_numel, self.plan.master.dtype))

    def _rest(self, shared: Shared) -> None:
        self.shared = shared
        self.fetch = self.fetch_weights = self._fetch

    def _fetch(self, out: Tensor, *, unit: str, tag: int) -> Work:
        axis = self.comm.mesh.shard
        own = out.view(axis.size, -1)[axis.rank]
        self.comm.transport.ledger.note(unit, "up", own.numel(), self.shared.own.element_size())
        gather = functools.partial(self.gather, out, Shared(own), unit=unit, tag=tag)
        return self.comm.host_copies.up(own, self.shared.own, gather)

    def _join(self, out: Tensor, source: Shared, *, unit: str, tag: int) -> Work:
        """Sum the shard over the copies, which only devices can, and bring it down again."""
        on_device = self.reduced()
        on_device.copy_(source.own)
        self._join_devices(on_device, Shared(on_device), unit=unit, tag=tag).wait()
        out.copy_(on_device)
        return Arrived()

    def gradients(self) -> Tensor:
        """Return memory for this rank's shard of resting gradients; its content is undefined."""
        dtype = self.plan.master.dtype
        return self.comm.host_copies.passing_memory(self.layout.shard_numel, dtype)

    def flush(self, source: Tensor, resting: Tensor | None, *, unit: str) -> tuple[Tensor, Work]:
        """Start to bring a unit's reduced shard down, added to what rests, as every store does."""
        self.comm.transport.ledger.note(unit, "down", source.numel(), source.element_size())
        landing = self.gradients()
        if resting is None:
            return landing, self.comm.host_copies.down(landing, source)
        add = functools.partial(resting.add_, landing)
        return resting, self.comm.host_copies.down(landing, source, add)
