"""The data plane: transports of weights and gradients.

:class:`Transport` sends messages by gloo. Torch's gloo reduce-scatter sends the whole buffer and
its all-gather copies twice, while messages that land in place take a third of the time (64 MiB, two
ranks, torch 2.13, by `make wires`: 20 against 73 ms to reduce, where an all-reduce takes 37, and 19
against 57 ms to gather). Every message carries the unit's number as its tag, so two ranks that
disagree about the order of units never mix their data. :class:`Collectives` calls the collectives
of NCCL and every other backend.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_zero.comm.control import Control, Pending
from lightning_zero.comm.mesh import Axis
from lightning_zero.comm.process_groups import group_for
from lightning_zero.comm.traffic import Ledger
from lightning_zero.plan import Slot
from lightning_zero.tensors import (
    LARGE_BYTES,
    Scratch,
    Work,
    ask_for_large_pages,
    lasting_tensors,
    unseen,
)


class Shards(NamedTuple):
    """This rank's shard of a tensor and, where peers' memory is read, every rank's."""

    own: Tensor
    of_ranks: list[Tensor] | None = None

    def sharded(self, axis: Axis) -> Shards:
        """Return each rank's shard of its own buffer, where whole buffers were shared."""
        shards = None
        if self.of_ranks is not None:
            shards = [whole.view(axis.size, -1)[r] for r, whole in enumerate(self.of_ranks)]
        return Shards(self.own.view(axis.size, -1)[axis.rank], shards)


class Extent(NamedTuple):
    """The size of a master, in memory or in a file of ``scratch``."""

    numel: int
    dtype: torch.dtype
    scratch: Scratch | None = None


