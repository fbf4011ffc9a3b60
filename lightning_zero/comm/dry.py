"""A dry run of one rank without the others: it allocates as it would, and sends nothing.

The engine uses it like any communicator, on tensors without data, so that the memory of a step is
known before there are ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from typing_extensions import override

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.dry_transports import DryMessages, DryTransport, OnMessage
from lightning_zero.comm.mesh import Mesh
from lightning_zero.comm.one_host import DrySharedMemory
from lightning_zero.tensors import HostCopies, Landing, Storages, Work, internals, pinned_bytes

_META = torch.device("meta")


class DryCommunicator(Communicator):
    """One rank of ``world_size`` without the others.

    Args:
        rank: The number of the rank.
        world_size: Number of ranks.
        transport: Allocates what weights and gradients travel through within a copy.
        num_shards: As for every communicator.
        num_backward_shards: As for every communicator.
        on_message: Called with the axis, the verb (``trade`` for quantized gradients) and the bytes
            of each message that begins; its result is called when the message is waited for.
    """

    transport: DryTransport

    def __init__(
        self,
        rank: int,
        world_size: int,
        transport: DryTransport,
        num_shards: int | None = None,
        num_backward_shards: int | None = None,
        on_message: OnMessage | None = None,
    ) -> None:
        self.device = transport.device
        self.control = transport.control
        self.mesh = Mesh.of(rank, world_size, num_shards, num_backward_shards)
        axes = {"shard": self.mesh.shard, "backward": self.mesh.backward}
        self._dry = {name: transport.along(axis) for name, axis in axes.items() if axis}
        if on_message is not None and self.mesh.replicate.size > 1:
            # The memory that it holds for a moment is not predicted.
            self._dry["replicate"] = DryTransport().along(self.mesh.replicate)
        if on_message is not None:
            for name, one in self._dry.items():
                one.on_message = functools.partial(on_message, name)
        self.transport, self.transports = self._dry["shard"], {**self._dry}

    def watch(self, on_change: Callable[..., None]) -> None:
        """Call ``on_change`` whenever memory has been allocated from now on."""
        for transport in self._dry.values():
            transport.on_change = on_change


class DryHostCopies(HostCopies):
    """Copies of tensors without data between a device and its host: none is made.

    Args:
        device: The device that fake tensors pretend to be on.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(_META)
        self.device = device
        self._passing = Storages()

    @property
    def passing(self) -> int:
        """Bytes of storages that are held on the host."""
        return self._passing.nbytes

    @override
    def can_copy(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) and tensor.device.type == self.device.type

    @override
    def storage_down(self, tensor: Tensor, group: object) -> tuple[Tensor, Landing]:
        with internals.without_modes():
            nbytes = pinned_bytes(tensor.untyped_storage().nbytes(), self.device)
            memory = torch.empty(nbytes, dtype=torch.uint8, device=_META)
        self._passing.add(memory)
        return memory, Landing(None, None)

    @override
    def up(
        self,
        out: Tensor,
        source: Tensor,
        then: Callable[[], Work],
        after: Landing | None = None,
    ) -> Work:
        return then()


def dry_transport(device: torch.device, *, reads_peers: bool) -> DryTransport:
    """Return what allocates as the transport of ranks on such devices does, and sends nothing."""
    if device.type != "cpu":
        return DryTransport()
    return DrySharedMemory() if reads_peers else DryMessages()
