"""Weights that stay in a checkpoint, and are read by threads while other units compute."""

from __future__ import annotations

import functools
import itertools
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zero.comm import Arrived, Communicator, Shards, SyncPoint, agreed, require_room
from lightning_zero.parameters.buffer import Buffer
from lightning_zero.parameters.stores import HostStore, Store
from lightning_zero.plan import Layout, Plan
from lightning_zero.tensors import (
    BLOCK_BYTES,
    SECTOR,
    LentMemory,
    PartlyRead,
    Scratch,
    StagingMemory,
    UploadPart,
    Work,
    lasting_tensors,
)

NUM_THREADS = 2
_AT_ONCE_BYTES = BLOCK_BYTES
_MOST_FREE = 2
"""Free blocks kept for the next units: units of two sizes may alternate."""


class LentBuffer(Buffer):
    """A buffer on the host that borrows other memory for each use.

    From the first use whose views are kept, or that autograd sees, it has memory of its own: then
    views see the data of later uses, and hold no memory between uses.

    Args:
        behind_sector: The distance in bytes from the start of a sector to the borrowed memory.
    """

    def __init__(
        self, layout: Layout, dtype: torch.dtype, memory: LentMemory, behind_sector: int
    ) -> None:
        super().__init__(layout, dtype, torch.device("cpu"))
        self._layout, self._memory, self._behind_sector = layout, memory, behind_sector
        self._own = self.tensor, self.views
        self._may_be_lent = True

    @override
    def allocate(self) -> None:
        if self.tensor is not self._own[0]:
            return
        self._may_be_lent &= not torch.is_grad_enabled()
        if not self._may_be_lent:
            super().allocate()
            return
        with lasting_tensors():
            numel, dtype = self.tensor.numel(), self.tensor.dtype
            self.tensor = self._memory.lend(
                numel, dtype, _staging, behind_sector=self._behind_sector
            )
            self.views = self._views_of(self._layout, self.tensor)

    @override
    def release(self) -> None:
        self.tensor, self.views = self._own
        super().release()

    @override
    def stop_borrowing(self) -> bool:
        self._may_be_lent = False
        lent = self.tensor
        if lent is self._own[0]:
            return False
        self.tensor, self.views = self._own
        super().allocate()
        with lasting_tensors():
            self.tensor.copy_(lent)
        return True


def _staging(numel: int, dtype: torch.dtype) -> Tensor:
    # Direct I/O can write to it.
    return StagingMemory(numel * dtype.itemsize).tensor[: numel * dtype.itemsize].view(dtype)


class Reader:
    """Threads that read, and memory to read into.

    The threads are started when there is something to read.

    Attributes:
        memory: The memory of whole weights.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "lightning_zero.read")
        self.memory = LentMemory(most=_MOST_FREE)

    def start(self, unit: str, parts: Iterable[Callable[[], None]]) -> Reading:
        """Start to read ``parts`` of a unit's weights."""
        return Reading(unit, [self._threads.submit(part) for part in parts])

    def close(self) -> None:
        """End the threads, and free the memory that is not in use."""
        self._threads.shutdown()
        self.memory.close()


class Reading:
    """Parts of a unit's weights that are being read."""

    def __init__(self, unit: str, parts: Sequence[Future[None]]) -> None:
        self._unit = unit
        self._parts = parts

    def wait(self) -> None:
        """Wait for all parts.

        Raises:
            RuntimeError: One could not be read or is damaged.
        """
        wait(self._parts)  # all of them: if one has failed, the unit's memory is released
        for error in filter(None, (part.exception() for part in self._parts)):
            doing = f"Reading the weights of {self._unit}"
            raise RuntimeError(f"{doing} failed: {error}") from error


