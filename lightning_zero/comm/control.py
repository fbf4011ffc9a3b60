"""The control plane: small decisions and values that the ranks take and exchange in Python.

A sync point carries flags, of which each becomes its maximum over the ranks. All sync points are
messages of one size on a group of their own, so a rank that comes to another one than the others
is not read as if it had come to theirs: each message begins with the sync point's number and a sum
over the collectives that the rank has begun, as numbers and as their complements. Where a number
and its complement no longer match, the ranks differ. Where all ranks share a host they go through
memory, with the same content.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from math import inf, nan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.collective_log import CollectiveLog
from lightning_zero.comm.process_groups import (
    destroy,
    give_up,
    group_for,
    is_initialized,
    new_group_of_hosts,
)
from lightning_zero.comm.reports import Board, Reports, own_store
from lightning_zero.comm.sync_points import PendingSync, SyncPoint, with_complements
from lightning_zero.comm.sync_windows import MOST_FLAGS, SyncWindows
from lightning_zero.comm.watchdog import Watchdog

_numbers = itertools.count()

MESSAGE_BYTES = 16 * 2**20
"""The most that ``collect`` holds at a time."""
VALUE_BYTES = 512
"""The first message of each rank's value in ``gather_objects``."""


class Control:
    """All ranks of the default process group, as they decide and exchange values.

    Args:
        alone: Leave the process group out: there is this rank only.

    Attributes:
        rank: This process's number among all ranks.
        world_size: Number of all ranks.
        capacity: Flags that a sync point has room for.
        course: A sum over the events that were noted.
        log: The collectives that this rank has begun.
        board: Notes that ranks leave for each other.
        watchdog: Detects ranks that wait for each other in different places.
        sync_windows: What sync points go through in the place of messages, if there is something.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self.rank, self.world_size = 0, 1
        self.log = CollectiveLog()
        self._group: Any = None
        self._separated: list[Control] = []
        self.capacity = 64
        self.sync_windows: SyncWindows | None = None
        self.course = 0
        reports = None
        if is_initialized() and not alone:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if dist.get_backend() != "gloo":
                # Small decisions travel between the hosts, so that they never stall the device.
                self._group = group_for("values", of_hosts=True)
        # The ranks count alike, so what one of them does alone has no number.
        prefix = "" if alone else f"lightning_zero/{next(_numbers)}"
        has_peers = self.world_size > 1 and dist.get_backend() != "fake"
        self.board = Board(own_store(alone=not has_peers), prefix, self.rank, self.world_size)
        if has_peers:
            reports = Reports(self.board)
        self.watchdog = Watchdog(self.log, reports, give_up)

    # -- sync points -----------------------------------------------------------------------------

    @property
    def sync_group(self) -> Any:
        """The group of sync points. Not kept: one that is referred to outlives its destruction."""
        return group_for("sync points", of_hosts=True)

    def reserve(self, num_flags: int) -> None:
        """Make room for so many flags; all ranks must ask for the same."""
        self.capacity = max(self.capacity, num_flags)
        if self.capacity > MOST_FLAGS:
            self.sync_windows = None

    def share_sync_points(self) -> None:
        """Let sync points go through shared memory, if every rank can map it; a collective."""
        self.sync_windows = SyncWindows.among(self)
        # Ranks that meet at different sync points say so in messages, and could not make the group
        # then: some may never come.
        _ = self.sync_group

    def note(self, event: str) -> None:
        """Count an event that all ranks must have had, in this order, at the next sync point."""
        self.course = zlib.crc32(event.encode(), self.course)

    @property
    def has_notes(self) -> bool:
        """Return whether events were counted of which nothing but the order is known."""
        return self.course != 0

    def call(self, sync_point: SyncPoint, flags: bytes = b"", *, about: str = "") -> PendingSync:
        """Come to a sync point; waiting returns the maximum of each of ``flags``.

        Ranks that come ``about`` different things have parted.
        """
        assert len(flags) <= self.capacity, "more flags than were reserved"
        return PendingSync(self, sync_point, flags, about)

    def all_equal(self, sync_point: SyncPoint, digest: bytes) -> bool:
        """Return whether all ranks come to a sync point with the same few bytes."""
        maxima = self.call(sync_point, with_complements(digest)).wait()
        return maxima == with_complements(maxima[: len(digest)])

    # -- values ----------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with rank 0's."""
        if self.world_size > 1:
            with self.log.at("a broadcast of rank 0's values"):
                dist.broadcast(tensor, 0)

    def sum(self, tensor: Tensor, place: str = "a sum over the ranks") -> None:
        """Replace ``tensor`` by its sum over the ranks."""
        if self.world_size > 1:
            with self.log.at(place):
                dist.all_reduce(tensor)

    def max(self, tensor: Tensor, place: str = "a maximum over the ranks") -> None:
        """Replace the floating ``tensor`` by its maximum over the ranks, NaN if one has NaN."""
        if self.world_size > 1:
            # Gloo's maximum forgets a NaN that does not come first, so it travels as a number.
            is_nan = tensor.isnan()
            both = torch.stack([is_nan.to(tensor.dtype), tensor.masked_fill(is_nan, -inf)])
            with self.log.at(place):
                dist.all_reduce(both, dist.ReduceOp.MAX)
            tensor.copy_(both[1].masked_fill(both[0] > 0, nan))

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's ``value`` on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        with self.log.at("a broadcast of rank 0's values"):
            dist.broadcast_object_list(box, 0, group=self._group)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in the order of the ranks."""
        if self.world_size == 1:
            return [value]
        pickled = pickle.dumps(value)
        # Torch's own sends the sizes first; most values have room in the message that says them.
        first = len(pickled).to_bytes(8, "little") + pickled[: VALUE_BYTES - 8]
        with self.log.at("an exchange of values"):
            rows = self._gather_bytes(first, VALUE_BYTES)
            sizes = [int.from_bytes(row[:8], "little") for row in rows]
            rows = [row[8:] for row in rows]
            if (most := max(sizes)) > VALUE_BYTES - 8:
                rows = self._gather_bytes(pickled, most)
        return [pickle.loads(row[:size]) for row, size in zip(rows, sizes, strict=True)]

    def _gather_bytes(self, own: bytes, size: int) -> list[bytes]:
        """Return every rank's bytes, with what makes them all of one size."""
        sent = torch.frombuffer(bytearray(own.ljust(size, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(sent) for _ in range(self.world_size)]
        dist.all_gather(rows, sent, group=self._group)
        return [row.numpy().tobytes() for row in rows]

    def collect(self, part: Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Bring every rank's bytes to rank 0, one message at a time.

        Args:
            part: This rank's bytes ``[n]``, on any device.
            sizes: How many bytes each rank has.

        Yields:
            On rank 0 ``(peer, bytes)`` in the order of the ranks; the bytes are overwritten by the
            next ones. Nothing on other ranks.
        """
        with self.log.busy():
            yield from self._collect(part, sizes)

    def _collect(self, part: Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        if self.rank:
            for chunk in torch.split(part, MESSAGE_BYTES) if part.numel() else ():
                dist.send(chunk.to("cpu"), 0, group=self._group)
            return
        yield from ((0, chunk) for chunk in torch.split(part, MESSAGE_BYTES) if part.numel())
        for peer in range(1, self.world_size):
            for start in range(0, sizes[peer], MESSAGE_BYTES):
                chunk = torch.empty(min(MESSAGE_BYTES, sizes[peer] - start), dtype=torch.uint8)
                dist.recv(chunk, peer, group=self._group)
                yield peer, chunk

    def separate(self) -> Control:
        """Make a control plane with a group of its own, to exchange values in another thread.

        It lasts until :meth:`leave`.
        """
        other = copy.copy(self)
        other._separated, other.sync_windows = [], None
        if self.world_size > 1:
            other._group = new_group_of_hosts()
            self._separated.append(other)
        other.log = CollectiveLog()
        other.log.explain = self.log.explain
        other.watchdog = Watchdog(other.log)
        return other

    def leave(self) -> None:
        """Take part in nothing more, and end the groups that were made by :meth:`separate`.

        All ranks have received everything that was sent there.
        """
        self.watchdog.leave()
        for other in self._separated:
            destroy(other._group)
            other._group = None
        self._separated = []

    def last_words(self, timeout: timedelta, words: str = "") -> list[str] | None:
        """Return every rank's ``words``, if all can be reached and call this within ``timeout``.

        Asked through the store: a collective that a rank never joins could not be given up.
        """
        board = self.board
        try:
            board.put("reached", words)
            if self.watchdog.has_given_up or not board.wait(
                timeout.total_seconds(),
                lambda: board.is_settled("lost") or board.get("reached"),
            ):
                board.settle("lost")
            found = None if board.is_settled("lost") else board.get("reached")
            if found is None:
                return None
            board.put("agreed")
            if self.rank == 0:  # whose end may be the end of the store in which others look
                board.wait(timeout.total_seconds(), lambda: board.get("agreed"))
        except RuntimeError:
            return None
        # What ended the run has left all of them able to end it together.
        self.watchdog.pardon()
        return found
