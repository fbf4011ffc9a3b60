"""A device beside its host, on a machine that has none.

    with beside_the_host() as device:
        ...                                # under offload to "cpu"
    assert device.crossed == {"up": ..., "down": ...}

All operations run at once, and the numbers are right. What is followed is when they could have run:
the host is infinitely far ahead, and an operation on one stream comes after one on another only
where an event, a collective's work or a wait of the host says so (clocks of all streams, as in
torch.cuda._sanitizer). An AssertionError names both operations and their lines where

- one reads what another has yet to write, or writes what another has yet to read or write;
- memory is freed that another stream may still use, as the allocator hands it out again at once on
  the stream where it was made; new memory is filled with NaN;
- tensors of host and device meet in one operation that is no copy.

Everything is the device's that `HostCopies`, `Scratch` and staging have not allocated, and that is
neither made in a step on the host nor sent between hosts. Threads that fill pinned memory for
uploads do so when they are waited for. Single numbers take memory, but are not followed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.comm import communicator, control, transport
from lightning_zero.optimizer import UnitStep
from lightning_zero.plan import Offload
from lightning_zero.tensors import (
    HostCopies,
    Scratch,
    StagedFile,
    StagingMemory,
    internals,
    transfers,
)

aten = torch.ops.aten
_COPIES = {aten.copy_.default, aten._to_copy.default}
_READ_BY_HOST = {aten.equal.default, aten._local_scalar_dense.default, aten.nonzero.default}
_NEW = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default}
_NEW |= {aten.new_empty.default, aten.new_empty_strided.default}
Clock = dict[str, int]


class Access(NamedTuple):
    """A read or write of bytes ``[start, stop)`` by somebody at a time of theirs."""

    who: str
    time: int
    start: int
    stop: int
    what: str
    writes: bool

    def is_before(self, clock: Clock) -> bool:
        return self.time <= clock.get(self.who, 0)

    def covers(self, old: Access) -> bool:
        """Return whether nobody need ask for an earlier access any more."""
        is_inside = self.start <= old.start and old.stop <= self.stop
        return is_inside and (self.writes or (not old.writes and old.who == self.who))


class Memory:
    """A block of memory.

    Attributes:
        kind: "device", "pinned" or "pageable".
        stream: The stream on which it was allocated.
    """

    def __init__(self, kind: str, nbytes: int, stream: Actor) -> None:
        self.kind, self.nbytes, self.stream = kind, nbytes, stream
        self.accesses: list[Access] = []

    def note(self, new: Access, clock: Clock) -> str:
        """Note an access; return what is wrong with it, if anything."""
        for old in self.accesses:
            meets = old.start < new.stop and new.start < old.stop
            if meets and (old.writes or new.writes) and not old.is_before(clock):
                verb = "overwrites" if new.writes else "reads"
                end = "written" if old.writes else "read"
                return f"{new.what} {verb} what {old.what} may not have {end} yet"
        self.accesses = [old for old in self.accesses if not new.covers(old)] + [new]
        return ""

    def in_use(self, clock: Clock) -> str:
        """Return an access that need not be over by ``clock``."""
        return next((one.what for one in self.accesses if not one.is_before(clock)), "")


class Actor:
    """Whoever does one thing after the other: a stream, the host, or a thread of it."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name
        self.clock: Clock = {name: 0}
        self._outer: list[Actor] = []

    def tick(self) -> int:
        self.clock[self.name] += 1
        return self.clock[self.name]

    def learn(self, clock: Clock) -> None:
        for name, time in clock.items():
            self.clock[name] = max(time, self.clock.get(name, 0))

    def is_behind(self, clock: Clock) -> bool:
        return any(self.clock.get(name, 0) < time for name, time in clock.items())

    # -- as a torch.Stream -----------------------------------------------------------------------

    def __enter__(self) -> Actor:
        self._outer.append(self.device.current)
        self.device.current = self
        return self

    def __exit__(self, *_: Any) -> None:
        self.device.current = self._outer.pop()

    def record_event(self) -> Event:
        self.learn(self.device.host.clock)
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.learn(event.clock)

    def wait_stream(self, stream: Actor) -> None:
        self.wait_event(stream.record_event())


class Event:
    """What a stream has done, and knows to be done, at a place in its work."""

    def __init__(self, stream: Actor) -> None:
        self._device, self.clock = stream.device, {**stream.clock}

    def query(self) -> bool:
        return not self._device.host.is_behind(self.clock)

    def synchronize(self) -> None:
        self._device.host_waits_for(self.clock)


