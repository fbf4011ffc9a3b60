"""The ranks that share one model: what weights and gradients travel on, and small talk around it.

Only this room and the ``wires`` know one backend from another. Which wire is taken is chosen once.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from math import inf, nan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.groups import destroy, give_up, group_for, new_group_of_hosts
from lightning_zero.ledger import Ledger
from lightning_zero.meeting import Meetings, Subject
from lightning_zero.watch import Watch
from lightning_zero.wires import (
    Backend,
    Messages,
    ReduceBuffer,
    Shared,
    Windows,
    Wire,
    Work,
)

__all__ = ["Comm", "ReduceBuffer", "Shared", "Work"]

_numbers = itertools.count()
_stores: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

MESSAGE_BYTES = 16 * 2**20
"""The most that ``collect`` holds at a time."""


class Comm:
    """This process among the ranks that share one model.

    Attributes:
        rank: This process's number in the group.
        world_size: Number of ranks.
        ledger: What this rank has sent.
        meetings: Where the ranks take decisions together.
        watch: Finds out when ranks wait for each other in different places.
        wire: What carries weights and gradients.
    """

    def __init__(
        self, device: torch.device, *, direct: bool | None = None, windows: bool | None = None
    ) -> None:
        self.device = device
        self.ledger = Ledger()
        self.rank, self.world_size = 0, 1
        self.watch = Watch()
        self._number = next(_numbers)
        self._board = f"lightning_zero/posts/{self._number}"
        self._posts: dict[str, str] = {}
        self._control: Any = None
        self._aparts: list[Comm] = []
        is_direct = True
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            on_gloo = dist.get_backend() == "gloo"
            is_direct = on_gloo if direct is None else direct
            if is_direct and self.world_size > 1 and device.type != "cpu":
                raise ValueError(
                    f"Weights are on a device of type {device.type!r}, but the process group's"
                    f" backend is {dist.get_backend()!r}, whose messages reach no memory but the"
                    " host's. Take the device's own: ZeROStrategy(process_group_backend='nccl')."
                )
            if not on_gloo:
                # Small decisions travel between the hosts, so that they never stall the device.
                self._control = group_for("small talk", of_hosts=True)
            if self.world_size > 1 and dist.get_backend() != "fake":
                self.watch = self._start_watch()
        self.meetings = Meetings(self.rank, self.world_size, self.watch)
        self.wire = self._choose(is_direct=is_direct, may_share=windows is not False)

    def _choose(self, *, is_direct: bool, may_share: bool) -> Wire:
        """The fastest wire of those that can be had, by ``examples/benchmarks/wires.py``."""
        if not is_direct:
            # NCCL reduce-scatters and gathers on the device's own links, sends no more than it
            # must, and knows no tags by which messages of two units could be told apart.
            return Backend(self.meetings, self.device, group_for("weights"), group_for("gradients"))
        may_share = may_share and self.device.type == "cpu" and self.world_size > 1
        if may_share and Windows.can_see_peers(self.meetings):
            # Nothing is sent at all; a gather even needs no peer to take part.
            return Windows(self.meetings, self.device)
        # Gloo's reduce-scatter sends the whole buffer and adds up in an order of its own. Messages
        # send each rank its part, (N - 1) / N of it in all, and are added in the ranks' order.
        return Messages(self.meetings, self.device)

    def _start_watch(self) -> Watch:
        return Watch(
            self.rank,
            self.world_size,
            store=_own_store(),
            prefix=f"lightning_zero/watch/{self._number}",
            give_up=give_up,
        )

    @property
    def gathers_together(self) -> bool:
        """Whether a gather needs every rank to take part."""
        return self.world_size > 1 and not self.wire.reads_peers

    @property
    def shares_memory(self) -> bool:
        """Whether ranks read each other's masters and reduce buffers."""
        return self.wire.reads_peers

    @property
    def gathers_in_order(self) -> bool:
        """Whether nothing but the order of gathers tells one unit's weights from another's."""
        return self.world_size > 1 and not self.wire.has_tags

    @property
    def sent(self) -> Counter[tuple[str, str]]:
        """Elements that this rank has sent since the start, by unit and verb."""
        return Counter({key: sent.elements for key, sent in self.ledger.total.items()})

    def fence(self, subject: Subject) -> None:
        """Wait until every rank is here, if ranks read each other's memory.

        Whoever changes a master stands between two fences: before the first all have read the old
        values, after the second all may read the new ones.
        """
        if self.wire.reads_peers:
            self.meetings.call(subject).wait()

    # -- weights and gradients -------------------------------------------------------------------

    def share(self, numel: int, dtype: torch.dtype) -> Shared:
        """Memory for a master; with windows, a view of every rank's too. A collective."""
        return self.wire.share(numel, dtype)

    def gather(self, whole: Tensor, shard: Shared, *, unit: str, tag: int) -> Work:
        """Start to fill ``whole`` (``[world_size * n]``) from every rank's ``shard`` (``[n]``).

        Dtypes may differ: masters are cast on the way.
        """
        sent = shard.own.numel() * (self.world_size - 1)
        self.ledger.note(unit, "gather", sent, whole.element_size())
        return self.wire.gather(whole, shard, unit=unit, tag=tag)

    def reduce_buffer(self, numel: int, dtype: torch.dtype) -> ReduceBuffer:
        """Memory for a unit's gradients before their reduction; its content is undefined."""
        return self.wire.reduce_buffer(numel, dtype)

    def reduce(self, partial: ReduceBuffer, out: Tensor, *, unit: str, tag: int) -> Work:
        """Start to write the sum of all ranks' summands of this rank's shard to ``out`` (``[n]``).

        ``partial`` (``[world_size * n]``) is given up; ``out`` may have another dtype.
        """
        sent = out.numel() * (self.world_size - 1)
        self.ledger.note(unit, "reduce", sent, partial.tensor.element_size())
        return self.wire.reduce(partial, out, unit=unit, tag=tag)

    def drop_outgrown_windows(self) -> None:
        """Free reduce buffers that a larger unit outgrew; behind a fence, when all are read."""
        self.wire.drop_outgrown()

    def release_windows(self) -> None:
        """Let go of all reduce buffers, the peers' too; memory is freed when the last rank does."""
        self.wire.release()

    def release_scratch(self) -> None:
        """Free the receive buffers that a backward pass reused."""
        self.wire.release_scratch()

    @property
    def scratch_bytes(self) -> int:
        """Bytes of receive and reduce buffers, in use or kept for reuse."""
        return self.wire.scratch_bytes

    # -- small talk ------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with rank 0's."""
        if self.world_size > 1:
            with self.watch.at("a broadcast of rank 0's values"):
                dist.broadcast(tensor, 0)

    def sum(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over the ranks."""
        if self.world_size > 1:
            with self.watch.at("a sum over the ranks"):
                dist.all_reduce(tensor)

    def max(self, tensor: Tensor) -> None:
        """Replace the floating ``tensor`` by its maximum over the ranks, NaN if one has NaN."""
        if self.world_size > 1:
            # Gloo's maximum forgets a NaN that does not come first, so it travels as a number.
            is_nan = tensor.isnan()
            both = torch.stack([is_nan.to(tensor.dtype), tensor.masked_fill(is_nan, -inf)])
            with self.watch.at("a maximum over the ranks"):
                dist.all_reduce(both, dist.ReduceOp.MAX)
            tensor.copy_(both[1].masked_fill(both[0] > 0, nan))

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        with self.watch.at("a broadcast of rank 0's values"):
            dist.broadcast_object_list(box, 0, group=self._control)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in the order of the ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self.watch.at("an exchange of values"):
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
        with self.watch.busy():
            yield from self._collect(part, sizes)

    def _collect(self, part: Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        if self.rank:
            for chunk in torch.split(part, MESSAGE_BYTES) if part.numel() else ():
                dist.send(chunk.to("cpu"), 0, group=self._control)
            return
        yield from ((0, chunk) for chunk in torch.split(part, MESSAGE_BYTES) if part.numel())
        for peer in range(1, self.world_size):
            for start in range(0, sizes[peer], MESSAGE_BYTES):
                chunk = torch.empty(min(MESSAGE_BYTES, sizes[peer] - start), dtype=torch.uint8)
                dist.recv(chunk, peer, group=self._control)
                yield peer, chunk

    def apart(self) -> Comm:
        """The same ranks on a channel of its own, for small talk in another thread.

        It lasts until :meth:`leave`.
        """
        other = copy.copy(self)
        other._aparts = []
        if self.world_size > 1:
            other._control = new_group_of_hosts()
            self._aparts.append(other)
        other.watch = Watch()
        return other

    def leave(self) -> None:
        """Come to no more meetings, and end the channels that were made :meth:`apart`.

        All ranks have received everything that was sent there.
        """
        self.watch.leave()
        for other in self._aparts:
            destroy(other._control)
            other._control = None
        self._aparts = []

    def post(self, name: str, value: str) -> None:
        """Leave a value for the others to find, who need not be here."""
        if self.world_size > 1:
            _own_store().set(f"{self._board}/{name}/{self.rank}", value)
        else:
            self._posts[name] = value

    def posted(self, name: str) -> list[str] | None:
        """What the ranks have left under a name, in their order; ``None`` until all have."""
        if self.world_size == 1:
            return [self._posts[name]] if name in self._posts else None
        store = _own_store()
        keys = [f"{self._board}/{name}/{rank}" for rank in range(self.world_size)]
        return [store.get(key).decode() for key in keys] if store.check(keys) else None

    def is_whole(self, timeout: timedelta) -> bool:
        """Whether every rank is still here and calls this too, within ``timeout``.

        Asked through the store: a collective that a rank never joins could not be given up.
        """
        if self.world_size == 1:
            return True
        if self.watch.verdict:
            return False
        store = _default_store()
        keys = [f"lightning_zero/{self._number}/{rank}" for rank in range(self.world_size)]
        try:
            store.set(keys[self.rank], "here")
            store.wait(keys, timeout)
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                store.delete_key(keys[self.rank])
            return False
        return True


def _own_store() -> Any:
    """A connection of its own to the store: one that a rank waits on answers nobody else."""
    world = dist.group.WORLD
    if world not in _stores:
        store = _default_store()
        _stores[world] = store.clone() if hasattr(store, "clone") else store
    return _stores[world]


def _default_store() -> Any:
    # Private, but torch has no public way to the store that it was started with.
    return dist.distributed_c10d._get_default_store()
