"""The data plane: the interface of transports of weights and gradients, and what they carry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.collective_log import CollectiveId, CollectiveLog
from lightning_zero.comm.control import Control
from lightning_zero.comm.mesh import Axis
from lightning_zero.comm.process_groups import group_for
from lightning_zero.comm.traffic import Ledger
from lightning_zero.plan import Slot
from lightning_zero.tensors import (
    LARGE_BYTES,
    Scratch,
    Storages,
    Work,
    ask_for_large_pages,
    lasting_tensors,
)


class Pending:
    """Transfers in flight, and a function to call when they have arrived.

    Args:
        *works: The transfers; none if they have arrived.
        then: The function.
        kept: Tensors that live until then.
        begun: The log and its entry, if the transfers are a collective of this package.
    """

    def __init__(
        self,
        *works: Work,
        then: Callable[[], object] | None = None,
        kept: Sequence[Tensor] = (),
        begun: tuple[CollectiveLog, CollectiveId] | None = None,
    ) -> None:
        self._works, self._then, self._kept, self._begun = works, then, kept, begun

    def wait(self) -> None:
        """Wait until all have arrived, then call the function; do nothing the second time."""
        works, self._works = self._works, ()
        if self._begun is not None:
            self._begun[0].wait(self._begun[1], works)
        else:
            for work in works:
                work.wait()
        then, self._then, self._kept = self._then, None, ()
        if then is not None:
            then()


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


class Verbs(ABC):
    """The verbs that plain and quantized transports share."""

    size: int

    @abstractmethod
    def gather(self, out: Tensor, source: Shards, *, unit: str, tag: int) -> Work:
        """Start to fill ``out`` (``[size * n]``) from every rank's shard (``[n]``)."""

    @abstractmethod
    def reduce_buffer(self, numel: int, dtype: torch.dtype) -> ReduceBuffer:
        """Return memory for a unit's gradients before their reduction; its content is undefined."""

    @abstractmethod
    def reduce(self, out: Tensor, source: ReduceBuffer, *, unit: str, tag: int) -> Work:
        """Start to write this rank's shard of the sum over all ranks to ``out`` (``[n]``)."""

    def all_reduce(self, tensor: Tensor, *, unit: str, tag: int) -> Work:
        """Start to replace ``tensor`` (``[size * n]``) by its sum over all ranks.

        The second of its two steps begins when the first one has been waited for.
        """
        source = self.reduce_buffer(tensor.numel(), tensor.dtype)
        source.tensor.copy_(tensor)
        part = tensor.new_empty(tensor.numel() // self.size)
        reduced = self.reduce(part, source, unit=unit, tag=tag)
        gather = partial(self.gather, tensor, Shards(part), unit=unit, tag=tag)
        return Pending(reduced, then=lambda: gather().wait())


class Transport(Verbs):
    """One way to gather weights and to reduce gradients.

    1. :meth:`share` once for all masters, a collective.
    2. :meth:`gather` for a unit's weights.
    3. :meth:`reduce_buffer` to write a unit's gradients to, then :meth:`reduce`, which takes the
       buffer back.
       Quantized weights and gradients travel by :meth:`gather_codes` and :meth:`all_to_all`, in
       memory from :meth:`passing_buffer`.
    4. :meth:`exchange` in between, for whole parameters in an optimizer's step.
    5. :meth:`release_scratch` when a backward pass is over, :meth:`drop_outgrown` between steps,
       :meth:`release` at the end.

    Memory for a message is allocated before the log notes that it begins: a rank that runs out of
    memory must fail before the others send theirs.

    Args:
        control: The control plane of all ranks.
        axis: The ranks that gather and reduce.
        device: Where weights and gradients are.

    Attributes:
        ledger: What this rank has sent.
        passing: Other buffers held within a step, by the kind of memory they count as.
    """

    reads_peers: ClassVar[bool] = False
    """Whether ranks read each other's memory; of interest only within this folder."""
    has_tags: ClassVar[bool] = True
    """Whether more than the order tells one unit's messages from another's."""

    def __init__(self, control: Control, axis: Axis, device: torch.device) -> None:
        self.axis = axis
        self.rank, self.size = axis.rank, axis.size
        self.control = control
        self.ledger = Ledger()
        self.passing = {"gathered": Storages(), "unreduced": Storages()}
        self.log = control.log
        self.device = device

    @property
    def gathers_together(self) -> bool:
        """Return whether a gather needs every rank to take part."""
        return self.size > 1

    @property
    def gathers_in_order(self) -> bool:
        """Return whether only the order of gathers tells units' weights apart."""
        return self.size > 1 and not self.has_tags

    def gather(self, out: Tensor, source: Shards, *, unit: str, tag: int) -> Work:
        """Start to fill ``out`` (``[size * n]``) from every rank's shard (``[n]``).

        Dtypes may differ: masters are cast on the way.
        """
        sent = source.own.numel() * (self.size - 1)
        self.ledger.note(unit, "gather", sent, out.element_size())
        return self._gather(out, source, unit, tag)

    def reduce(self, out: Tensor, source: ReduceBuffer, *, unit: str, tag: int) -> Work:
        """Start to write this rank's shard of the sum over all ranks to ``out`` (``[n]``).

        ``source`` (``[size * n]``) is given up; ``out`` may have another dtype.
        """
        sent = out.numel() * (self.size - 1)
        self.ledger.note(unit, "reduce", sent, source.tensor.element_size())
        return self._reduce(source, out, unit, tag)

    def all_to_all(
        self, received: Tensor, sent: Tensor, out: Tensor, *, unit: str, tag: int
    ) -> Work:
        """Start an all-to-all of a unit's quantized gradients, in equal parts.

        The parts ``received``, in rank order, will be summed in ``out``.
        """
        nbytes = sent.numel() // self.size * (self.size - 1)
        self.ledger.note(unit, "reduce", nbytes, 1)
        return self._all_to_all(received, sent, out, unit, tag)

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
        collective = self.log.begin("the exchange of whole parameters")
        along = among.groups
        group = group_for("owners", along=along) if len(along) > 1 else None
        work = dist.all_to_all_single(received, sent, [*taken], [*given], group, async_op=True)
        self.log.wait(collective, [] if work is None else [work])
        return received

    @abstractmethod
    def _gather(self, whole: Tensor, shard: Shards, unit: str, tag: int) -> Work:
        """Implement :meth:`gather`."""

    @abstractmethod
    def _reduce(self, partial: ReduceBuffer, out: Tensor, unit: str, tag: int) -> Work:
        """Implement :meth:`reduce`."""

    @abstractmethod
    def _all_to_all(self, received: Tensor, sent: Tensor, out: Tensor, unit: str, tag: int) -> Work:
        """Implement :meth:`all_to_all`."""

    def share(self, extents: Iterable[Extent]) -> Generator[Shards, None, None]:
        """Yield memory for masters, with views of every rank's where peers can be read.

        Each is allocated when it is asked for, so that what it replaces can be freed first.
        """
        for numel, dtype, scratch in extents:
            yield Shards((self._lasting if scratch is None else scratch.tensor)(numel, dtype))

    def reduce_buffer(self, numel: int, dtype: torch.dtype) -> ReduceBuffer:
        """Return memory for a unit's gradients before their reduction; its content is undefined."""
        return ReduceBuffer(self._lasting(numel, dtype))

    def passing_buffer(self, numel: int, dtype: torch.dtype, kind: str) -> Tensor:
        """Return memory that counts as ``kind`` until it is freed; its content is undefined."""
        buffer = self._lasting(numel, dtype)
        self.passing[kind].add(buffer)
        return buffer

    @property
    def scratch_bytes(self) -> int:
        """Bytes of receive and reduce buffers, in use or kept for reuse."""
        return 0

    def release_scratch(self) -> None:
        """Free the receive buffers that a backward pass reused."""
        return

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