class Done(NamedTuple):
    """Something that a stream does: a kernel, a copy, a collective."""

    kind: str
    who: str
    time: int
    clock: Clock
    nbytes: int

    def may_run_beside(self, other: Done) -> bool:
        is_after = other.time <= self.clock.get(other.who, 0)
        return not is_after and not self.time <= other.clock.get(self.who, 0)


class Device(TorchDispatchMode):
    """The memories, streams and clocks.

    Attributes:
        crossed: The bytes that were copied since :meth:`restart`, "up" and "down".
        waits: How often the host has waited for the device, by place.
        live: Bytes of the device's memory in use now.
        peak: The most of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host = self.running = Actor(self, "the host")
        self.current = self.computation = Actor(self, "computation")
        self._numbers = itertools.count(1)
        self._groups: dict[Any, Actor] = {}
        self._memories = WeakIdKeyDictionary()  # by storage
        self._on_host: dict[int, Memory] = {}  # by address
        self.violations: list[str] = []
        self.new = "device"  # the kind of what is made of nothing
        self.live = self.peak = 0
        self.crossed: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.done: list[Done] = []

    def restart(self) -> None:
        """Count from now on."""
        self.crossed.clear()
        self.waits.clear()
        self.done.clear()
        self.peak = self.live

    def stream(self, *_: Any) -> Actor:
        """Make another stream; host_copies makes that down first."""
        return Actor(self, f"stream {next(self._numbers)}")

    def current_stream(self, *_: Any) -> Actor:
        return self.current

    def host_waits_for(self, clock: Clock) -> None:
        if self.running.is_behind(clock):
            if self.running is self.host:
                self.waits[_place()] += 1
            self.running.learn(clock)

    def overlapped(self, kind: str, beside: str = "kernel") -> float:
        """Return the share of the bytes of a kind that may travel beside another."""
        others = [one for one in self.done if one.kind == beside]
        own = [one for one in self.done if one.kind == kind]
        hidden = sum(o.nbytes for o in own if any(o.may_run_beside(other) for other in others))
        return hidden / max(1, sum(one.nbytes for one in own))

    # -- memory ----------------------------------------------------------------------------------

    def paint(self, tensor: Tensor, kind: str) -> Tensor:
        """Let a tensor's storage be in the host's memory."""
        storage = tensor.untyped_storage()
        if (found := self._memories.pop(storage, None)) is not None:
            self.live -= found.nbytes
            found.nbytes = 0
        if storage.nbytes():
            place, memory = storage.data_ptr(), Memory(kind, storage.nbytes(), self.current)
            self._on_host[place] = memory
            weakref.finalize(storage, self._leave_host, place, memory).atexit = False
        return tensor

    def is_on_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._on_host

    def _leave_host(self, place: int, memory: Memory) -> None:
        if self._on_host.get(place) is memory:
            del self._on_host[place]

    def memory_of(self, tensor: Tensor) -> tuple[Memory, int, int]:
        """Return a tensor's memory, and the bytes of it that it spans."""
        with internals.as_plain_tensors():
            first = tensor.storage_offset() * tensor.itemsize
            strides = zip(tensor.shape, tensor.stride(), strict=True)
            reach = sum((size - 1) * stride for size, stride in strides) + 1
            span = first, first + reach * tensor.itemsize
            storage = tensor.untyped_storage()
            if (found := self._memories.get(storage)) is not None:
                return found, *span
            address = storage.data_ptr() if not tensor.is_meta else 0
            for place, memory in self._on_host.items():
                if place <= address < place + memory.nbytes:
                    return memory, span[0] + address - place, span[1] + address - place
            if self.running is not self.host and not tensor.is_meta:
                self.paint(tensor, "pageable")  # a thread's
                return self.memory_of(tensor)
            return self._track(storage), *span

    def kind(self, tensor: Tensor) -> str:
        return self.memory_of(tensor)[0].kind

    def _track(self, storage: Any) -> Memory:
        memory = self._memories[storage] = Memory("device", 0, self.current)
        weakref.finalize(storage, self._resize, memory, 0).atexit = False
        self._resize(memory, storage.nbytes())
        return memory

    def _resize(self, memory: Memory, nbytes: int) -> None:
        if nbytes < memory.nbytes:  # the allocator hands it out at once where it was made
            memory.stream.learn(self.host.clock)
            if user := memory.in_use(memory.stream.clock):
                self.violations.append(f"{_place()} frees what {user} may still use")
            memory.accesses = []
        self.live += nbytes - memory.nbytes
        self.peak = max(self.peak, self.live)
        memory.nbytes = nbytes

    def resize(self, own: Callable[..., Any], storage: Any, nbytes: int) -> Any:
        """Resize a storage, as buffers do to release whole weights."""
        memory = self._memories.get(storage)
        result = own(storage, nbytes)
        memory = self._track(storage) if memory is None else memory
        if not memory.nbytes:
            memory.stream = self.current
        self._resize(memory, nbytes)
        with _disable_current_modes():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)
        return result

    # -- operations ------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._report()
        if func.namespace == "c10d":
            return func(*args, **kwargs)  # followed where it is begun
        written, read = _roles(func, args, kwargs)
        given = [*written, *read]
        kinds = {"device" if self.kind(one) == "device" else "host" for one in given}
        if self.running is not self.host:
            kinds = {"host"}
        if len(kinds) == 2 and func not in _COPIES:
            sizes = [(self.kind(one), tuple(one.shape)) for one in given]
            raise AssertionError(f"{func} works on tensors of two memories: {sizes}")
        if not kinds and self.new != "device":
            kinds = {"host"}
        known = set(map(_storage_of, given))
        result = func(*args, **kwargs)
        leaves = tree_leaves(result)
        made = [one for one in leaves if is_memory(one)]
        made = [one for one in made if _storage_of(one) not in known]
        for one in leaves if kinds != {"host"} and self.running is self.host else ():
            if is_number(one):
                self.memory_of(one)
        for one in made:
            if kinds == {"host"}:
                self.paint(one, "pageable" if self.new == "device" else self.new)
            elif not one.is_meta:
                self.memory_of(one)
        if func in _NEW:
            for one in made:
                if one.dtype.is_floating_point:
                    one.fill_(torch.nan)
        elif not _is_view(func):
            self._follow(func, [*written, *made], read, kinds, args, kwargs)
        self._report()
        return result

    def _follow(
        self,
        func: Any,
        written: list[Tensor],
        read: list[Tensor],
        kinds: set[str],
        args: Any,
        kwargs: Any,
    ) -> None:
        """Follow an operation on memories of these kinds, and how long the host waits for it."""
        is_host = kinds == {"host"}
        kind, waits = "kernel", func in _READ_BY_HOST and kinds == {"device"}
        if len(kinds) == 2 and func in _COPIES:
            kind = "up" if self.kind(read[0]) != "device" else "down"
            self.crossed[kind] += read[0].nbytes
            ends = {self.kind(one) for one in (*read, *written)}
            waits = "pageable" in ends or not (args[2:3] or kwargs.get("non_blocking"))
        if is_host or written or func in _READ_BY_HOST:
            who = self.running if is_host else self.current
            what = f"{func.__name__} in {_place()} on {who.name}"
            self._do(who, kind, what, read, written, sum(one.nbytes for one in written))
        if waits:
            self.host_waits_for(self.current.clock)

    def _do(
        self,
        who: Actor,
        kind: str,
        what: str,
        read: list[Tensor],
        written: list[Tensor],
        nbytes: int,
    ) -> None:
        if who is self.current:  # work of a stream, which comes behind what the host knows of
            who.learn(self.running.clock)
        time = who.tick()
        for tensors, is_write in ((read, False), (written, True)):
            for tensor in tensors:
                memory, *span = self.memory_of(tensor)
                # A thread reads values of the host's that lie in what counts as the device's.
                is_untold = memory.kind == "device" and who.name == "a thread"
                if memory.kind == "pageable" or tensor.is_meta or is_untold:
                    continue
                access = Access(who.name, time, *span, what, is_write)
                if wrong := memory.note(access, who.clock):
                    self.violations.append(wrong)
        if who is self.current:
            self.done.append(Done(kind, who.name, time, {**who.clock}, nbytes))

    def _report(self) -> None:
        if self.violations:
            raise AssertionError(self.violations.pop(0))

    # -- collectives -----------------------------------------------------------------------------

    def meet(self, own: Callable[..., Iterator[Any]], ranks: Any, message: Tensor) -> Iterator[Any]:
        """Exchange the messages of a sync point, here or in a thread; they are the host's."""
        self.paint(message, "pageable")
        with _disable_current_modes():
            for work in own(ranks, message):
                work.wait()
        yield from ()  # so nothing is sent before the messages of earlier ones

    def collective(self, own: Callable[..., Any], out: Tensor, *rest: Any, **kwargs: Any) -> Any:
        """Do a collective at once, and follow it on the stream of its group."""
        read = [one for one in rest[:1] if isinstance(one, Tensor)] or [out]
        is_async = kwargs.pop("async_op", False)
        # On copies, as the threads of gloo hold what they have sent for some time.
        with _disable_current_modes(), torch.no_grad():
            copy = out.clone()
            sent = [one.clone() if isinstance(one, Tensor) else one for one in rest]
            work = own(copy, *sent, **kwargs, async_op=True)
            if work is not None:
                work.wait()
            out.copy_(copy)
        stream = self.current
        if is_async:
            group = kwargs.get("group")
            name = f"the stream of group {len(self._groups) + 1}"
            stream = self._groups.setdefault(group, Actor(self, name))
            stream.wait_stream(self.current)
        with stream:
            what = f"{getattr(own, '__name__', 'collective')} in {_place()} on {stream.name}"
            self._do(stream, "collective", what, read, _but(out, read[0]), out.nbytes)
        self._report()
        return Work(self, stream.record_event(), out, *read) if is_async else None


