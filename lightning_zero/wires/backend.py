"""The backend's own collectives, for NCCL and all others that are not gloo."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_zero.meeting import Meetings
from lightning_zero.wires.wire import (
    Pending,
    ReduceBuffer,
    Shared,
    Wire,
    Work,
    copy,
    gradients_of,
    weights_of,
)

# torch 2.13 renamed the two and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Backend(Wire):
    """A wire of collectives, on a communicator for each verb.

    With one for both, a prefetch would queue behind a reduction.

    Args:
        meetings: As for every wire.
        device: As for every wire.
        gather_group: All ranks, for the weights.
        reduce_group: All ranks, for the gradients.
    """

    has_tags: ClassVar[bool] = False

    def __init__(
        self, meetings: Meetings, device: torch.device, gather_group: Any, reduce_group: Any
    ) -> None:
        super().__init__(meetings, device)
        self._gather_group = gather_group
        self._reduce_group = reduce_group

    @override
    def gather(self, whole: Tensor, shard: Shared, *, unit: str, tag: int) -> Work:
        own = whole.view(self.world_size, -1)[self.rank]
        copy(own, shard.own)
        meeting = self.watch.begin(weights_of(unit), "gather")
        # Here nothing but the order tells one unit from another.
        self.meetings.note(meeting.place)
        work = _all_gather(whole, own, group=self._gather_group, async_op=True)
        return Pending(self.watch, meeting, [work])

    @override
    def reduce(self, partial: ReduceBuffer, out: Tensor, *, unit: str, tag: int) -> Work:
        buffer = partial.tensor
        lands = out.dtype == buffer.dtype
        landing = out if lands else buffer.new_empty(out.shape)
        meeting = self.watch.begin(gradients_of(unit), "reduce")
        work = _reduce_scatter(landing, buffer, group=self._reduce_group, async_op=True)
        return Pending(self.watch, meeting, [work], None if lands else lambda: copy(out, landing))
