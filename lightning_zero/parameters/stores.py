"""The stores of weights, gradients and masters at rest, and their ways to the device and back.

A store allocates all resting memory, makes weights whole and takes reduced gradients. On CPUs
masters in files are memory-mapped, and gathers read them like any other memory. A device does not
read its host's memory: there a :class:`HostStore` copies shards up before the ranks gather, and
reduced gradients down; its callers see no difference.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zero.comm import Codec, Communicator, Extent, Pending, Shards, weights_of
from lightning_zero.plan import FlatSpec, Layout, Medium, Plan
from lightning_zero.tensors import (
    LARGE_BYTES,
    Scratch,
    Work,
    ask_for_large_pages,
    internals,
    lasting_tensors,
)


class Buffer:
    """A flat 1-D tensor of a layout's ``numel`` elements, with one view per slot.

    Memory is released by resizing the storage to zero, never by replacing it: autograd saves
    *views* of weights (``F.linear`` saves ``weight.t()``), and those must see the data when the
    buffer is filled again.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        tensor: Tensor | None = None,
    ) -> None:
        with lasting_tensors():
            if tensor is None:
                tensor = torch.empty(layout.numel, dtype=dtype, device=device)
            self.tensor = tensor
            self._slots = layout.slots
            self.views = self._views()
        self._nbytes = self.tensor.nbytes
        self._is_large = self._nbytes >= LARGE_BYTES

    def _views(self) -> list[Tensor]:
        slots, tensor = self._slots, self.tensor
        return [tensor.as_strided(one.shape, one.stride, one.offset) for one in slots]

    @property
    def nbytes(self) -> int:
        """Bytes that the buffer holds now."""
        return min(self.tensor.untyped_storage().nbytes(), self._nbytes)

    def allocate(self) -> None:
        """Allocate the memory; its content is undefined."""
        storage = self.tensor.untyped_storage()
        if storage.nbytes() < self._nbytes:
            storage.resize_(self._nbytes)
            if self._is_large:
                ask_for_large_pages(self.tensor)

    def release(self) -> None:
        """Release the memory; views stay, unreadable until the buffer is filled again."""
        storage = self.tensor.untyped_storage()
        # Memory that is shared with a numpy array stays.
        if storage.resizable():
            storage.resize_(0)

    @property
    def is_shared(self) -> bool:
        """Return whether anything but the buffer and its views refers to the storage."""
        storage = self.tensor.untyped_storage()
        # Its own tensor and that variable do, too.
        return internals.num_references(storage) > len(self.views) + 2

    def leave(self) -> None:
        """Leave the memory to whoever refers to it, and have other memory from now on."""
        with lasting_tensors():
            self.tensor = torch.empty_like(self.tensor)
            self.views = self._views()
        self.release()


def _extent_of(layout: Layout, plan: Plan, scratch: Scratch | None) -> Extent:
    """Return the memory for masters, or for whole weights if masters can be views of these."""
    if plan.rests_apart:
        files = scratch if plan.master.medium is Medium.DISK else None
        return Extent(layout.shard_numel, plan.master.dtype, files)
    return Extent(layout.numel, plan.weight.dtype)


