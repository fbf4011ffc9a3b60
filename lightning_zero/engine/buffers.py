"""Broadcasts that keep a module's buffers equal on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_zero.comm import Communicator
from lightning_zero.tensors import unwrapped


class BufferSync:
    """Broadcasts of buffers before the same forwards as in DDP.

    DDP makes none after a forward whose gradients were not to be sent: within `no_sync`, without
    gradients, and under manual optimization, where Lightning tells DDP to expect no backward.

    Attributes:
        is_due: Whether the next forward broadcasts.
    """

    def __init__(self, module: nn.Module, comm: Communicator, *, is_on: bool) -> None:
        self._module, self._comm, self._is_on = module, comm, is_on
        self.is_due = True
        # Whether a forward is running that DDP would see, not just a call of a submodule.
        self._is_counted = False

    def begin(self) -> None:
        """Begin a forward that DDP would see; called by all ranks."""
        self._is_counted = True
        if self._is_on and self.is_due:
            broadcast_buffers(self._module, self._comm)

    def end(self, *, sends: bool) -> None:
        """End any forward; ``sends`` tells whether its gradients are to be sent."""
        if self._is_counted:
            self.is_due = sends
        self._is_counted = False


@torch.no_grad()
def broadcast_buffers(module: nn.Module, comm: Communicator, others: Iterable[Tensor] = ()) -> None:
    """Overwrite the module's buffers, and others, with rank 0's: one message per dtype, like DDP.

    Of tensors that wrap tensors, those are sent.
    """
    if comm.mesh.size == 1 and comm.mesh.tensor is None:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in itertools.chain(_buffers(module), *map(unwrapped, others)):
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        comm.control.broadcast(flat)
        parts = torch.split(flat, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))


def _buffers(module: nn.Module) -> list[Tensor]:
    """Return the module's current buffers, in the same order on all ranks.

    Faster than torch's own traversal, which nests several generators for every module.
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
