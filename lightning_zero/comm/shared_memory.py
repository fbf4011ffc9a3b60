"""The transport of ranks that share one host's CPUs: they read each other's memory.

A **window** is memory of this rank that its peers have mapped too: an anonymous kernel file
(``memfd_create``) or, for offload, an unnamed file on a disk. Both vanish with the last process
that maps them, however it ends. Peers open them through the owner's entry in ``/proc``.

Masters and reduce buffers live in windows. A gather is a copy out of the peers' masters, a
reduction a sum over the peers' buffers; only tokens of a few bytes are sent, which say where a
buffer is and that it is full. It is a faster way for the same data: what ranks must do together,
and in one order, is the same as with messages.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Iterable, Sequence
from itertools import count
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_zero.comm.control import Control, Pending, SyncPoint
from lightning_zero.comm.mesh import Axis
from lightning_zero.comm.transport import (
    Extent,
    ReduceBuffer,
    Shards,
    Transport,
    copy,
    gradients_of,
    sum_into,
    weights_of,
)
from lightning_zero.plan import Slot
from lightning_zero.tensors import Scratch, Work, lasting_tensors

_NAME = "lightning_zero"
_serials = count()


class Address(NamedTuple):
    """A window's place on this host, with a serial number that makes it unique."""

    process: int
    file: int
    inode: int
    capacity: int
    serial: int


class Window(ReduceBuffer):
    """Memory that its owner and others have mapped.

    Attributes:
        address: What others need to :meth:`open` it.
        readers: How many publications each rank has read, ``[world_size]``; in the window too.
        num_published: How often the owner has published its content.
        touched_bytes: End of the range that views have covered, in bytes.
        tensor: What the owner fills: a unit's unreduced gradients.
    """

    def __init__(self, address: Address, world_size: int, *, is_own: bool) -> None:
        path = f"/proc/{address.process}/fd/{address.file}"
        self._size = address.capacity + 8 * world_size
        if not _is_there(path, address.inode, self._size):
            raise RuntimeError(
                f"No shared-memory window at {path}: its owner is on another host or has exited."
            )
        self.address = address
        self.num_published = 0
        self.touched_bytes = 0
        # The slots that the owner filled last, and a view of each.
        self._used_for: tuple[Sequence[Slot], list[Tensor]] = ((), [])
        self._is_own = is_own
        with lasting_tensors():
            self._memory = torch.from_file(path, shared=True, size=self._size, dtype=torch.uint8)
            self.readers = self._memory[address.capacity :].view(torch.int64)
        super().__init__(self._memory)
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    @classmethod
    def create(cls, capacity: int, world_size: int, scratch: Scratch | None = None) -> Window:
        """Make a window of ``capacity`` zero bytes (a multiple of 8), in memory or in a file."""
        size = capacity + 8 * world_size
        if scratch is None:
            file = os.memfd_create(_NAME)
            os.ftruncate(file, size)
        else:
            file = scratch.file(size)
        inode = os.fstat(file).st_ino
        address = Address(os.getpid(), file, inode, capacity, next(_serials))
        return cls(address, world_size, is_own=True)

    @classmethod
    def open(cls, address: Address, world_size: int) -> Window:
        """Map another process's window.

        Raises:
            DistError: The owner is on another host or has ended, or its memory may not be opened
                from here.
        """
        try:
            return cls(address, world_size, is_own=False)
        except (OSError, RuntimeError) as error:
            raise dist.DistError(str(error)) from error

    def __del__(self) -> None:
        # Peers that map it keep their mapping; new ones can no longer open it.
        if getattr(self, "_is_own", False):
            os.close(self.address.file)

    def view(self, numel: int, dtype: torch.dtype, *, start: int = 0) -> Tensor:
        """Return ``numel`` elements from ``start`` on; the same tensor for the same arguments."""
        view = self._views.get((start, numel, dtype))
        if view is None:
            first, stop = start * dtype.itemsize, (start + numel) * dtype.itemsize
            self.touched_bytes = max(self.touched_bytes, stop)
            with lasting_tensors():
                view = self._memory[first:stop].view(dtype)
            self._views[start, numel, dtype] = view
        return view

    @override
    def views_of(self, slots: Sequence[Slot]) -> tuple[list[Tensor], bool]:
        is_same = self._used_for[0] is slots
        if not is_same:
            self._used_for = slots, super().views_of(slots)[0]
        return self._used_for[1], is_same

    def is_read_by_all(self, owner: int) -> bool:
        """Return whether every rank but ``owner`` has read all publications."""
        readers = self.readers.tolist()
        del readers[owner]
        return readers.count(self.num_published) == len(readers)


def _is_there(path: str, inode: int, size: int) -> bool:
    """Return whether this is the intended file: a process id of another host may match any here."""
    try:
        found = os.stat(path)
        return (found.st_ino, found.st_size) == (inode, size)
    except OSError:
        return False


WINDOWS_AT_ONCE = 128