class Work:
    """A collective under way, which keeps its tensors until it is waited for, as torch does."""

    def __init__(self, device: Device, end: Event, *held: Tensor) -> None:
        self._device, self._end, self._held = device, end, held

    def wait(self) -> None:
        self._device.current.wait_event(self._end)
        self._held = ()


class Threads:
    """A thread of the host, whose work is done when it is waited for."""

    device: Device

    def __init__(self, *_: Any) -> None:
        self.actor = Actor(self.device, "a thread")

    def submit(self, function: Callable[..., Any], *args: Any) -> Job:
        return Job(self.actor, functools.partial(function, *args))

    def shutdown(self) -> None: ...


class Job:
    """What a thread has to do."""

    def __init__(self, thread: Actor, function: Callable[[], Any]) -> None:
        self._thread, self._function = thread, function
        self._begin = {**thread.device.running.clock}
        self._error: Exception | None = None
        self._is_done = False

    def result(self) -> None:
        device = self._thread.device
        if not self._is_done:
            self._is_done = True
            self._thread.learn(self._begin)
            before = device.running, device.new
            device.running, device.new = self._thread, "pageable"
            try:
                self._function()
            except AssertionError:
                raise
            except Exception as error:
                self._error = error
            finally:
                device.running, device.new = before
        device.running.learn(self._thread.clock)
        if self._error is not None:
            raise self._error


