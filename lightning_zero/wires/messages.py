"""Point-to-point messages, for gloo between hosts and for ranks that cannot read each other.

Torch's gloo reduce-scatter sends the whole buffer and its all-gather copies twice, while messages
that land in place take a third of the time (64 MiB, two ranks, torch 2.13, by `make wires`: 20
against 73 ms to reduce, where an all-reduce takes 37, and 19 against 57 ms to gather). Every
message carries the unit's number as its tag, so two ranks that disagree about the order of units
never mix their data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_zero.meeting import Meetings
from lightning_zero.span import unseen
from lightning_zero.wires.wire import (
    Arrived,
    Pending,
    ReduceBuffer,
    Shared,
    Wire,
    Work,
    copy,
    gradients_of,
    sum_into,
    weights_of,
)


class Messages(Wire):
    """A wire of messages between every two ranks; one rank alone sends none."""

    def __init__(self, meetings: Meetings, device: torch.device) -> None:
        super().__init__(meetings, device)
        self._scratch: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._lent_bytes = 0
        others = range(1, self.world_size)
        self.sources = [(self.rank - step) % self.world_size for step in others]
        self.targets = [(self.rank + step) % self.world_size for step in others]

    @override
    def gather(self, whole: Tensor, shard: Shared, *, unit: str, tag: int) -> Work:
        parts = whole.chunk(self.world_size)
        own = parts[self.rank]
        copy(own, shard.own)
        meeting = self.watch.begin(weights_of(unit))
        if not whole.numel():
            return Arrived()
        receives = {peer: parts[peer] for peer in self.sources}
        works = start(receives, dict.fromkeys(self.targets, own), 4 * tag)
        return Pending(self.watch, meeting, works)

    @override
    def reduce(self, partial: ReduceBuffer, out: Tensor, *, unit: str, tag: int) -> Work:
        parts = partial.tensor.chunk(self.world_size)
        own = parts[self.rank]
        inbox = {peer: self._borrow(own) for peer in self.sources}
        meeting = self.watch.begin(gradients_of(unit))
        if not own.numel():
            return Arrived()
        works = start(inbox, {peer: parts[peer] for peer in self.targets}, 4 * tag + 1)

        def add_up() -> None:
            # In the order of the ranks, so that every stage and every rank gets the same bits.
            sum_into(out, [inbox.get(rank, own) for rank in range(self.world_size)])
            for box in inbox.values():
                self._give_back(box)

        return Pending(self.watch, meeting, works, add_up)

    def _borrow(self, like: Tensor) -> Tensor:
        self._lent_bytes += like.nbytes
        free = self._scratch.get((like.numel(), like.dtype))
        return free.pop() if free else torch.empty_like(like)

    def _give_back(self, scratch: Tensor) -> None:
        self._lent_bytes -= scratch.nbytes
        self._scratch.setdefault((scratch.numel(), scratch.dtype), []).append(scratch)

    @override
    def release_scratch(self) -> None:
        self._scratch.clear()
        self._lent_bytes = 0

    @property
    @override
    def scratch_bytes(self) -> int:
        boxes = sum(tensor.nbytes for free in self._scratch.values() for tensor in free)
        return boxes + self._lent_bytes


def start(receives: Mapping[int, Tensor], sends: Mapping[int, Tensor], tag: int) -> list[Work]:
    """Start to receive from and to send to peers, by their ranks."""
    # Not `irecv` and `isend`, whose checks take longer than the messages of a small unit.
    group: Any = dist.group.WORLD
    with unseen():
        return [
            *[group.recv([tensor], peer, tag) for peer, tensor in receives.items()],
            *[group.send([tensor], peer, tag) for peer, tensor in sends.items()],
        ]