class SharedMemory(Transport):
    """A transport that reads shared memory; data outside of it is sent as messages.

    Windows for reductions all have the largest capacity requested so far: untouched pages cost
    nothing.
    """

    reads_peers: ClassVar[bool] = True
    has_tags: ClassVar[bool] = False

    def __init__(self, control: Control, axis: Axis, device: torch.device) -> None:
        super().__init__(control, axis, device)
        # This rank's windows whose reduction is over; a peer may still read them.
        self._free: list[Window] = []
        self._peers: dict[Address, Window] = {}
        # Those that were read before the last step ended, and since.
        self._read: tuple[set[Address], set[Address]] = set(), set()
        self._capacity = 0

    @classmethod
    def can_see_peers(cls, control: Control, axis: Axis) -> bool:
        """Return whether every rank can map every other rank's memory; a collective."""
        has_windows = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
        window = Window.create(8, axis.size) if has_windows else None
        if window is not None:
            window.view(1, torch.int64).fill_(axis.rank + 1)
        addresses = control.gather_objects(window and window.address)
        found = [address for rank in axis.ranks if (address := addresses[rank]) is not None]
        try:
            seen = [int(Window.open(each, axis.size).view(1, torch.int64)) for each in found]
        except (OSError, RuntimeError):
            seen = []
        return all(control.gather_objects(seen == [*range(1, axis.size + 1)]))

    @override
    def share(self, extents: Iterable[Extent]) -> Generator[Shards, None, None]:
        """Yield memory for masters and views of every rank's; one message has many addresses.

        Windows take memory only when they are written to, so many are made at once. Each is an open
        file until peers have opened it, and a process may have only a thousand of those.
        """
        missing = iter(extents)
        while portion := list(itertools.islice(missing, WINDOWS_AT_ONCE)):
            yield from self._share(portion)

    def _share(self, extents: Sequence[Extent]) -> Generator[Shards, None, None]:
        own = [Window.create(n * dtype.itemsize, self.size, files) for n, dtype, files in extents]
        addresses = self.control.gather_objects([window.address for window in own])
        of_ranks = [
            own if rank == self.control.rank else self._open(addresses[rank])
            for rank in self.axis.ranks
        ]
        self.control.call(SyncPoint.SETUP).wait()
        for (numel, dtype, _), *windows in zip(extents, *of_ranks, strict=True):
            views = [window.view(numel, dtype) for window in windows]
            yield Shards(views[self.axis.rank], views)

    def _open(self, addresses: Sequence[Address]) -> list[Window]:
        with self.watchdog.explained():
            return [Window.open(address, self.size) for address in addresses]

    @override
    def gather(self, out: Tensor, source: Shards, *, unit: str, tag: int) -> Work:
        if source.of_ranks is None:
            return super().gather(out, source, unit=unit, tag=tag)
        self._note(unit, "gather", source.own.numel(), out.dtype)
        # No rank waits for another here, so sync points compare what all have gathered.
        self.watchdog.events.append(weights_of(unit))
        for part, shard in zip(out.chunk(self.size), source.of_ranks, strict=True):
            copy(part, shard)
        return Pending()

    @override
    def reduce_buffer(self, numel: int, dtype: torch.dtype) -> ReduceBuffer:
        window = self._take(numel * dtype.itemsize)
        window.tensor = window.view(numel, dtype)
        return window

    def _take(self, nbytes: int) -> Window:
        """Return a window that no peer still reads."""
        self._capacity = max(self._capacity, nbytes)
        for window in self._free:
            if window.address.capacity == self._capacity and window.is_read_by_all(self.rank):
                self._free.remove(window)
                return window
        # Never wait for a reader here: it may itself be waiting for this rank.
        return Window.create(self._capacity, self.size)

    def _of_peer(self, address: Address) -> Window:
        """Return a peer's window, mapped on first use."""
        if address not in self._peers:
            (self._peers[address],) = self._open([address])
        self._read[1].add(address)
        return self._peers[address]

    @override
    def reduce(self, out: Tensor, source: ReduceBuffer, *, unit: str, tag: int) -> Work:
        """Send peers the buffer's address; sum over their buffers once these are full."""
        assert isinstance(source, Window)
        own, dtype, part = source, source.tensor.dtype, out.numel()
        self._note(unit, "reduce", part, dtype)
        own.num_published += 1
        mine = torch.tensor([*own.address, own.num_published], device="cpu")
        theirs = {peer: torch.empty_like(mine) for peer in self.sources}

        def add_up() -> None:
            tokens = {peer: box.tolist() for peer, box in theirs.items()}
            windows = {peer: self._of_peer(Address(*t[:-1])) for peer, t in tokens.items()}
            summands = [
                windows.get(rank, own).view(part, dtype, start=self.rank * part)
                for rank in range(self.size)
            ]
            sum_into(out, summands)
            for peer, window in windows.items():
                window.readers[self.rank] = tokens[peer][-1]
            self._free.append(own)

        sends = dict.fromkeys(self.targets, mine)
        return self._send(gradients_of(unit), theirs, sends, 4 * tag + 2, then=add_up)

    @override
    def drop_outgrown(self) -> None:
        """Drop windows that have become too small, and peers' that were not read for two steps.

        Call it after a fence, when all are read. The others stay: fresh pages from the system cost
        ten times what it costs to fill them. A peer may have dropped its own, for instance with a
        backward pass that an exception ended.
        """
        self._free = [w for w in self._free if w.address.capacity == self._capacity]
        self._peers = {
            address: window
            for address, window in self._peers.items()
            if address.capacity == self._capacity and address in self._read[0] | self._read[1]
        }
        self._read = self._read[1], set()

    @override
    def release(self) -> None:
        """Drop all reduce buffers, the peers' too; memory is freed once all ranks have."""
        self._free, self._peers = [], {}

    @property
    @override
    def scratch_bytes(self) -> int:
        return super().scratch_bytes + sum(window.touched_bytes for window in self._free)
