"""The ranks that share one model: a control plane, and transports that are chosen once.

Only this folder knows one backend from another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.coded import Coded
from lightning_zero.comm.control import Control, SyncPoint
from lightning_zero.comm.mesh import Axis, Mesh
from lightning_zero.comm.process_groups import backend_for, default_world_size
from lightning_zero.comm.shared_memory import SharedMemory
from lightning_zero.comm.tensor_parallel import DATA, TENSOR, device_mesh
from lightning_zero.comm.traffic import Traffic
from lightning_zero.comm.transport import Collectives, Transport
from lightning_zero.tensors import HostCopies


class Communicator:
    """This process among the ranks that share one model.

    Args:
        device: Where weights and gradients are.
        reads_peers: ``False`` reads no other rank's memory, even where this host allows it.
        num_shards: Ranks over which buffers are sharded; all by default. The same on every rank.
        tensor_size: Ranks over which tensor parallelism cuts parameters.

    Attributes:
        device: As given.
        num_changes: How often masters may have changed: it grows with :meth:`note_change`.
        host_copies: The copies between the device and its host.
        control: The control plane of all ranks.
        mesh: The ranks along their axes.
        transports: The transport along each axis: the shard axis, and others of several ranks.
        transport: That of the shard axis.

    Raises:
        ValueError: The backend's messages do not reach the device's memory, or it or the device
            lacks what is needed, or the ranks cannot be divided into copies of ``num_shards``, or
            ask for different numbers.
    """

    num_changes = 0

    def __init__(
        self,
        device: torch.device,
        *,
        reads_peers: bool | None = None,
        num_shards: int | None = None,
        tensor_size: int = 1,
    ) -> None:
        self.device = device
        is_alone = default_world_size() == 1
        self._sends_messages = is_alone or backend_for(device.type) == "gloo"
        if self._sends_messages and not is_alone and device.type != "cpu":
            raise ValueError(
                f"Weights are on a device of type {device.type!r}, but the process group's backend"
                f" is {dist.get_backend()!r}, which can only send host memory. Use the device's own"
                " backend: ZeROStrategy(process_group_backend='nccl')."
            )
        self.host_copies = HostCopies(device)
        self.control = Control()
        sizes = num_shards, tensor_size
        for asked in map(set, zip(*self.control.gather_objects(sizes), strict=True)):
            if len(asked) > 1:
                raise ValueError(f"Expected the same number of shards on all ranks, got {asked}.")
        self.mesh = Mesh(self.control.rank, self.control.world_size, *sizes)
        may_share = reads_peers is not False and device.type == "cpu"
        self.transport = self._choose(self.mesh.shard, may_share=may_share)
        self.transports: dict[str, Transport] = {"shard": self.transport}
        if self.mesh.replicate.size > 1:
            replicate = self._choose(self.mesh.replicate, may_share=may_share)
            self.transports["replicate"] = replicate

    def _choose(self, axis: Axis, *, may_share: bool) -> Transport:
        """Return the fastest transport for an axis (see ``examples/benchmarks/wires.py``)."""
        if axis.size > 1 and not self._sends_messages:
            # NCCL reduce-scatters and gathers over the device's own links, sends no more than it
            # must, and has no tags that could tell messages of two units apart.
            return Collectives(self.control, axis, self.device)
        if may_share and axis.size > 1 and SharedMemory.can_see_peers(self.control, axis):
            # No data is sent, and a gather needs no peer to take part.
            return SharedMemory(self.control, axis, self.device)
        # Gloo's reduce-scatter sends the whole buffer and adds up in an order of its own. Messages
        # send each rank its part, (N - 1) / N of it in total, and are added in rank order. A rank
        # alone sends nothing, whatever the backend.
        return Transport(self.control, axis, self.device)

    def coded(self, transport: Transport, bits: int | None) -> Transport | Coded:
        """Return ``transport``, or one that sends by it in 8 ``bits``, as messages."""
        if bits is None:
            return transport
        tensor_size = 1 if self.mesh.tensor is None else self.mesh.tensor.size
        return Coded(transport, tuple(rank // tensor_size for rank in transport.axis.ranks))

    @property
    def traffic(self) -> Traffic:
        """Traffic that this rank sent in the last optimizer step, by unit and verb.

        Verbs along other axes than the shard axis are preceded by the axis' name.
        """
        of_axes = {axis: one.ledger.last_step for axis, one in self.transports.items()}
        return {
            (unit, verb if axis == "shard" else f"{axis} {verb}"): sent
            for axis, traffic in of_axes.items()
            for (unit, verb), sent in traffic.items()
        }

    @property
    def is_in_first_copy(self) -> bool:
        """Return whether this rank is in the first copy, which counts where replicas count once."""
        return self.mesh.replicate.rank == 0

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with that of the first rank that has the same part of the model."""
        if self.mesh.tensor is None:
            self.control.broadcast(tensor)
        elif self.mesh.size > 1:
            self._broadcast([tensor], self.mesh.data, DATA)

    def broadcast_copies(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors replicated over a tensor-parallel group with its first rank's."""
        if self.mesh.tensor is not None:
            self._broadcast(tensors, self.mesh.tensor, TENSOR)

    def _broadcast(self, tensors: Iterable[Tensor], axis: Axis, dimension: str) -> None:
        """Broadcast along an axis, by the group of the device mesh that users have too."""
        tensor_size = 1 if self.mesh.tensor is None else self.mesh.tensor.size
        group = device_mesh(self.device.type, tensor_size)[dimension].get_group()
        with self.control.watchdog.at("a broadcast of the first rank's values"):
            for tensor in tensors:
                dist.broadcast(tensor, axis.ranks[0], group=group)

    def sum_over_shards(self, tensor: Tensor, place: str = "a sum over the shards") -> None:
        """Replace ``tensor`` by its sum over the ranks of the first copy, on all ranks."""
        if not self.is_in_first_copy:
            tensor.zero_()
        self.control.sum(tensor, place)

    def fence(self, sync_point: SyncPoint) -> None:
        """Wait until every rank is here, if ranks read each other's memory."""
        if any(transport.reads_peers for transport in self.transports.values()):
            self.control.call(sync_point).wait()

    @contextlib.contextmanager
    def write_access(self, sync_point: SyncPoint) -> Iterator[None]:
        """Enter the context in which this rank may change its masters; all ranks enter it.

        When it begins, all ranks have read the old values; when it ends, also after an exception,
        all may read the new ones. Where ranks cannot read each other's memory, it does not wait.
        """
        self.change_masters(sync_point)
        try:
            yield
        finally:
            self.change_masters(sync_point)

    def change_masters(self, sync_point: SyncPoint) -> None:
        """Begin or end to change this rank's masters, once nobody reads them."""
        self.note_change()
        self.fence(sync_point)

    def note_change(self) -> None:
        """Note that this rank's masters may change, once the device has read those on its host."""
        self.num_changes += 1
        self.host_copies.wait_until_read()