class Stream(Store):
    """A store of weights that rest in a checkpoint, without masters until :meth:`load_masters`.

    Every rank reads whole units, and nothing is sent: what one rank has read is in the page cache
    for the others on its host.

    Args:
        sources: The parameters in the checkpoint, in the order of the layout.
        reader: Reads them.
    """

    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        comm: Communicator,
        scratch: Scratch,
        sources: Sequence[PartlyRead],
        reader: Reader,
    ) -> None:
        pairs = zip(sources, layout.slots, strict=True)
        self._sources = [source.laid_out(slot.stride) for source, slot in pairs]
        self._reader = reader
        self._scratch = scratch
        for source in self._sources if comm.mesh.size == 1 else ():
            source.expect_passes()
        super().__init__(layout, plan, comm, scratch)
        self.is_stream = True
        self.gather_masters = self.gather_weights = self._read

    @override
    def _allocated(self, memory: Iterator[Shards]) -> Shards:
        """Return masters without memory, which read as NaN if the dtype has it."""
        with lasting_tensors():
            home = self.plan.master
            nothing = torch.zeros(1, dtype=home.dtype, device=home.device)
            if nothing.is_floating_point():
                nothing.fill_(torch.nan)
            return Shards(nothing.expand(self.layout.shard_numel))

    @abstractmethod
    def _read(self, out: Tensor, *, unit: str, tag: int) -> Work:
        """Start to read whole weights into ``out``."""

    def _parts_of(self, out: Tensor) -> Iterator[tuple[PartlyRead, int, Tensor]]:
        """Yield the parts in which ``out`` is read: the source, the first element, and the target.

        Parts that are contiguous in a file in the dtype of ``out`` end at sector boundaries.
        """
        size, dtype = out.element_size(), out.dtype
        at_once = _AT_ONCE_BYTES // size
        for source, slot in zip(self._sources, self.layout.slots, strict=True):
            ends = range(0)  # unchecked ones whole: a checksum may cover all of a source
            if source.is_checked:
                behind_sector = (source.offset(dtype) or 0) % SECTOR // size
                ends = range(at_once - behind_sector, slot.numel, at_once)
            for start, stop in itertools.pairwise((0, *ends, slot.numel)):
                if start < stop:
                    yield source, start, out[slot.offset + start : slot.offset + stop]

    def _read_part(
        self, source: PartlyRead, start: int, out: Tensor, *, checks: bool = True
    ) -> None:
        if checks:
            source.check()
        dtype, stored = self.plan.master.dtype, source.dtype
        if dtype in (stored, out.dtype):
            source.read_to(out, start)
            return
        with lasting_tensors():
            part = torch.empty(out.numel(), dtype=stored, device="cpu")
            source.read_to(part, start)
            out.copy_(part.to(dtype))

    @override
    def load_masters(self) -> bool:
        if not self.is_stream:
            return False
        control, rank = self.comm.control, self.comm.mesh.shard.rank
        nbytes = self.plan.master.dtype.itemsize * self.layout.shard_numel
        require_room(self._scratch, nbytes, control, "masters")
        masters = super()._allocated(self.comm.transport.share([self._extent]))
        with agreed(control, "Reading weights before changing them"):
            pieces = self.layout.pieces(rank)
            for source, (start, stop, in_shard) in zip(self._sources, pieces, strict=True):
                if start < stop:
                    self._read_part(source, start, masters.own[in_shard])
        self.comm.fence(SyncPoint.SETUP)
        self.is_stream, self._sources = False, []
        self._rest(masters)
        return True


class LentStream(Stream):
    """A stream to weights that are whole on the host: they are read to where they are used."""

    @override
    def weights(self) -> Buffer:
        dtype = self.plan.weight.dtype
        return LentBuffer(self.layout, dtype, self._reader.memory, self._behind_sector(dtype))

    def _behind_sector(self, dtype: torch.dtype) -> int:
        """Return the ``behind_sector`` that matches most bytes of the file: they need no copy."""
        nbytes: Counter[int] = Counter({0: 0})
        # After `load_masters` there are no sources, and nothing is read any more.
        for source, slot in zip(self._sources, self.layout.slots, strict=False):
            offset = source.offset(dtype)
            if offset is not None and offset % dtype.itemsize == 0:
                nbytes[(offset - slot.offset * dtype.itemsize) % SECTOR] += slot.numel
        return max(nbytes, key=nbytes.__getitem__)

    @override
    def _read(self, out: Tensor, *, unit: str, tag: int) -> Work:
        # Each thread takes the next part: to submit them one by one costs 2 % of the time.
        parts = iter(list(self._parts_of(out)))
        return self._reader.start(unit, [functools.partial(self._read_all, parts)] * NUM_THREADS)

    def _read_all(self, parts: Iterator[tuple[PartlyRead, int, Tensor]]) -> None:
        for part in parts:
            self._read_part(*part)


class HostStream(Stream, HostStore):
    """A stream to weights that are whole on a device: threads read them to host memory."""

    @override
    def _read(self, out: Tensor, *, unit: str, tag: int) -> Work:
        numel, at_once = sum(slot.numel for slot in self.layout.slots), _AT_ONCE_BYTES
        self.comm.transport.ledger.note(unit, "up", numel, out.element_size())
        at_once //= out.element_size()
        parts = (
            UploadPart(one, functools.partial(self._fill, source, start + n * at_once))
            for source, start, part in self._parts_of(out)
            for n, one in enumerate(torch.split(part, at_once))
        )
        what = f"Reading the weights of {unit}"
        return self.comm.host_copies.up_in_parts(what, parts, Arrived)

    def _fill(self, source: PartlyRead, start: int, out: Tensor) -> None:
        # The part that begins a source checks all of it, and is sent before the others.
        self._read_part(source, start, out, checks=not start)


def stream_for(plan: Plan) -> type[Stream]:
    """Return the class of stream for where a plan makes weights whole."""
    return HostStream if plan.rests_on_host else LentStream
