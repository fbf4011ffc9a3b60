"""A dry run of one rank without the others: it allocates as it would, and sends nothing.

The engine uses it like any communicator, on tensors without data, so that the memory of a step is
known before there are ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from typing_extensions import override

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.dry_transports import DryMessages, DryTransport, OnMessage
from lightning_zero.comm.mesh import Mesh
from lightning_zero.comm.one_host import DrySharedMemory
from lightning_zero.tensors import (
    HostCopies,
    Landing,
    Storages,
    UploadPart,
    Work,
    internals,
    lasting_tensors,
    pinned_bytes,
)

_META = torch.device("meta")


class DryCommunicator(Communicator):
    """One rank of ``world_size`` without the others.

    Args:
        rank: The number of the rank.
        world_size: Number of ranks.
        transport: Allocates what weights and gradients travel through within a copy.
        num_shards: As for every communicator.
        on_message: Called with the axis, the verb (``trade`` for quantized gradients) and the bytes
            of each message that begins; its result is called when the message is waited for.

    Attributes:
        dry: The transports along each axis.
    """

    transport: DryTransport

    def __init__(
        self,
        rank: int,
        world_size: int,
        transport: DryTransport,
        num_shards: int | None = None,
        on_message: OnMessage | None = None,
    ) -> None:
        self.device = transport.device
        self.control = transport.control
        self.mesh = mesh = Mesh.of(rank, world_size, num_shards)
        self.transport = transport.along(mesh.shard)
        self.dry = {"shard": self.transport}
        if mesh.replicate.size > 1:
            self.dry["replicate"] = transport.along(mesh.replicate, gathers_weights=False)
        if on_message is not None:
            for name, one in self.dry.items():
                one.on_message = functools.partial(on_message, name)
        self.transports = {**self.dry}

    @functools.cached_property
    @override
    def host_copies(self) -> DryHostCopies:
        return DryHostCopies()

    def watch(self, on_change: Callable[..., None]) -> None:
        """Call ``on_change`` whenever memory has been allocated from now on."""
        for transport in self.dry.values():
            transport.on_change = on_change


class DryHostCopies(HostCopies):
    """Copies of tensors without data between a device and its host: none is made.

    What copies to the host read is kept on the device as long as they would need it.

    Args:
        device: The device that fake tensors pretend to be on; by default that of all other tensors.
    """

    def __init__(self, device: torch.device = _META) -> None:
        super().__init__(_META)
        self.device = device
        self._passing = Storages()

    @property
    def passing(self) -> int:
        """Bytes of storages that are held on the host."""
        return self._passing.nbytes

    @override
    def lasting_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        with lasting_tensors():
            return torch.empty(numel, dtype=dtype, device=_META)

    @override
    def recurring_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.lasting_memory(numel, dtype)

    @override
    def can_copy(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) and tensor.device.type == self.device.type

    @override
    def storage_down(self, tensor: Tensor, group: object) -> tuple[Tensor, Landing]:
        with internals.without_modes():
            nbytes = pinned_bytes(tensor.untyped_storage().nbytes(), self.device)
            memory = torch.empty(nbytes, dtype=torch.uint8, device=_META)
        self._passing.add(memory)
        self._keep(group, landing := Landing(None), tensor.detach())
        return memory, landing

    @override
    def down(
        self,
        out: Tensor,
        source: Tensor,
        finish: Callable[[], object] | None = None,
        *,
        group: object,
    ) -> Landing:
        landing = super().down(out, source, finish, group=group)
        self._keep(group, landing, source)
        return landing

    @override
    def up(
        self,
        out: Tensor,
        source: Tensor,
        then: Callable[[], Work],
        after: Landing | None = None,
    ) -> Work:
        return then()

    @override
    def up_in_parts(self, what: str, parts: Iterable[UploadPart], then: Callable[[], Work]) -> Work:
        return then()


def dry_transport(device: torch.device, *, reads_peers: bool) -> DryTransport:
    """Return what allocates as the transport of ranks on such devices does, and sends nothing."""
    if device.type != "cpu":
        return DryTransport()
    return DrySharedMemory() if reads_peers else DryMessages()
