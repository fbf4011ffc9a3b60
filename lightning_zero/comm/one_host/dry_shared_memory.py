"""A dry run of shared memory: it allocates as that would, and sends nothing."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zero.comm.dry_transports import DryTransport
from lightning_zero.comm.transport import ReduceBuffer, Transport
from lightning_zero.tensors import Work


class DrySharedMemory(DryTransport):
    """Reduce buffers that peers read, and that stay from step to step.

    How many there are depends on how far each rank is. The largest possible number is counted: a
    peer that has come to a reduction has read the buffers of the previous one.
    """

    reads_peers: ClassVar[bool] = True
    lands_apart: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._unread: tuple[str, list[Tensor]] = ("", [])
        self._capacity = self._num_buffers = 0

    @property
    @override
    def partials(self) -> int:
        return self._num_buffers * self._capacity + self._in_flight.nbytes

    @override
    def all_reduce(self, tensor: Tensor, *, unit: str, tag: int) -> Work:
        return Transport.all_reduce(self, tensor, unit=unit, tag=tag)

    @override
    def reduce_buffer(self, numel: int, dtype: torch.dtype) -> ReduceBuffer:
        self._capacity = max(self._capacity, numel * dtype.itemsize)
        buffer = super().reduce_buffer(numel, dtype)
        self._num_buffers = max(self._num_buffers, len(self._partials))
        return buffer

    @override
    def _finish(self, partial: ReduceBuffer, out: Tensor, unit: str) -> None:
        super()._finish(partial, out, unit)
        before, unread = self._unread
        self._unread = (unit, [*(unread if unit == before else ()), partial.tensor])

    @override
    def drop_outgrown(self) -> None:
        self._unread = ("", [])