class ReduceBuffer:
    """A unit's unreduced gradients.

    Attributes:
        tensor: All ranks' parts, ``[size * n]``.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def views_of(self, slots: Sequence[Slot]) -> tuple[list[Tensor], bool]:
        """Return a view for each slot, and whether the buffer was last used for the same slots."""
        return [self.tensor.as_strided(s.shape, s.stride, s.offset) for s in slots], False


class Transport:
    """One way to gather weights and to reduce gradients: by messages between each pair of ranks.

    1. :meth:`share` once for all masters, a collective.
    2. :meth:`gather` for a unit's weights.
    3. :meth:`reduce_buffer` to write a unit's gradients to, then :meth:`reduce`, which takes the
       buffer back.
       Quantized weights and gradients travel by :meth:`gather` and :meth:`all_to_all`, in
       memory from :meth:`passing_buffer`.
    4. :meth:`exchange` in between, for whole parameters in an optimizer's step.
    5. :meth:`release_scratch` when a backward pass is over, :meth:`drop_outgrown` between steps,
       :meth:`release` at the end.

    Memory for a message is allocated before the watchdog knows that it begins: a rank that runs out
    of memory must fail before the others send theirs.

    Args:
        control: The control plane of all ranks.
        axis: The ranks that gather and reduce; a single one sends nothing.
        device: Where weights and gradients are.

    Attributes:
        ledger: What this rank has sent.
        passing: Storages of other buffers in a step, by the kind of memory they count as.
    """

    reads_peers: ClassVar[bool] = False
    """Whether ranks read each other's memory; of interest only within this folder."""
    has_tags: ClassVar[bool] = True
    """Whether more than the order tells one unit's messages from another's."""

    def __init__(self, control: Control, axis: Axis, device: torch.device) -> None:
        self.axis = axis
        self.rank, self.size = axis.rank, axis.size
        self.control, self.watchdog = control, control.watchdog
        self.device = device
        self.ledger = Ledger()
        self.passing = {kind: WeakSet[torch.UntypedStorage]() for kind in ("gathered", "unreduced")}
        # Buffers for what is received; those that are free again within a backward pass.
        self._scratch = WeakSet[torch.UntypedStorage]()
        self._free_inboxes: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        others = range(1, self.size)
        self.sources = [(self.rank - step) % self.size for step in others]
        self.targets = [(self.rank + step) % self.size for step in others]

    @property
    def gathers_in_order(self) -> bool:
        """Return whether only the order of gathers tells units' weights apart."""
        return self.size > 1 and not self.has_tags

    # -- memory ----------------------------------------------------------------------------------

    def share(self, extents: Iterable[Extent]) -> Generator[Shards, None, None]:
        """Yield memory for masters, with views of every rank's where peers can be read.

        Each is allocated on demand, so that what it replaces can be freed first.
        """
        for numel, dtype, scratch in extents:
            yield Shards((self._lasting if scratch is None else scratch.tensor)(numel, dtype))

    def reduce_buffer(self, numel: int, dtype: torch.dtype) -> ReduceBuffer:
        """Return memory for a unit's gradients before their reduction; its content is undefined."""
        return ReduceBuffer(self._lasting(numel, dtype))

    def passing_buffer(self, numel: int, dtype: torch.dtype, kind: str) -> Tensor:
        """Return memory that counts as ``kind`` until it is freed; its content is undefined."""
        buffer = self._lasting(numel, dtype)
        self.passing[kind].add(buffer.untyped_storage())
        return buffer

    @property
    def scratch_bytes(self) -> int:
        """Bytes of receive and reduce buffers, in use or kept for reuse."""
        return sum(storage.nbytes() for storage in self._scratch)

    def release_scratch(self) -> None:
        """Free the receive buffers that a backward pass reused."""
        self._free_inboxes.clear()

    def drop_outgrown(self) -> None:
        """Free reduce buffers that have become too small; all ranks must have read them."""
        return

    def release(self) -> None:
        """Drop all reduce buffers."""
        return

    def _lasting(self, numel: int, dtype: torch.dtype) -> Tensor:
        with lasting_tensors():
            memory = torch.empty(numel, dtype=dtype, device=self.device)
        if memory.nbytes >= LARGE_BYTES:
            ask_for_large_pages(memory)
        return memory

    # -- messages --------------------------------------------------------------------------------

    def gather(self, out: Tensor, source: Shards, *, unit: str, tag: int) -> Work:
        """Start to fill ``out`` (``[size * n]``) from every rank's shard (``[n]``).

        Dtypes may differ: masters are cast on the way.
        """
        self._note(unit, "gather", source.own.numel(), out.dtype)
        parts = out.chunk(self.size)
        own = parts[self.rank]
        copy(own, source.own)
        receives = {peer: parts[peer] for peer in self.sources}
        return self._send(weights_of(unit), receives, dict.fromkeys(self.targets, own), 4 * tag)

    def reduce(self, out: Tensor, source: ReduceBuffer, *, unit: str, tag: int) -> Work:
        """Start to write this rank's shard of the sum over all ranks to ``out`` (``[n]``).

        ``source`` (``[size * n]``) is given up; ``out`` may have another dtype.
        """
        self._note(unit, "reduce", out.numel(), source.tensor.dtype)
        parts = source.tensor.chunk(self.size)
        own = parts[self.rank]
        free = self._free_inboxes.setdefault((own.numel(), own.dtype), [])
        inbox = {peer: free.pop() if free else self._inbox(own) for peer in self.sources}

        def add_up() -> None:
            # In the order of the ranks, so that every stage and every rank gets the same bits.
            sum_into(out, [inbox.get(rank, own) for rank in range(self.size)])
            free.extend(inbox.values())

        sends = {peer: parts[peer] for peer in self.targets}
        return self._send(gradients_of(unit), inbox, sends, 4 * tag + 1, then=add_up)

    def all_to_all(self, received: Tensor, sent: Tensor, *, unit: str, tag: int) -> Work:
        """Start an all-to-all of a unit's quantized gradients, in equal parts, in rank order."""
        self._note(unit, "reduce", sent.numel() // self.size, sent.dtype)
        theirs, ours = received.chunk(self.size), sent.chunk(self.size)
        copy(theirs[self.rank], ours[self.rank])
        receives = {peer: theirs[peer] for peer in self.sources}
        sends = {peer: ours[peer] for peer in self.targets}
        return self._send(gradients_of(unit), receives, sends, 4 * tag + 3)

    def all_reduce(self, tensor: Tensor, *, unit: str, tag: int) -> Work:
        """Start to replace ``tensor`` (``[size * n]``) by its sum over all ranks.

        The second of its two steps begins when the first one has been waited for.
        """
        source = self.reduce_buffer(tensor.numel(), tensor.dtype)
        source.tensor.copy_(tensor)
        part = tensor.new_empty(tensor.numel() // self.size)
        reduced = self.reduce(part, source, unit=unit, tag=tag)
        gather = partial(self.gather, tensor, Shards(part), unit=unit, tag=tag)
        return Pending([reduced], then=lambda: gather().wait())

    def exchange(
        self, sent: Tensor, given: Sequence[int], taken: Sequence[int], among: Axis
    ) -> Tensor:
        """Send each rank its part of ``sent``, and return the parts received, in rank order.

        Args:
            sent: Bytes, the parts in rank order.
            given: Bytes sent to each rank.
            taken: Bytes received from each rank.
            among: The ranks.
        """
        if among.size == 1:
            return sent
        received = self._lasting(sum(taken), torch.uint8)
        self.ledger.note("optimizer", "exchange", sent.numel() - given[among.rank], 1)
        collective = self.watchdog.begin("the exchange of whole parameters", ranks=among.ranks)
        along = among.groups
        group = group_for("owners", along=along) if len(along) > 1 else None
        work = dist.all_to_all_single(received, sent, [*taken], [*given], group, async_op=True)
        self.watchdog.wait(collective, [] if work is None else [work])
        return received

    def _inbox(self, like: Tensor) -> Tensor:
        box = torch.empty_like(like)
        self._scratch.add(box.untyped_storage())
        return box

    def _send(
        self,
        name: str,
        receives: Mapping[int, Tensor],
        sends: Mapping[int, Tensor],
        tag: int,
        then: Callable[[], object] | None = None,
    ) -> Pending:
        """Start to receive from and to send to peers, by their ranks on the axis."""
        collective = self.watchdog.begin(name, ranks=self.axis.ranks)
        # Not `irecv` and `isend`, whose checks take longer than the messages of a small unit.
        group: Any = dist.group.WORLD
        ranks, tag = self.axis.ranks, self.control.first_tag + tag
        try:
            with unseen():
                works = [
                    *[group.recv([m], ranks[r], tag) for r, m in receives.items() if m.numel()],
                    *[group.send([m], ranks[r], tag) for r, m in sends.items() if m.numel()],
                ]
        except RuntimeError as error:
            self.watchdog.explain(error)
            raise
        return Pending(works, then=then, begun=(self.watchdog, collective))

    def _note(self, unit: str, verb: str, numel: int, dtype: torch.dtype) -> None:
        """Note that this rank sends ``numel`` elements to each other one."""
        self.ledger.note(unit, verb, numel * (self.size - 1), dtype.itemsize)


def weights_of(unit: str) -> str:
    """Return the name of the collective that gathers a unit's weights."""
    return f"the weights of {unit}"


def gradients_of(unit: str) -> str:
    """Return the name of the collective that reduces a unit's gradients."""
    return f"the gradients of {unit}"


def sum_into(out: Tensor, summands: list[Tensor]) -> None:
    """Write the sum to ``out``, added in list order; no tensor may require a gradient."""
    first, *rest = summands
    if not rest:
        copy(out, first)
    elif first.dtype == out.dtype:
        torch.add(first, rest.pop(0), out=out)
    else:
        out.copy_(first)
    for summand in rest:
        out.add_(summand)


def copy(out: Tensor, source: Tensor) -> None:
    """Copy ``source`` to ``out``, which may have another dtype, unless both are the same memory.

    Neither may require a gradient: turning gradients off costs more than copying a small unit.
    """
    if out.data_ptr() != source.data_ptr():
        out.copy_(source)


# torch 2.13 renamed the two and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Collectives(Transport):
    """A transport by the backend's collectives, with a process group for each verb.

    With one group for both, a prefetch would queue behind a reduction.

    Args:
        control: As for every transport.
        axis: As for every transport.
        device: As for every transport.

    Raises:
        ValueError: The backend has no all-gather or reduce-scatter for the device.
    """

    has_tags: ClassVar[bool] = False

    def __init__(self, control: Control, axis: Axis, device: torch.device) -> None:
        super().__init__(control, axis, device)
        self._gather_group = group_for("weights", along=axis.groups, is_urgent=True)
        self._reduce_group = group_for("gradients", along=axis.groups, is_urgent=True)
        self._try()

    def _try(self) -> None:
        """Send a few numbers each way, which also connects the ranks before the first step."""
        whole = torch.zeros(self.size, device=self.device)
        part = whole[self.rank : self.rank + 1].clone()
        try:
            _all_gather(whole, part, group=self._gather_group)
            _reduce_scatter(part, whole, group=self._reduce_group)
        except RuntimeError as error:
            raise ValueError(
                f"The process group's backend {dist.get_backend()!r} could not all-gather and"
                f" reduce-scatter tensors on a device of type {self.device.type!r}, which weights"
                " and gradients need. Pass the device's own backend, for instance"
                " ZeROStrategy(process_group_backend='nccl'), or train on one device."
            ) from error

    @override
    def gather(self, out: Tensor, source: Shards, *, unit: str, tag: int) -> Work:
        self._note(unit, "gather", source.own.numel(), out.dtype)
        own = out.view(self.size, -1)[self.rank]
        copy(own, source.own)
        collective = self.watchdog.begin_untagged(weights_of(unit), "gather", self.axis.ranks)
        with unseen():
            work = _all_gather(out, own, group=self._gather_group, async_op=True)
        return Pending([work], begun=(self.watchdog, collective))

    @override
    def reduce(self, out: Tensor, source: ReduceBuffer, *, unit: str, tag: int) -> Work:
        self._note(unit, "reduce", out.numel(), source.tensor.dtype)
        buffer = source.tensor
        lands = out.dtype == buffer.dtype
        landing = out if lands else buffer.new_empty(out.shape)
        collective = self.watchdog.begin(gradients_of(unit), "reduce", self.axis.ranks)
        real = buffer.dtype.to_real()  # NCCL has no complex numbers; their parts are summed
        with unseen():
            work = _reduce_scatter(
                landing.view(real), buffer.view(real), group=self._reduce_group, async_op=True
            )
        return Pending(
            [work],
            then=None if lands else lambda: copy(out, landing),
            begun=(self.watchdog, collective),
        )

    @override
    def all_reduce(self, tensor: Tensor, *, unit: str, tag: int) -> Work:
        for verb in ("reduce", "gather"):
            self._note(unit, verb, tensor.numel() // self.size, tensor.dtype)
        collective = self.watchdog.begin(gradients_of(unit), "reduce", self.axis.ranks)
        real = tensor.view(tensor.dtype.to_real())
        with unseen():
            work = dist.all_reduce(real, group=self._reduce_group, async_op=True)
        return Pending([] if work is None else [work], begun=(self.watchdog, collective))

    @override
    def all_to_all(self, received: Tensor, sent: Tensor, *, unit: str, tag: int) -> Work:
        self._note(unit, "reduce", sent.numel() // self.size, sent.dtype)
        collective = self.watchdog.begin(gradients_of(unit), "reduce", self.axis.ranks)
        with unseen():
            work = dist.all_to_all_single(received, sent, group=self._reduce_group, async_op=True)
        return Pending([] if work is None else [work], begun=(self.watchdog, collective))
