"""Buffers of a module, the same on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_zero.comm import Communicator


class BufferSync:
    """The broadcasts of buffers before forwards: those that DDP would make.

    DDP sends none behind a forward of which no gradients are to be sent: within `no_sync`, without
    gradients, and under manual optimization, where Lightning lets its forwards await no backward.

    Attributes:
        is_due: Whether the next forward sends them.
    """

    def __init__(self, module: nn.Module, comm: Communicator, *, is_on: bool) -> None:
        self._module, self._comm, self._is_on = module, comm, is_on
        self.is_due = True
        # Whether a forward runs that is one of DDP's, and not a call of a part of the module.
        self._is_counted = False

    def begin(self) -> None:
        """Begin a forward; all ranks call it."""
        self._is_counted = True
        if self._is_on and self.is_due:
            broadcast_buffers(self._module, self._comm)

    def end(self, *, sends: bool) -> None:
        """End a forward, one of DDP's or another; ``sends`` if its gradients are to be sent."""
        if self._is_counted:
            self.is_due = sends
        self._is_counted = False


@torch.no_grad()
def broadcast_buffers(module: nn.Module, comm: Communicator) -> None:
    """Overwrite the module's buffers with rank 0's, one message per dtype, as DDP does."""
    if comm.mesh.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in _buffers(module):
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        comm.control.broadcast(flat)
        parts = torch.split(flat, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))


def _buffers(module: nn.Module) -> list[Tensor]:
    """Return the module's buffers now, in an order that is the same on all ranks.

    Torch's own way through a tree of modules is several generators deep for every module.
    """
    buffers: dict[int, Tensor | None] = {}
    seen: set[nn.Module | None] = {None}
    left: list[nn.Module | None] = [module]
    while left:
        one = left.pop()
        if one is not None and one not in seen:
            seen.add(one)
            left.extend(one._modules.values())
            for buffer in one._buffers.values():
                buffers[id(buffer)] = buffer
    return [buffer for buffer in buffers.values() if buffer is not None]