class Store:
    """The memory in which one group of parameters rests: the device's, or files.

    1. :meth:`weights` and :attr:`masters` at the beginning.
    2. :attr:`gather_weights` whenever weights become whole: ``gather_weights(out, unit=, tag=)``
       starts to fill ``out`` (``[num_shards * n]``) from every rank's shard, quantized if the
       plan says so; :attr:`gather_masters` for whole masters, without loss.
    3. :meth:`reduced` for the result of a reduction, then :meth:`accumulate` it.
    4. :meth:`retire` at the end.

    Args:
        layout: Where the parameters lie.
        plan: The homes of weights, gradients and masters.
        comm: The ranks.
        masters: Memory for masters, or for whole weights if masters can be views of these.

    Attributes:
        layout, plan, comm: As given.
        masters: This rank's shard of the masters, and those of peers that are read.
        gather: Makes shards whole, without loss.
        reduce: Sums gradients within a copy, and leaves this rank its shard.
        has_copies: Whether other ranks hold the same shard.
    """

    def __init__(self, layout: Layout, plan: Plan, comm: Communicator, masters: Shards) -> None:
        self.layout, self.plan, self.comm = layout, plan, comm
        # The shard of weights, where it is kept besides its masters.
        self._weights: Tensor | None = None
        # Whole weights and masters share one storage if they rest in the same form.
        self._whole: Tensor | None = None
        if not plan.rests_apart:
            self._whole, masters = masters.own, masters.sharded(comm.mesh.shard)
        self.gather = comm.transport.gather
        self._gather_weights = comm.coded(comm.transport, plan.gather_bits).gather
        self.reduce = comm.coded(comm.transport, plan.reduce_bits).reduce
        copies = comm.transports.get("replicate")
        self.has_copies = copies is not None
        self._copies = copies and comm.coded(copies, plan.reduce_bits)
        self._per_copy = 1 / comm.mesh.replicate.size
        self._rest(masters)

    @property
    def master(self) -> Tensor:
        """This rank's shard of the masters."""
        return self.masters.own

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a whole buffer: a view, so it needs memory to be read."""
        axis = self.comm.mesh.shard
        return whole.view(axis.size, -1)[axis.rank]

    @property
    def cast_bytes(self) -> int:
        """Bytes of weights that rest besides their masters, cast."""
        return 0 if self._weights is None else self._weights.nbytes

    def cast(self, unit: str) -> None:
        """Bring weights that rest apart from their masters up to date with these, after a step."""

    def _rest(self, masters: Shards) -> None:
        """Let the masters rest here, from where they are gathered from now on."""
        self.masters = masters
        self.gather_masters: Callable[..., Work]
        self.gather_weights: Callable[..., Work]
        is_in_files = self.plan.master.medium is Medium.DISK and self.plan.gather_bits is None
        if is_in_files and (self.comm.mesh.shard.size == 1 or masters.of_ranks is not None):
            self.gather_masters = self.gather_weights = self._gather_from_files
            return
        # Not methods, which would add a call to each gather.
        self.gather_masters = functools.partial(self.gather, source=masters)
        self.gather_weights = functools.partial(self._gather_weights, source=masters)

    def _gather_from_files(self, out: Tensor, *, unit: str, tag: int) -> Work:
        """Start to read every rank's shard from its mapped file, in threads."""
        shards, size = self.masters.of_ranks or [self.master], self.comm.mesh.shard.size
        sent, transport = self.master.numel() * (size - 1), self.comm.transport
        transport.ledger.note(unit, "gather", sent, out.element_size())
        if size > 1:
            transport.watchdog.events.append(weights_of(unit))
        pairs = zip(out.chunk(size), shards, strict=True)
        return self.comm.host_copies.up_from_files(_reading(unit), pairs, Pending)

    def as_weights(self, masters: Tensor) -> Tensor:
        """Return what whole weights show, before a cast, of ``masters``: one or more shards."""
        if self.plan.gather_bits is None:
            return masters
        codec = Codec(self.layout.shard_numel)
        num_shards = masters.numel() // max(1, self.layout.shard_numel)
        with lasting_tensors():
            codes = torch.empty(num_shards * codec.nbytes, dtype=torch.uint8, device=masters.device)
            shown = torch.empty_like(masters)
        codec.encode(masters, codes)
        codec.decode(codes, shown)
        return shown

    def weights(self) -> Buffer:
        """Return a buffer for whole weights, in the masters' storage where they can share it."""
        home = self.plan.weight
        return Buffer(self.layout, home.dtype, home.device, self._whole)

    def whole_masters(self, *, at_rest: bool = False) -> Buffer:
        """Return a new buffer for whole masters, on the device where weights are whole.

        With ``at_rest`` it is the memory where they rest, if this rank holds all of them.
        """
        resting = None
        if at_rest:
            resting = self.master if self.comm.control.world_size == 1 else self._whole
        return Buffer(self.layout, self.plan.master.dtype, self.plan.weight.device, resting)

    def assemble(self, parts: Sequence[tuple[slice, Tensor]]) -> Buffer:
        """Return a new buffer, assembled from ranges of each rank's shard and their content.

        Its dtype can hold the values of all of them.
        """
        dtype = functools.reduce(torch.promote_types, [part.dtype for _, part in parts])
        device = self.plan.weight.device
        with lasting_tensors():
            whole = Buffer(self.layout, dtype, device)
            shard = torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)
            for in_shard, part in parts:
                shard[in_shard] = part
            self.gather(whole.tensor, Shards(shard), unit="full", tag=0).wait()
        return whole

    def reduced(self, partial: Tensor | None = None) -> Tensor:
        """Return memory for this rank's shard of a reduction's result; its content is undefined.

        It is that of the ``partial`` sum where one rank's gradients are the whole sum already.
        """
        plan = self.plan
        is_whole = self.comm.mesh.shard.size == 1 and plan.reduce_bits is None
        if partial is not None and is_whole and partial.dtype == plan.master.dtype:
            return partial
        return self._shard(self.plan.weight.device)

    def gradients(self) -> Tensor:
        """Return memory for this rank's shard of resting gradients; its content is undefined."""
        return self._shard(self.plan.master.device)

    def _shard(self, device: torch.device) -> Tensor:
        with lasting_tensors():
            dtype = self.plan.master.dtype
            shard = torch.empty(self.layout.shard_numel, dtype=dtype, device=device)
        if shard.nbytes >= LARGE_BYTES:
            ask_for_large_pages(shard)
        return shard

    def accumulate(
        self, reduced: Tensor, resting: Tensor | None, *, unit: str, tag: int
    ) -> tuple[Tensor, Work]:
        """Start to move a unit's reduced shard to where gradients rest, added to ``resting``.

        What is reduced is summed over the copies; what rests is the same in all of them. Returns
        the resting shard, and the work to wait for before it is read.
        """
        total = reduced
        if resting is not None:
            total = torch.add(reduced, resting, alpha=self._per_copy, out=resting)
        return total, self._sum_over_copies(total, unit, tag)

    def _sum_over_copies(self, total: Tensor, unit: str, tag: int) -> Work:
        """Start to sum a shard on the device over the copies, in place."""
        if self._copies is None:
            return Pending()
        work = self._copies.all_reduce(total, unit=unit, tag=tag)
        if self.comm.host_copies.has_streams and self.plan.reduce_bits is not None:
            work.wait()  # it decodes to memory of this stream
        return work

    def retire(self) -> None:
        """Keep nothing but this rank's masters, in memory of their own."""
        own, is_read = self.master, self.masters.of_ranks is not None
        is_away = self.plan.master.medium is not Medium.DEVICE
        is_part = is_read or own.untyped_storage().nbytes() > own.nbytes
        self._whole = None
        self._rest(Shards(own.clone() if is_part and not is_away else own))


