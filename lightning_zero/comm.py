"""The wires: two collectives that carry weights and gradients, and a few small ones around them.

A flat buffer moves from a placement to another; the pair picks the collective:

    ===========  ==========  =====================================================
    from         to          collective
    ===========  ==========  =====================================================
    SHARDED      REPLICATED  ``gather``, in place: shards land where they lie
    PARTIAL      SHARDED     ``reduce``, a sum in the order of the ranks
    ===========  ==========  =====================================================

Only this room knows one backend from another. There are three ways, chosen once:

* **windows**, when all ranks are on one host's CPUs: they read each other's memory.
* **point to point**, for gloo between hosts: torch's gloo reduce-scatter sends the whole buffer and
  its all-gather copies twice, while messages that land in place take a quarter to a half of the
  time (64 MiB, two ranks, torch 2.13: 15 against 65 ms, and 21 against 47 ms of an all-reduce).
  Every message carries the unit's number as its tag, so two ranks that disagree about the order of
  units never mix their data.
* the backend's own collectives, for NCCL and all others.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from math import inf, nan
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.buffer import lasting_tensors
from lightning_zero.ledger import Ledger
from lightning_zero.meeting import Meetings, Subject, channel, group_of_hosts, new_group
from lightning_zero.watch import Meeting, Watch
from lightning_zero.window import Address, Window, are_supported

_numbers = itertools.count()
_stores: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
# torch 2.13 renamed the two and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

MESSAGE_BYTES = 16 * 2**20
"""The most that ``collect`` holds at a time."""


class Work(Protocol):
    """Something on its way; ``wait`` may be called once or never."""

    def wait(self) -> Any:
        """Return when its result may be used on the current stream."""


class _Arrived:
    """Nothing to wait for."""

    def wait(self) -> None: ...


class _Pending:
    """Works on their way to a meeting, and what to do when they have arrived."""

    def __init__(
        self,
        watch: Watch,
        meeting: Meeting,
        works: Sequence[Work],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._watch = watch
        self._meeting = meeting
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        with self._watch.waiting(self._meeting):
            for work in self._works:
                work.wait()
        if self._finish is not None:
            self._finish()


class Shared(NamedTuple):
    """This rank's master shard and, where peers can be read, everybody's."""

    own: Tensor
    everybodys: list[Tensor] | None = None

    def sharded(self, world_size: int, rank: int) -> Shared:
        """The shards in what was shared whole: each rank's own part of its own."""
        shards = None
        if self.everybodys is not None:
            shards = [whole.view(world_size, -1)[r] for r, whole in enumerate(self.everybodys)]
        return Shared(self.own.view(world_size, -1)[rank], shards)


class ReduceBuffer(NamedTuple):
    """A unit's unreduced gradients, ``[world_size * n]``; in a window if peers read it."""

    tensor: Tensor
    window: Window | None = None


