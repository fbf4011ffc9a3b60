"""The wires: two collectives that carry weights and gradients, and a few small ones around them.

``redistribute`` is the one verb that moves a flat buffer from a placement to another; the pair
picks the collective:

    ===========  ==========  ===============================================
    from         to          collective
    ===========  ==========  ===============================================
    SHARDED      REPLICATED  all-gather, in place: shards land where they lie
    PARTIAL      SHARDED     reduce-scatter, summed in the order of the ranks
    ===========  ==========  ===============================================

Only this room knows one backend from another. On gloo both collectives are sent point to point:
torch's gloo reduce-scatter sends the whole buffer and its all-gather copies twice, while messages
that land in place take a quarter to a half of the time (64 MiB, two ranks, torch 2.13: 15 ms
against 65 ms and 21 ms against 47 ms of an all-reduce). Every message carries the unit's number as
its tag, so two ranks that disagree about the order of units never mix their data.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.plan import Placement

# torch 2.13 renamed the two and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

MESSAGE_BYTES = 16 * 2**20
"""The most that ``collect`` holds at a time."""


class Work(Protocol):
    """Something on its way; ``wait`` may be called once or never."""

    def wait(self) -> Any:
        """Return when its result may be used on the current stream."""


class _Pending:
    """Works on their way, and what to do when they have arrived."""

    def __init__(self, works: Sequence[Work], finish: Callable[[], None] | None = None) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()


class Comm:
    """This process among the ranks that share one model.

    Attributes:
        rank: This process's number in the group.
        world_size: Number of ranks.
        sent: Elements that this rank has sent, by unit and verb; the ledger.
    """

    def __init__(self, device: torch.device, *, direct: bool | None = None) -> None:
        self.device = device
        self.sent: Counter[tuple[str, str]] = Counter()
        self.sent_bytes: Counter[tuple[str, str]] = Counter()
        self.rank, self.world_size = 0, 1
        self._control: Any = None
        self._gather_group: Any = None
        self._reduce_group: Any = None
        self._direct = True
        self._scratch: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            on_gloo = dist.get_backend() == "gloo"
            self._direct = on_gloo if direct is None else direct
            if not on_gloo:
                # Small decisions travel between the hosts, so that they never stall the device.
                self._control = dist.new_group(backend="gloo")
            if not self._direct:
                # One communicator each, or a prefetch would queue behind a reduction.
                self._gather_group, self._reduce_group = dist.new_group(), dist.new_group()

    @property
    def is_ordered(self) -> bool:
        """Whether ranks must issue their collectives in the same order."""
        return not self._direct

    def redistribute(
        self,
        source: Placement,
        target: Placement,
        buffer: Tensor,
        out: Tensor,
        *,
        unit: str,
        tag: int,
    ) -> Work:
        """Start to move ``buffer`` of shape ``[world_size * n]`` between two placements.

        ``SHARDED`` to ``REPLICATED`` fills ``buffer`` in place from every rank's own part of it
        (``out`` is that part, ``[n]``); ``PARTIAL`` to ``SHARDED`` writes the sum of this rank's
        part to ``out``, which may have another dtype, and leaves ``buffer`` undefined.
        """
        if (source, target) == (Placement.SHARDED, Placement.REPLICATED):
            verb, move = "gather", self._gather
        elif (source, target) == (Placement.PARTIAL, Placement.SHARDED):
            verb, move = "reduce", self._reduce
        else:
            raise ValueError(
                f"Expected a redistribution that sends data, got {source} to {target}."
            )
        if buffer.numel() == 0:
            return _Pending([])
        numel = buffer.numel() // self.world_size * (self.world_size - 1)
        self.sent[unit, verb] += numel
        self.sent_bytes[unit, verb] += numel * buffer.element_size()
        return move(buffer, out, tag)

    def _gather(self, buffer: Tensor, out: Tensor, tag: int) -> Work:
        if not self._direct:
            return _all_gather(buffer, out, group=self._gather_group, async_op=True)  # type: ignore[no-any-return]
        parts = buffer.view(self.world_size, -1)
        receives = [dist.irecv(parts[peer], peer, tag=2 * tag) for peer in self._sources()]
        sends = [dist.isend(out, peer, tag=2 * tag) for peer in self._targets()]
        return _Pending(_started(receives, sends))

    def _reduce(self, buffer: Tensor, out: Tensor, tag: int) -> Work:
        if not self._direct:
            return self._reduce_by_backend(buffer, out)
        parts = list(buffer.view(self.world_size, -1))
        own = parts[self.rank]
        inbox = {peer: self._borrow(own) for peer in self._sources()}
        receives = [dist.irecv(box, peer, tag=2 * tag + 1) for peer, box in inbox.items()]
        sends = [dist.isend(parts[peer], peer, tag=2 * tag + 1) for peer in self._targets()]

        def add_up() -> None:
            # In the order of the ranks, so that every stage and every rank gets the same bits.
            summands = [inbox.get(rank, own) for rank in range(self.world_size)]
            _sum_into(out, summands)
            for box in inbox.values():
                self._give_back(box)

        return _Pending(_started(receives, sends), add_up)

    def _reduce_by_backend(self, buffer: Tensor, out: Tensor) -> Work:
        if out.dtype == buffer.dtype:
            return _reduce_scatter(out, buffer, group=self._reduce_group, async_op=True)  # type: ignore[no-any-return]
        landing = buffer.new_empty(out.shape)
        work = _reduce_scatter(landing, buffer, group=self._reduce_group, async_op=True)
        return _Pending([work], lambda: _copy(out, landing))

    def _sources(self) -> list[int]:
        return [(self.rank - step) % self.world_size for step in range(1, self.world_size)]

    def _targets(self) -> list[int]:
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def _borrow(self, like: Tensor) -> Tensor:
        free = self._scratch.get((like.numel(), like.dtype))
        return free.pop() if free else torch.empty_like(like)

    def _give_back(self, scratch: Tensor) -> None:
        self._scratch.setdefault((scratch.numel(), scratch.dtype), []).append(scratch)

    def release_scratch(self) -> None:
        """Free the receive buffers that a backward pass reused."""
        self._scratch.clear()

    @property
    def scratch_bytes(self) -> int:
        """Bytes of receive buffers kept for reuse."""
        return sum(tensor.nbytes for free in self._scratch.values() for tensor in free)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with rank 0's."""
        if self.world_size > 1:
            dist.broadcast(tensor, 0)

    def sum(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over the ranks."""
        if self.world_size > 1:
            dist.all_reduce(tensor)

    def max(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its maximum over the ranks."""
        if self.world_size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)

    def agree(self, flags: Tensor) -> Work:
        """Start to replace the host tensor ``flags`` by its maximum over the ranks."""
        if self.world_size == 1:
            return _Pending([])
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._control, async_op=True)
        return _Pending([work])

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, group=self._control)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in the order of the ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def collect(self, part: Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Bring every rank's bytes to rank 0, one message at a time.

        Args:
            part: This rank's bytes ``[n]``, on any device.
            sizes: How many bytes each rank has.

        Yields:
            On rank 0 ``(peer, bytes)`` in the order of the ranks; the bytes are overwritten by the
            next ones. Nothing on other ranks.
        """
        if self.rank:
            for chunk in part.split(MESSAGE_BYTES) if part.numel() else ():
                dist.send(chunk.to("cpu"), 0, group=self._control)
            return
        yield from ((0, chunk) for chunk in part.split(MESSAGE_BYTES) if part.numel())
        for peer in range(1, self.world_size):
            for start in range(0, sizes[peer], MESSAGE_BYTES):
                chunk = torch.empty(min(MESSAGE_BYTES, sizes[peer] - start), dtype=torch.uint8)
                dist.recv(chunk, peer, group=self._control)
                yield peer, chunk

    def apart(self) -> Comm:
        """The same ranks on a channel of its own, for small talk in another thread."""
        other = copy.copy(self)
        if self.world_size > 1:
            other._control = dist.new_group(backend="gloo")
        return other

    def is_whole(self, timeout: timedelta) -> bool:
        """Whether every rank is still here and calls this too, within ``timeout``."""
        if self.world_size == 1:
            return True
        try:
            dist.monitored_barrier(group=self._control, timeout=timeout)
        except RuntimeError:
            return False
        return True


def _started(*works: Sequence[Work | None]) -> list[Work]:
    return [work for group in works for work in group if work is not None]


@torch.no_grad()
def _sum_into(out: Tensor, summands: list[Tensor]) -> None:
    first, *rest = summands
    if rest and first.dtype == out.dtype:
        torch.add(first, rest.pop(0), out=out)
    else:
        out.copy_(first)
    for summand in rest:
        out.add_(summand)


@torch.no_grad()
def _copy(out: Tensor, source: Tensor) -> None:
    out.copy_(source)
