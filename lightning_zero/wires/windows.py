"""Memory of the peers, read where it lies: for ranks that share one host's CPUs.

Masters and reduce buffers live in windows. A gather is a copy out of the peers' masters, a
reduction a sum over the peers' buffers; only tokens of a few bytes are sent, which say where a
buffer is and that it is full.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_zero.meeting import Meetings, Subject
from lightning_zero.window import Address, Window, are_supported
from lightning_zero.wires.messages import Messages, start
from lightning_zero.wires.wire import (
    Arrived,
    Pending,
    ReduceBuffer,
    Shared,
    Work,
    copy,
    gradients_of,
    sum_into,
)


class Windows(Messages):
    """A wire of shared memory; what lies in none is sent as messages."""

    reads_peers: ClassVar[bool] = True

    def __init__(self, meetings: Meetings, device: torch.device) -> None:
        super().__init__(meetings, device)
        self._free: list[Window] = []
        self._peers: dict[Address, Window] = {}
        self._capacity = 0

    @classmethod
    def can_see_peers(cls, meetings: Meetings) -> bool:
        """Whether every rank can map every other's memory; a collective."""
        sees_all, world_size = are_supported(), meetings.world_size
        window = Window.create(8, world_size) if sees_all else None
        if window is not None:
            window.view(1, torch.int64).fill_(meetings.rank + 1)
        for peer, address in enumerate(_exchange(window and window.address, meetings)):
            sees_all = sees_all and address is not None
            try:
                seen = Window.open(address, world_size).view(1, torch.int64) if sees_all else 0
                sees_all = sees_all and int(seen) == peer + 1
            except (OSError, RuntimeError):
                sees_all = False
        return all(_exchange(sees_all, meetings))

    @override
    def share(self, numel: int, dtype: torch.dtype) -> Shared:
        window = Window.create(numel * dtype.itemsize, self.world_size)
        everybodys = [
            (window if rank == self.rank else Window.open(address, self.world_size))
            for rank, address in enumerate(_exchange(window.address, self.meetings))
        ]
        self.meetings.call(Subject.SETUP).wait()
        return Shared(window.view(numel, dtype), [peer.view(numel, dtype) for peer in everybodys])

    @override
    def gather(self, whole: Tensor, shard: Shared, *, unit: str, tag: int) -> Work:
        if shard.everybodys is None:
            return super().gather(whole, shard, unit=unit, tag=tag)
        for part, source in zip(whole.chunk(self.world_size), shard.everybodys, strict=True):
            copy(part, source)
        return Arrived()

    @override
    def reduce_buffer(self, numel: int, dtype: torch.dtype) -> ReduceBuffer:
        # One size for all, the largest seen: pages that nobody touches cost nothing.
        self._capacity = max(self._capacity, numel * dtype.itemsize)
        for window in self._free:
            if window.capacity == self._capacity and window.is_read_by_all(self.rank):
                self._free.remove(window)
                return ReduceBuffer(window.view(numel, dtype), window)
        # Never wait for a reader here: it may be a rank that itself waits for us.
        window = Window.create(self._capacity, self.world_size)
        return ReduceBuffer(window.view(numel, dtype), window)

    @override
    def reduce(self, partial: ReduceBuffer, out: Tensor, *, unit: str, tag: int) -> Work:
        """Tell peers where the buffer is; when theirs are full, sum over them and say so."""
        own, dtype, part = partial.window, partial.tensor.dtype, out.numel()
        assert own is not None
        own.num_published += 1
        mine = torch.tensor([*own.address, own.num_published], device="cpu")
        theirs = {peer: torch.empty_like(mine) for peer in self.sources}
        meeting = self.watch.begin(gradients_of(unit))
        works = start(theirs, dict.fromkeys(self.targets, mine), 4 * tag + 2)

        def add_up() -> None:
            tokens = {peer: box.tolist() for peer, box in theirs.items()}
            windows = {peer: self._peer(Address(*t[:-1])) for peer, t in tokens.items()}
            summands = [
                windows.get(rank, own).view(part, dtype, start=self.rank * part)
                for rank in range(self.world_size)
            ]
            sum_into(out, summands)
            for peer, window in windows.items():
                window.readers[self.rank] = tokens[peer][-1]
            self._free.append(own)

        return Pending(self.watch, meeting, works, add_up)

    def _peer(self, address: Address) -> Window:
        if address not in self._peers:
            self._peers[address] = Window.open(address, self.world_size)
        return self._peers[address]

    @override
    def drop_outgrown(self) -> None:
        """Free reduce buffers that a larger unit outgrew; behind a fence, when all are read.

        The others stay from step to step: to take fresh pages from the system costs ten times what
        it costs to fill them.
        """
        self._free = [w for w in self._free if w.capacity == self._capacity]
        self._peers = {
            address: window
            for address, window in self._peers.items()
            if address.capacity == self._capacity
        }

    @override
    def release(self) -> None:
        """Let go of all reduce buffers, the peers' too; memory is freed when the last rank does."""
        self._free, self._peers = [], {}

    @property
    @override
    def scratch_bytes(self) -> int:
        return super().scratch_bytes + sum(window.touched_bytes for window in self._free)


def _exchange(value: Any, meetings: Meetings) -> list[Any]:
    """Every rank's value, in the order of the ranks."""
    values: list[Any] = [None] * meetings.world_size
    with meetings.watch.at("an exchange of addresses"):
        dist.all_gather_object(values, value)
    return values
