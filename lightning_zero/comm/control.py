"""The control plane: decisions and small values that the ranks exchange in Python."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator, Sequence
from math import inf, nan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.collective_log import CollectiveLog
from lightning_zero.comm.process_groups import (
    destroy,
    group_for,
    is_initialized,
    new_group_of_hosts,
)
from lightning_zero.comm.reports import Reports, own_store
from lightning_zero.comm.sync_points import Channel, PendingSync, SyncPoint, with_complements
from lightning_zero.comm.watchdog import Watchdog
from lightning_zero.tensors import runs_outside

_last_number = -1

MESSAGE_BYTES = 16 * 2**20
"""The most bytes that ``collect`` holds at a time."""
VALUE_BYTES = 512
"""The size of each rank's first message in ``gather_objects``."""


class Control:
    """All ranks of the default process group, for decisions and exchanges of values.

    Args:
        alone: Ignore the process group: this is the only rank.

    Attributes:
        rank: This process's number among all ranks.
        world_size: Number of all ranks.
        log: The collectives that this rank has begun.
        watchdog: Detects ranks that wait for each other in different places.
        channel: The way of sync points.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self.rank, self.world_size = 0, 1
        self.log = CollectiveLog()
        self._group: Any = None
        self._separated: list[Control] = []
        if is_initialized() and not alone:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if dist.get_backend() != "gloo":
                # Decisions travel between host CPUs, so that they never stall the device.
                self._group = group_for("values", of_hosts=True)
        self._enter()

    def _enter(self) -> None:
        """Begin to be watched, under a number that is new and the same on all ranks."""
        global _last_number
        if self.world_size == 1 or dist.get_backend() == "fake":
            self._watch(None)
            return
        self._watch(number := _last_number + 1)
        # A rank may have begun another control plane alone, or less far than the others.
        _last_number = max(self.gather_objects(number))
        if number != _last_number:
            self.watchdog.forget()
            self._watch(_last_number)
        # Ranks that come to different places could not make it there: some would never come, and
        # nothing ends the wait for them.
        _ = self.channel.group

    def _watch(self, number: int | None) -> None:
        reports = None
        if number is not None:
            prefix = f"lightning_zero/{number}"
            reports = Reports(own_store(), prefix, self.rank, self.world_size)
        self.watchdog = Watchdog(self.log, reports)
        self.channel = Channel(self.world_size, self.log, self.watchdog.describe)

    # -- sync points -----------------------------------------------------------------------------

    def call(self, sync_point: SyncPoint, flags: bytes = b"", *, about: str = "") -> PendingSync:
        """Come to a sync point; waiting returns the maximum of each of ``flags``.

        Ranks that differ in ``about`` have diverged.
        """
        assert len(flags) <= self.channel.capacity, "more flags than were reserved"
        return PendingSync(self.channel, sync_point, flags, about)

    def all_equal(self, sync_point: SyncPoint, digest: bytes) -> bool:
        """Return whether all ranks come to a sync point with the same ``digest``, a few bytes."""
        maxima = self.call(sync_point, with_complements(digest)).wait()
        return maxima == with_complements(maxima[: len(digest)])

    # -- values ----------------------------------------------------------------------------------

    @runs_outside
    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with rank 0's."""
        if self.world_size > 1:
            with self.log.at("a broadcast of rank 0's values"):
                dist.broadcast(tensor, 0)

    @runs_outside
    def sum(self, tensor: Tensor, place: str = "a sum over the ranks") -> None:
        """Replace ``tensor`` by its sum over the ranks."""
        if self.world_size > 1:
            with self.log.at(place):
                dist.all_reduce(tensor)

    @runs_outside
    def max(self, tensor: Tensor, place: str = "a maximum over the ranks") -> None:
        """Replace the floating ``tensor`` by its maximum over the ranks, NaN if one has NaN."""
        if self.world_size > 1:
            # Gloo's maximum drops a NaN that does not come first, so NaNs travel as a mask.
            is_nan = tensor.isnan()
            both = torch.stack([is_nan.to(tensor.dtype), tensor.masked_fill(is_nan, -inf)])
            with self.log.at(place):
                dist.all_reduce(both, dist.ReduceOp.MAX)
            tensor.copy_(both[1].masked_fill(both[0] > 0, nan))

    @runs_outside
    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's ``value`` on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        with self.log.at("a broadcast of rank 0's values"):
            dist.broadcast_object_list(box, 0, group=self._group)
        return box[0]

    @runs_outside
    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in rank order."""
        if self.world_size == 1:
            return [value]
        pickled = _pickled(value)
        # Torch's version sends the sizes first; most values fit in the message with their size.
        first = len(pickled).to_bytes(8, "little") + pickled[: VALUE_BYTES - 8]
        with self.log.at("an exchange of values"):
            rows = self._gather_bytes(first, VALUE_BYTES)
            sizes = [int.from_bytes(row[:8], "little") for row in rows]
            rows = [row[8:] for row in rows]
            if (most := max(sizes)) > VALUE_BYTES - 8:
                rows = self._gather_bytes(pickled, most)
        return [pickle.loads(row[:size]) for row, size in zip(rows, sizes, strict=True)]

    def _gather_bytes(self, own: bytes, size: int) -> list[bytes]:
        """Return every rank's bytes, padded to ``size``."""
        sent = torch.frombuffer(bytearray(own.ljust(size, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(sent) for _ in range(self.world_size)]
        dist.all_gather(rows, sent, group=self._group)
        return [row.numpy().tobytes() for row in rows]

    def collect(
        self, part: Tensor, sizes: Sequence[int], order: Sequence[int] = ()
    ) -> Iterator[tuple[int, Tensor]]:
        """Bring every rank's bytes to rank 0, one message at a time.

        Args:
            part: This rank's bytes ``[n]``, on any device.
            sizes: How many bytes each rank has.
            order: The other ranks in the order in which to receive; by default that of ranks.

        Yields:
            On rank 0 ``(peer, bytes)``, its own first, at most :data:`MESSAGE_BYTES` at a time;
            nothing on other ranks.
        """
        chunks = torch.split(part, MESSAGE_BYTES) if part.numel() else ()
        with self.log.explained():
            if self.rank:
                for chunk in chunks:
                    dist.send(chunk.to("cpu"), 0, group=self._group)
                return
            yield from ((0, chunk) for chunk in chunks)
            for peer in order or range(1, self.world_size):
                for start in range(0, sizes[peer], MESSAGE_BYTES):
                    chunk = torch.empty(min(MESSAGE_BYTES, sizes[peer] - start), dtype=torch.uint8)
                    dist.recv(chunk, peer, group=self._group)
                    yield peer, chunk

    def separate(self) -> Control:
        """Make a control plane with a group of its own, to exchange values in another thread.

        The group lasts until :meth:`leave`.
        """
        other = copy.copy(self)
        other._separated = []
        if self.world_size > 1:
            other._group = new_group_of_hosts()
            self._separated.append(other)
        other.log = CollectiveLog()
        other.log.explain = self.log.explain
        other.watchdog = Watchdog(other.log)
        other.channel = Channel(self.world_size, other.log, other.watchdog.describe)
        return other

    def leave(self) -> None:
        """Take part in nothing more, and destroy the groups made by :meth:`separate`.

        All ranks must have received everything sent there.
        """
        self.watchdog.leave()
        for other in self._separated:
            destroy(other._group)
            other._group = None
        self._separated = []


class _Pickler(pickle.Pickler):
    """A pickler of tensors of newer dtypes too, such as float8, which torch does not read back."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.dtype in _READABLE:
            return NotImplemented
        return Tensor.view, (obj.view(_OF_SIZE[obj.itemsize]), obj.dtype)


_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_READABLE = {
    *_OF_SIZE.values(), torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex32, torch.complex64, torch.complex128,
}  # fmt: skip


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()