def is_memory(value: Any) -> bool:
    """Return whether a value lies in one memory only; single numbers travel with an operation."""
    if not isinstance(value, Tensor) or not value.dim() or not value.numel():
        return False
    return _is_plain(value)


def is_number(value: Any) -> bool:
    """Return whether a value is a single number in a tensor."""
    return isinstance(value, Tensor) and not value.dim() and not value.is_meta and _is_plain(value)


def _is_plain(tensor: Tensor) -> bool:
    # Subclasses with operations of their own have no memory, but hold tensors that have.
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


@functools.cache
def _writes(func: Any) -> set[int | str]:
    """Return the numbers and names of the arguments that an operation writes."""
    arguments = enumerate(func._schema.arguments)
    written = [(n, one.name) for n, one in arguments if one.alias_info and one.alias_info.is_write]
    return {key for both in written for key in both}


def _storage_of(tensor: Tensor) -> int:
    """Return what tells a tensor's storage from others; a guarded parameter's, as it is."""
    with internals.as_plain_tensors():
        return int(tensor.untyped_storage()._cdata)


@functools.cache
def _is_view(func: Any) -> bool:
    if func is aten.set_.source_Storage:
        return True  # as a view of the storage
    returns = func._schema.returns
    return any(one.alias_info and not one.alias_info.is_write for one in returns) or not returns


