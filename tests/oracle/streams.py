"""A device's streams on a machine that has none: a host far ahead, and copies as late as allowed.

    with late_streams() as device:
        ...                                  # HostCopies made within have streams of this model

Computation runs at once. A copy on another stream waits in its queue until the host waits for its
event, or until computation does; so does everything queued before it, on that stream alone. Then
what it reads must still be there and what it writes must not have been freed: either would be taken
by the next tensor of its size, which the device's allocator hands out without asking. Whoever reads
before waiting, or overwrites what a copy has yet to read, gets other numbers.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero.comm import Arrived, HostCopies
from lightning_zero.comm import host_copies as module


class Device(TorchDispatchMode):
    """The streams of a device.

    Attributes:
        computation: The stream that runs at once.
        current: The stream that gets what is launched now.
        host_waits: How often the host waited for one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.computation = Computation(self)
        self.current: Stream = self.computation
        self.streams: list[Stream] = []
        self.host_waits = 0

    def stream(self, *_: Any) -> Stream:
        """Make another stream."""
        self.streams.append(Stream(self))
        return self.streams[-1]

    def current_stream(self, *_: Any) -> Stream:
        """Return what gets what is launched now."""
        return self.current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.current is self.computation or func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self.current.copy(args[0], args[1])
        return args[0]

    def finish(self) -> None:
        """Do all that is left."""
        for stream in self.streams:
            stream.run(len(stream.queue))


class Stream:
    """Work in its order, done as late as somebody waits for it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.queue: deque[Callable[[], None]] = deque()
        self.num_given = 0
        self._outer: list[Stream] = []

    def __enter__(self) -> Stream:
        self._outer.append(self.device.current)
        self.device.current = self
        return self

    def __exit__(self, *_: Any) -> None:
        self.device.current = self._outer.pop()

    def put(self, work: Callable[[], None]) -> None:
        """Queue some work."""
        self.queue.append(work)
        self.num_given += 1

    def copy(self, out: Tensor, source: Tensor) -> None:
        """Queue a copy; keeps neither alive."""
        places = [Place(out), Place(source)]

        def make() -> None:
            written, read = (place.tensor() for place in places)
            assert read is not None, "a copy reads memory that was freed"
            assert written is not None, "a copy writes to memory that was freed"
            written.copy_(read)

        self.put(make)

    def record_event(self) -> Event:
        return Event(self, self.num_given)

    def wait_event(self, event: Event) -> None:
        self.put(event.run)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def run(self, number: int) -> None:
        """Do the next pieces of work, this many."""
        with self.device.computation:
            for _ in range(number):
                self.queue.popleft()()


class Computation(Stream):
    """The stream of computation, which is never behind."""

    def wait_event(self, event: Event) -> None:
        event.run()


class Event:
    """A place in a stream's work."""

    def __init__(self, stream: Stream, place: int) -> None:
        self._stream, self._place = stream, place

    def query(self) -> bool:
        return self._place <= self._stream.num_given - len(self._stream.queue)

    def run(self) -> None:
        """Do all that comes before."""
        done = self._stream.num_given - len(self._stream.queue)
        self._stream.run(max(0, self._place - done))

    def synchronize(self) -> None:
        self._stream.device.host_waits += not self.query()
        self.run()


class Place:
    """A tensor's place in memory, which it does not keep."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._as = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor | None:
        """Return the tensor, unless its memory is gone."""
        storage = self._storage()
        if storage is None:
            return None
        dtype, shape, stride, offset = self._as
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)  # type: ignore[call-overload, no-any-return]


@contextlib.contextmanager
def late_streams() -> Iterator[Device]:
    """Give HostCopies that are made within streams of a device, for tensors of the CPU."""
    device, up = Device(), HostCopies.up

    def behind_what_it_sends(
        copies: Any, out: Tensor, source: Tensor, then: Any, after: Any = None
    ) -> Any:
        def flushed() -> Any:
            # Collectives of the CPU read at once what those of a device would wait for.
            if (stream := copies._up_stream) is not None:
                stream.run(len(stream.queue))
            return then()

        return up(copies, out, source, then if then is Arrived else flushed, after)

    patches = [
        mock.patch.object(module, "_WITHOUT_STREAMS", ("meta",)),
        mock.patch.object(HostCopies, "up", behind_what_it_sends),
        mock.patch.object(torch, "Stream", device.stream),
        mock.patch.object(torch.accelerator, "current_stream", device.current_stream),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(device)
        yield device
        device.finish()