class Comm:
    """This process among the ranks that share one model.

    Attributes:
        rank: This process's number in the group.
        world_size: Number of ranks.
        ledger: What this rank has sent.
        meetings: Where the ranks take decisions together.
        watch: Finds out when ranks wait for each other in different places.
    """

    def __init__(
        self, device: torch.device, *, direct: bool | None = None, windows: bool | None = None
    ) -> None:
        self.device = device
        self.ledger = Ledger()
        self.rank, self.world_size = 0, 1
        self.watch = Watch()
        self.meetings = Meetings(0, 1, self.watch)
        self._number = next(_numbers)
        self._control: Any = None
        self._gather_group: Any = None
        self._reduce_group: Any = None
        self._direct = True
        self._has_windows = False
        self._scratch: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._free_windows: list[Window] = []
        self._peer_windows: dict[Address, Window] = {}
        self._capacity = 0
        self._lent_bytes = 0
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            on_gloo = dist.get_backend() == "gloo"
            self._direct = on_gloo if direct is None else direct
            if not on_gloo:
                # Small decisions travel between the hosts, so that they never stall the device.
                self._control = group_of_hosts()
            if not self._direct:
                # One communicator each, or a prefetch would queue behind a reduction.
                self._gather_group, self._reduce_group = new_group(), new_group()
            may_share = self._direct and device.type == "cpu" and self.world_size > 1
            if self.world_size > 1:
                if dist.get_backend() != "fake":
                    self.watch = self._start_watch()
                self.meetings = Meetings(self.rank, self.world_size, self.watch)
            if may_share and windows is not False:
                self._has_windows = self._can_see_peers()

    def _start_watch(self) -> Watch:
        return Watch(
            self.rank,
            self.world_size,
            store=_own_store(),
            prefix=f"lightning_zero/watch/{self._number}",
            give_up=functools.partial(_give_up, weakref.ref(self)),
        )

    @property
    def gathers_together(self) -> bool:
        """Whether a gather needs every rank to take part."""
        return self.world_size > 1 and not self._has_windows

    @property
    def shares_memory(self) -> bool:
        """Whether ranks read each other's masters and reduce buffers."""
        return self._has_windows

    @property
    def gathers_in_order(self) -> bool:
        """Whether nothing but the order of gathers tells one unit's weights from another's."""
        return self.world_size > 1 and not self._direct

    @property
    def sent(self) -> Counter[tuple[str, str]]:
        """Elements that this rank has sent since the start, by unit and verb."""
        return Counter({key: sent.elements for key, sent in self.ledger.total.items()})

    def _can_see_peers(self) -> bool:
        """Whether every rank can map every other's memory."""
        sees_all = are_supported()
        window = Window.create(8, self.world_size) if sees_all else None
        if window is not None:
            window.view(1, torch.int64).fill_(self.rank + 1)
        for rank, address in enumerate(self.gather_objects(window and window.address)):
            sees_all = sees_all and address is not None
            try:
                seen = Window.open(address, self.world_size).view(1, torch.int64) if sees_all else 0
                sees_all = sees_all and int(seen) == rank + 1
            except (OSError, RuntimeError):
                sees_all = False
        return all(self.gather_objects(sees_all))

    # -- memory that peers read ------------------------------------------------------------------

    def share(self, numel: int, dtype: torch.dtype) -> Shared:
        """Memory for a master; with windows, a view of every rank's too. A collective."""
        if not self._has_windows:
            with lasting_tensors():
                return Shared(torch.empty(numel, dtype=dtype, device=self.device))
        window = Window.create(numel * dtype.itemsize, self.world_size)
        everybodys = [
            (window if rank == self.rank else Window.open(address, self.world_size))
            for rank, address in enumerate(self.gather_objects(window.address))
        ]
        self.fence(Subject.SETUP)
        return Shared(window.view(numel, dtype), [peer.view(numel, dtype) for peer in everybodys])

    def fence(self, subject: Subject) -> None:
        """Wait until every rank is here, if ranks read each other's memory.

        Whoever changes a master stands between two fences: before the first all have read the old
        values, after the second all may read the new ones.
        """
        if self._has_windows:
            self.meetings.call(subject).wait()

    # -- weights and gradients -------------------------------------------------------------------

    def gather(self, whole: Tensor, shard: Shared, *, unit: str, tag: int) -> Work:
        """Start to fill ``whole`` (``[world_size * n]``) from every rank's ``shard`` (``[n]``).

        Dtypes may differ: masters are cast on the way.
        """
        self._note(unit, "gather", whole)
        parts = whole.view(self.world_size, -1)
        if shard.everybodys is not None:
            for part, source in zip(parts, shard.everybodys, strict=True):
                if part.data_ptr() != source.data_ptr():
                    _copy(part, source)
            return _Arrived()
        own = parts[self.rank]
        if own.data_ptr() != shard.own.data_ptr():
            _copy(own, shard.own)
        meeting = self._begin(f"the weights of {unit}", "gather")
        if not self._direct:
            # Here nothing but the order tells one unit from another.
            self.meetings.note(meeting.place)
            work = _all_gather(whole, own, group=self._gather_group, async_op=True)
            return _Pending(self.watch, meeting, [work])
        if not whole.numel():
            return _Arrived()
        receives = [dist.irecv(parts[peer], peer, tag=4 * tag) for peer in self._sources()]
        sends = [dist.isend(own, peer, tag=4 * tag) for peer in self._targets()]
        return _Pending(self.watch, meeting, _started(receives, sends))

    def reduce_buffer(self, numel: int, dtype: torch.dtype) -> ReduceBuffer:
        """Memory for a unit's gradients before their reduction; its content is undefined."""
        if not self._has_windows:
            with lasting_tensors():
                return ReduceBuffer(torch.empty(numel, dtype=dtype, device=self.device))
        # One size for all, the largest seen: pages that nobody touches cost nothing.
        self._capacity = max(self._capacity, numel * dtype.itemsize)
        for window in self._free_windows:
            if window.capacity == self._capacity and window.is_read_by_all(self.rank):
                self._free_windows.remove(window)
                return ReduceBuffer(window.view(numel, dtype), window)
        # Never wait for a reader here: it may be a rank that itself waits for us.
        window = Window.create(self._capacity, self.world_size)
        return ReduceBuffer(window.view(numel, dtype), window)

    def reduce(self, partial: ReduceBuffer, out: Tensor, *, unit: str, tag: int) -> Work:
        """Start to write the sum of all ranks' summands of this rank's shard to ``out`` (``[n]``).

        ``partial`` (``[world_size * n]``) is given up; ``out`` may have another dtype.
        """
        self._note(unit, "reduce", partial.tensor)
        meeting = self._begin(f"the gradients of {unit}", "reduce")
        if partial.window is not None:
            return self._reduce_by_windows(partial, out, tag, meeting)
        if not self._direct:
            return self._reduce_by_backend(partial.tensor, out, meeting)
        parts = list(partial.tensor.view(self.world_size, -1))
        own = parts[self.rank]
        if not own.numel():
            return _Arrived()
        inbox = {peer: self._borrow(own) for peer in self._sources()}
        receives = [dist.irecv(box, peer, tag=4 * tag + 1) for peer, box in inbox.items()]
        sends = [dist.isend(parts[peer], peer, tag=4 * tag + 1) for peer in self._targets()]

        def add_up() -> None:
            # In the order of the ranks, so that every stage and every rank gets the same bits.
            _sum_into(out, [inbox.get(rank, own) for rank in range(self.world_size)])
            for box in inbox.values():
                self._give_back(box)

        return _Pending(self.watch, meeting, _started(receives, sends), add_up)

    def _reduce_by_windows(
        self, partial: ReduceBuffer, out: Tensor, tag: int, meeting: Meeting
    ) -> Work:
        """Tell peers where the buffer is; when theirs are full, sum over them and say so."""
        own, numel, dtype = partial.window, partial.tensor.numel(), partial.tensor.dtype
        assert own is not None
        own.num_published += 1
        mine = torch.tensor([*own.address, own.num_published], device="cpu")
        theirs = {peer: torch.empty_like(mine) for peer in self._sources()}
        receives = [dist.irecv(box, peer, tag=4 * tag + 2) for peer, box in theirs.items()]
        sends = [dist.isend(mine, peer, tag=4 * tag + 2) for peer in self._targets()]

        def add_up() -> None:
            tokens = {peer: box.tolist() for peer, box in theirs.items()}
            windows = {peer: self._peer_window(Address(*t[:-1])) for peer, t in tokens.items()}
            summands = [
                windows.get(rank, own).view(numel, dtype).view(self.world_size, -1)[self.rank]
                for rank in range(self.world_size)
            ]
            _sum_into(out, summands)
            for peer, window in windows.items():
                window.readers[self.rank] = tokens[peer][-1]
            self._free_windows.append(own)

        return _Pending(self.watch, meeting, _started(receives, sends), add_up)

    def _peer_window(self, address: Address) -> Window:
        if address not in self._peer_windows:
            self._peer_windows[address] = Window.open(address, self.world_size)
        return self._peer_windows[address]

    def _begin(self, place: str, verb: str) -> Meeting:
        # The backend's collectives have no names; point to point the unit's number is one.
        return self.watch.begin(place, "" if self._direct else verb)

    def _note(self, unit: str, verb: str, whole: Tensor) -> None:
        numel = whole.numel() // self.world_size * (self.world_size - 1)
        self.ledger.note(unit, verb, numel, whole.element_size())

    def _reduce_by_backend(self, buffer: Tensor, out: Tensor, meeting: Meeting) -> Work:
        if out.dtype == buffer.dtype:
            work = _reduce_scatter(out, buffer, group=self._reduce_group, async_op=True)
            return _Pending(self.watch, meeting, [work])
        landing = buffer.new_empty(out.shape)
        work = _reduce_scatter(landing, buffer, group=self._reduce_group, async_op=True)
        return _Pending(self.watch, meeting, [work], lambda: _copy(out, landing))

    def _sources(self) -> list[int]:
        return [(self.rank - step) % self.world_size for step in range(1, self.world_size)]

    def _targets(self) -> list[int]:
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def _borrow(self, like: Tensor) -> Tensor:
        self._lent_bytes += like.nbytes
        free = self._scratch.get((like.numel(), like.dtype))
        return free.pop() if free else torch.empty_like(like)

    def _give_back(self, scratch: Tensor) -> None:
        self._lent_bytes -= scratch.nbytes
        self._scratch.setdefault((scratch.numel(), scratch.dtype), []).append(scratch)

    def drop_outgrown_windows(self) -> None:
        """Free reduce buffers that a larger unit outgrew; behind a fence, when all are read.

        The others stay from step to step: to take fresh pages from the system costs ten times what
        it costs to fill them.
        """
        self._free_windows = [w for w in self._free_windows if w.capacity == self._capacity]
        self._peer_windows = {
            address: window
            for address, window in self._peer_windows.items()
            if address.capacity == self._capacity
        }

    def release_windows(self) -> None:
        """Let go of all reduce buffers, the peers' too; memory is freed when the last rank does."""
        self._free_windows, self._peer_windows = [], {}

    def release_scratch(self) -> None:
        """Free the receive buffers that a backward pass reused."""
        self._scratch.clear()
        self._lent_bytes = 0

    @property
    def scratch_bytes(self) -> int:
        """Bytes of receive and reduce buffers, in use or kept for reuse."""
        boxes = sum(tensor.nbytes for free in self._scratch.values() for tensor in free)
        return boxes + self._lent_bytes + self.window_bytes

    @property
    def window_bytes(self) -> int:
        """Bytes of reduce buffers that peers can read, kept for reuse."""
        return sum(window.touched_bytes for window in self._free_windows)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with rank 0's."""
        if self.world_size > 1:
            with self.watch.at("a broadcast of rank 0's values"):
                dist.broadcast(tensor, 0)

    def sum(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over the ranks."""
        if self.world_size > 1:
            with self.watch.at("a sum over the ranks"):
                dist.all_reduce(tensor)

    def max(self, tensor: Tensor) -> None:
        """Replace the floating ``tensor`` by its maximum over the ranks, NaN if one has NaN."""
        if self.world_size > 1:
            # Gloo's maximum forgets a NaN that does not come first, so it travels as a number.
            is_nan = tensor.isnan()
            both = torch.stack([is_nan.to(tensor.dtype), tensor.masked_fill(is_nan, -inf)])
            with self.watch.at("a maximum over the ranks"):
                dist.all_reduce(both, dist.ReduceOp.MAX)
            tensor.copy_(both[1].masked_fill(both[0] > 0, nan))

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        with self.watch.at("a broadcast of rank 0's values"):
            dist.broadcast_object_list(box, 0, group=self._control)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in the order of the ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self.watch.at("an exchange of values"):
            dist.all_gather_object(values, value, group=self._control)
        return values

    def collect(self, part: Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Bring every rank's bytes to rank 0, one message at a time.

        Args:
            part: This rank's bytes ``[n]``, on any device.
            sizes: How many bytes each rank has.

        Yields:
            On rank 0 ``(peer, bytes)`` in the order of the ranks; the bytes are overwritten by the
            next ones. Nothing on other ranks.
        """
        with self.watch.busy():
            yield from self._collect(part, sizes)

    def _collect(self, part: Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        if self.rank:
            for chunk in torch.split(part, MESSAGE_BYTES) if part.numel() else ():
                dist.send(chunk.to("cpu"), 0, group=self._control)
            return
        yield from ((0, chunk) for chunk in torch.split(part, MESSAGE_BYTES) if part.numel())
        for peer in range(1, self.world_size):
            for start in range(0, sizes[peer], MESSAGE_BYTES):
                chunk = torch.empty(min(MESSAGE_BYTES, sizes[peer] - start), dtype=torch.uint8)
                dist.recv(chunk, peer, group=self._control)
                yield peer, chunk

    def apart(self) -> Comm:
        """The same ranks on a channel of its own, for small talk in another thread."""
        other = copy.copy(self)
        if self.world_size > 1:
            other._control = group_of_hosts()
        other.watch = Watch()
        return other

    def is_whole(self, timeout: timedelta) -> bool:
        """Whether every rank is still here and calls this too, within ``timeout``.

        Asked through the store: a collective that a rank never joins could not be given up.
        """
        if self.world_size == 1:
            return True
        if self.watch.verdict:
            return False
        store = _default_store()
        keys = [f"lightning_zero/{self._number}/{rank}" for rank in range(self.world_size)]
        try:
            store.set(keys[self.rank], "here")
            store.wait(keys, timeout)
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                store.delete_key(keys[self.rank])
            return False
        return True


def _own_store() -> Any:
    """A connection of its own to the store: one that a rank waits on answers nobody else."""
    world = dist.group.WORLD
    if world not in _stores:
        store = _default_store()
        _stores[world] = store.clone() if hasattr(store, "clone") else store
    return _stores[world]


def _default_store() -> Any:
    # Private, but torch has no public way to the store that it was started with.
    return dist.distributed_c10d._get_default_store()


def _give_up(reference: weakref.ref[Comm]) -> None:
    """Make whatever waits in one of the groups raise; they are of no use afterwards.

    A message that nobody sends, waited for so shortly, makes gloo close all connections of its
    group. (Its `abort` does nothing.)
    """
    comm = reference()
    if comm is None or not dist.is_initialized():
        return
    peer = (comm.rank + 1) % comm.world_size
    own = [comm._control, comm._gather_group, comm._reduce_group]
    for group in {id(group): group for group in (dist.group.WORLD, channel(), *own)}.values():
        if group is None:
            continue
        with contextlib.suppress(RuntimeError):
            if dist.get_backend(group) == "gloo":
                nobody = dist.irecv(torch.empty(1, device="cpu"), peer, group=group, tag=2**20)
                assert nobody is not None
                nobody.wait(timedelta(milliseconds=1))
            else:
                group.abort()


def _started(*works: Sequence[Work | None]) -> list[Work]:
    return [work for group in works for work in group if work is not None]


@torch.no_grad()
def _sum_into(out: Tensor, summands: list[Tensor]) -> None:
    first, *rest = summands
    if rest and first.dtype == out.dtype:
        torch.add(first, rest.pop(0), out=out)
    else:
        out.copy_(first)
    for summand in rest:
        out.add_(summand)


@torch.no_grad()
def _copy(out: Tensor, source: Tensor) -> None:
    out.copy_(source)