def _roles(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operation writes, and those that it reads."""
    written: list[Tensor] = []
    read: list[Tensor] = []
    for key, value in (*enumerate(args), *kwargs.items()):
        into = written if key in _writes(func) else read
        into.extend(one for one in tree_leaves(value) if is_memory(one))
    return written, read


def _but(out: Tensor, source: Tensor) -> list[Tensor]:
    """Return what a collective writes: not a part of ``out`` that it sends from where it is."""
    in_same = out.untyped_storage()._cdata == source.untyped_storage()._cdata
    if not in_same or out.numel() == source.numel():
        return [out]
    start = int(source.storage_offset() - out.storage_offset())
    with _disable_current_modes():
        parts = out[:start], out[start + source.numel() :]
    return [part for part in parts if part.numel()]


def _place() -> str:
    """Return the innermost line of the package, or of a test, that is running."""
    frame: Any = sys._getframe(1)
    fallback = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if "/lightning_zero/" in name and "/tests/" not in name.rsplit("/lightning_zero/", 1)[1]:
            return f"{name.rsplit('/lightning_zero/', 1)[1]}:{frame.f_lineno}"
        if not fallback and "/tests/" in name and "/oracle/device" not in name:
            fallback = f"{name.rsplit('/', 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back
    return fallback or "torch"


def _on_host(device: Device) -> Iterator[Any]:
    """Yield the patches that paint what is allocated on the host."""
    kinds = "lasting_memory", "recurring_memory", "passing_memory"
    owners = [*((HostCopies, kind, "pinned") for kind in kinds), (Scratch, "tensor", "pageable")]
    for cls, name, colour in owners:
        own = getattr(cls, name)

        def on_host(
            owner: Any, numel: int, dtype: torch.dtype, own: Any = own, kind: str = colour
        ) -> Tensor:
            before, device.new = device.new, kind
            try:
                made: Tensor = own(owner, numel, dtype)
            finally:
                device.new = before
            is_known = not made.numel() or device.is_on_host(made)
            return made if is_known else device.paint(made, kind)

        yield mock.patch.object(cls, name, on_host)
    # A step on the host lasts from its begin to its end, but for what sends weights up meanwhile.
    for name, within, after in (
        ("begin", "pageable", "pageable"),
        ("refresh", "device", "pageable"),
        ("end", "pageable", "device"),
    ):
        own_step, places = getattr(UnitStep, name), (within, after)

        def step(
            one: Any, *args: Any, own: Any = own_step, places: tuple[str, str] = places
        ) -> None:
            is_on_host = one._ledger is not None
            device.new = places[0] if is_on_host else device.new
            try:
                own(one, *args)
            finally:
                device.new = places[1] if is_on_host else device.new

        yield mock.patch.object(UnitStep, name, step)
    for kind, name in ((StagedFile, "mapped"), (StagingMemory, "tensor")):

        def made(one: Any, *args: Any, own: Any = kind.__init__, name: str = name) -> None:
            own(one, *args)
            device.paint(getattr(one, name), "pageable")

        yield mock.patch.object(kind, "__init__", made)


def _streams(device: Device) -> Iterator[Any]:
    """Yield the patches that give a CPU the streams and collectives of a device."""
    yield mock.patch.object(communicator, "backend_for", return_value="that of a device")
    yield mock.patch.object(transfers, "_WITHOUT_STREAMS", ("meta",))
    yield mock.patch.object(torch, "Stream", device.stream)
    yield mock.patch.object(torch.accelerator, "current_stream", device.current_stream)
    threads = type("", (Threads,), {"device": device})
    yield mock.patch.object(transfers, "ThreadPoolExecutor", threads)
    own = torch.UntypedStorage.resize_
    resize = lambda storage, nbytes: device.resize(own, storage, nbytes)  # noqa: E731
    yield mock.patch.object(torch.UntypedStorage, "resize_", resize)
    hops = control.Control._hops
    meet = functools.partialmethod(lambda one, message: device.meet(hops, one, message))
    yield mock.patch.object(control.Control, "_hops", meet)
    for owner, names in (
        (transport, ("_all_gather", "_reduce_scatter")),
        (dist, ("all_reduce", "all_to_all_single")),
    ):
        for name in names:
            follow = functools.partial(device.collective, getattr(owner, name))
            yield mock.patch.object(owner, name, follow)


@contextlib.contextmanager
def beside_the_host(*, followed: bool = True) -> Iterator[Device]:
    """A CPU that counts as a device beside its host: offload to "cpu" acts there."""
    device = Device()
    patches: list[Any] = [
        mock.patch.object(Offload, "runs_on", return_value=True),
        mock.patch.object(Offload, "is_mapped", return_value=False),
    ]
    if followed:
        patches += [*_on_host(device), *_streams(device), device]
    else:  # streams that do everything at once
        patches.append(mock.patch.object(transfers, "_WITHOUT_STREAMS", ("meta",)))
        patches.append(mock.patch.object(torch, "Stream"))
        patches.append(mock.patch.object(torch.accelerator, "current_stream"))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield device
    device._report()
