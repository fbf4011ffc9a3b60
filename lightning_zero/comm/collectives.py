"""The backend's own collectives, for NCCL and every other backend but gloo."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_zero.comm.control import Control
from lightning_zero.comm.mesh import Axis
from lightning_zero.comm.process_groups import group_for
from lightning_zero.comm.transport import (
    Pending,
    ReduceBuffer,
    Shards,
    Transport,
    copy,
    gradients_of,
    weights_of,
)
from lightning_zero.tensors import Work

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
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"The process group's backend {dist.get_backend()!r} could not all-gather and"
                f" reduce-scatter tensors on a device of type {self.device.type!r}, which weights"
                " and gradients need. Pass the device's own backend, for instance"
                " ZeROStrategy(process_group_backend='nccl'), or train on one device."
            ) from error

    @override
    def _gather(self, whole: Tensor, shard: Shards, unit: str, tag: int) -> Work:
        own = whole.view(self.size, -1)[self.rank]
        copy(own, shard.own)
        collective = self.log.begin_untagged(weights_of(unit), "gather")
        work = _all_gather(whole, own, group=self._gather_group, async_op=True)
        return Pending(work, begun=(self.log, collective))

    @override
    def _reduce(self, partial: ReduceBuffer, out: Tensor, unit: str, tag: int) -> Work:
        buffer = partial.tensor
        lands = out.dtype == buffer.dtype
        landing = out if lands else buffer.new_empty(out.shape)
        collective = self.log.begin(gradients_of(unit), "reduce")
        real = buffer.dtype.to_real()  # NCCL has no complex numbers; their parts are summed
        work = _reduce_scatter(
            landing.view(real), buffer.view(real), group=self._reduce_group, async_op=True
        )
        return Pending(
            work,
            then=None if lands else lambda: copy(out, landing),
            begun=(self.log, collective),
        )

    @override
    def all_reduce(self, tensor: Tensor, *, unit: str, tag: int) -> Work:
        sent = tensor.numel() // self.size * (self.size - 1)
        for verb in ("reduce", "gather"):
            self.ledger.note(unit, verb, sent, tensor.element_size())
        collective = self.log.begin(gradients_of(unit), "reduce")
        real = tensor.view(tensor.dtype.to_real())
        work = dist.all_reduce(real, group=self._reduce_group, async_op=True)
        return Pending(*([] if work is None else [work]), begun=(self.log, collective))

    @override
    def _all_to_all(self, received: Tensor, sent: Tensor, out: Tensor, unit: str, tag: int) -> Work:
        collective = self.log.begin(gradients_of(unit), "reduce")
        work = dist.all_to_all_single(received, sent, group=self._reduce_group, async_op=True)
        return Pending(*([] if work is None else [work]), begun=(self.log, collective))