class HostStore(Store):
    """A device's store for what rests in its host's memory, or in files that the host maps.

    Every rank copies its own shard up to its place in the whole, and the devices gather. Pinned
    memory is sent as it is, and cast on the device. Files are read, and cast, by threads
    (``tensors/transfers``). The plan may keep the shard of weights besides its masters, brought up
    to date once after each change, by :meth:`cast` after a step, otherwise before the next gather:
    cast in pinned memory, which halves what is sent, or on the device, where it is gathered from.
    """

    @override
    def _rest(self, masters: Shards) -> None:
        self.masters, self._weights = masters, None
        # The number of the change that they show, and the upload that may be under way.
        self._as_of = -1
        self._up: Work = Pending()
        self.gather_masters = functools.partial(self._gather_from, masters.own)
        self.gather_weights = self.gather_masters
        self._is_on_device = self.plan.reshards and self.plan.weight.medium is Medium.DEVICE
        if self._is_on_device:
            self.gather_weights = self._gather_from_device
        elif self.plan.keeps_cast_weights:
            self.gather_weights = self._gather_cast

    def _gather_from(self, source: Tensor, out: Tensor, *, unit: str, tag: int) -> Work:
        """Start to bring this rank's shard up to its place in ``out``, and to gather it there."""
        own = self.own(out)
        gather = functools.partial(self.gather, out, Shards(own), unit=unit, tag=tag)
        return self._bring(source, own, gather, unit)

    def _gather_cast(self, out: Tensor, *, unit: str, tag: int) -> Work:
        if self._as_of != self.comm.num_changes:
            self.cast(unit)
        return self._gather_from(self._kept_weights(), out, unit=unit, tag=tag)

    def _gather_from_device(self, out: Tensor, *, unit: str, tag: int) -> Work:
        source = Shards(self._kept_weights())
        gather = functools.partial(self.gather, out, source, unit=unit, tag=tag)
        if self._as_of != self.comm.num_changes:
            return self._bring_up(gather, unit)
        up, self._up = self._up, Pending()
        up.wait()
        return gather()

    def _bring_up(self, then: Callable[[], Work], unit: str) -> Work:
        """Start to bring the masters up to the weights on the device, then ``then``."""
        as_of = self.comm.num_changes

        def sent() -> Work:
            self._as_of = as_of
            return then()

        return self._bring(self.master, self._kept_weights(), sent, unit)

    def _bring(self, source: Tensor, out: Tensor, then: Callable[[], Work], unit: str) -> Work:
        """Start to bring a shard up: from memory as it is, from files cast by threads."""
        copies, note = self.comm.host_copies, self.comm.transport.ledger.note
        if self.plan.master.medium is Medium.HOST:
            note(unit, "up", source.numel(), source.element_size())
            return copies.up(out, source, then)
        note(unit, "up", out.numel(), out.element_size())
        return copies.up_from_files(_reading(unit), [(out, source)], then)

    def _kept_weights(self) -> Tensor:
        if self._weights is None:
            numel, home = self.layout.shard_numel, self.plan.weight
            with lasting_tensors():
                if self._is_on_device:
                    self._weights = torch.empty(numel, dtype=home.dtype, device=home.device)
                else:
                    self._weights = self.comm.host_copies.lasting_memory(numel, home.dtype)
        return self._weights

    @override
    def cast(self, unit: str) -> None:
        self._as_of = -1
        if self._is_on_device and self.plan.master.medium is Medium.HOST:
            self._up = self._bring_up(Pending, unit)  # while the host steps other units
        elif self.plan.keeps_cast_weights:
            # On all cores, while the device has nothing to do: the next gather only sends.
            self._kept_weights().copy_(self.master)
            self._as_of = self.comm.num_changes

    @override
    def gradients(self) -> Tensor:
        dtype = self.plan.master.dtype
        return self.comm.host_copies.recurring_memory(self.layout.shard_numel, dtype)

    @override
    def accumulate(
        self, reduced: Tensor, resting: Tensor | None, *, unit: str, tag: int
    ) -> tuple[Tensor, Work]:
        """Start to copy a unit's reduced shard down; what rests comes up to be added.

        Additions on the host would block it, and only devices sum over the copies.
        """
        below = self.gradients() if resting is None else resting
        note = functools.partial(self.comm.transport.ledger.note, unit)

        def finish() -> None:
            if resting is not None:
                note("up", resting.numel(), resting.element_size())
                above = self.comm.transport.passing_buffer(len(resting), resting.dtype, "unreduced")
                reduced.add_(above.copy_(resting, non_blocking=True), alpha=self._per_copy)
            self._sum_over_copies(reduced, unit, tag).wait()

        note("down", reduced.numel(), reduced.element_size())
        end = self.comm.host_copies.down(below, reduced, finish, group=unit)
        return below, Pending(then=end.synchronize)


def _reading(unit: str) -> str:
    return f"Reading the weights of {unit}"


def stores_for(
    groups: Iterable[FlatSpec], comm: Communicator, scratch: Scratch | None = None
) -> Generator[Store, None, None]:
    """Yield a store for each group of parameters, which is allocated when its turn comes."""
    sizes = comm.mesh.shard.size, comm.mesh.replicate.size
    layouts = [(group.layout(*sizes), group.plan) for group in groups]
    shared = comm.transport.share(
        _extent_of(layout, plan, scratch) for layout, plan in layouts if not plan.rests_on_host
    )
    with contextlib.closing(shared):
        for layout, plan in layouts:
            if not plan.rests_on_host:
                yield Store(layout, plan, comm, next(shared))
                continue
            # Not shared with peers, which get it from this rank's device.
            numel, dtype, files = _extent_of(layout, plan, scratch)
            allocate = comm.host_copies.lasting_memory if files is None else files.tensor
            yield HostStore(layout, plan, comm, Shards(allocate(numel, dtype)))
