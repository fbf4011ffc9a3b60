"""A device whose memory is not the host's, on a machine that has none.

Every storage has a colour: the host's, or the device's, which is that of all that nobody painted
otherwise. An operation on tensors of both colours fails, unless it copies from one to the other; so
it would between a host and a real device. What copies move is counted.

    with beside_the_host() as memories:
        ...                                # under offload to "cpu"
    assert memories.crossed == {"up": ..., "down": ...}

Copies are made at once (streams.py makes them late). Those to the device read late, and see whether
anybody writes what they read, within

    with late_readings() as stream:
        ...
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero.comm import StagedFile, StagingMemory
from lightning_zero.comm.host_copies import HostCopies
from lightning_zero.comm.scratch import Scratch
from lightning_zero.optimizer.operations import leaves_of
from lightning_zero.plan import Offload

_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


class Memories(TorchDispatchMode):
    """The colours of all storages.

    Attributes:
        crossed: The bytes that were copied, "up" to the device and "down" to the host.
        peak: The most bytes on the device behind an operation, of what operations made, since
            `restart`; nothing before, as it takes longer than all else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.crossed: Counter[str] = Counter()
        self.peak = 0
        self._follows_peak = False
        self.new = "device"  # the colour of what is made of nothing
        self._made: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        # Those that are gone are forgotten, or others that are made where they were would be taken
        # for them.
        self._hosts: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def paint(self, tensor: Tensor, colour: str) -> Tensor:
        """Let a tensor's storage be in a memory."""
        if colour == "host":
            storage = tensor.untyped_storage()
            key = storage._cdata
            self._hosts[key] = weakref.ref(storage, lambda _: self._hosts.pop(key, None))
        return tensor

    def restart(self) -> None:
        """Count what crosses, and the peak, from now on."""
        self.crossed.clear()
        self.peak = 0
        self._follows_peak = True

    def colour(self, tensor: Tensor) -> str:
        return "host" if tensor.untyped_storage()._cdata in self._hosts else "device"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in leaves_of((*args, *(kwargs or {}).values())) if is_memory(one)]
        colours = {self.colour(one) for one in given}
        if func in _COPIES and len(colours) == 2:
            direction = "down" if self.colour(args[0]) == "host" else "up"
            self.crossed[direction] += args[1].nbytes
        elif len(colours) == 2:
            sizes = [(self.colour(one), tuple(one.shape)) for one in given]
            raise AssertionError(f"{func} works on tensors of two memories: {sizes}")
        known = {one.untyped_storage()._cdata for one in given}
        result = func(*args, **(kwargs or {}))
        colour = next(iter(colours)) if len(colours) == 1 else self.new
        for one in leaves_of([result]):
            if is_memory(one) and one.untyped_storage()._cdata not in known:
                self.paint(one, colour)
                if colour == "device" and not one.is_meta:
                    self._made.add(one.untyped_storage())
        if self._follows_peak:
            self.peak = max(self.peak, sum(storage.nbytes() for storage in self._made))
        return result


def is_memory(value: Any) -> bool:
    """Return whether a value lies in one memory only; single numbers travel with an operation."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() > 0


@contextlib.contextmanager
def beside_the_host(*, painted: bool = True) -> Iterator[Memories]:
    """A CPU that counts as a device beside its host: offload to "cpu" acts there."""
    memories = Memories()
    patches = [
        mock.patch.object(Offload, "runs_on", return_value=True),
        mock.patch.object(Offload, "is_mapped", return_value=False),
    ]
    kinds = "lasting_memory", "recurring_memory", "passing_memory"
    for cls, name in (*((HostCopies, kind) for kind in kinds), (Scratch, "tensor")):
        own = getattr(cls, name)

        def on_host(owner: Any, numel: int, dtype: torch.dtype, own: Any = own) -> Tensor:
            memories.new = "host"
            try:
                return memories.paint(own(owner, numel, dtype), "host")
            finally:
                memories.new = "device"

        patches.append(mock.patch.object(cls, name, on_host))
    for kind, name in ((StagedFile, "mapped"), (StagingMemory, "tensor")):

        def made(one: Any, *args: Any, own: Any = kind.__init__, name: str = name) -> None:
            own(one, *args)
            memories.paint(getattr(one, name), "host")

        patches.append(mock.patch.object(kind, "__init__", made))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        if painted:
            stack.enter_context(memories)
        yield memories


class LateStream:
    """Makes copies in their order, each some time after it was asked for.

    Attributes:
        gate: None is made while it is closed.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._thread = ThreadPoolExecutor(1)

    def read(self, source: Tensor) -> Any:
        """Read one that goes the other way; returns the end, which raises if it was changed."""
        sent = source.clone()

        def read() -> None:
            assert self.gate.wait(20), "a copy was waited for that cannot begin"
            assert torch.equal(source, sent), "what goes up was written to meanwhile"

        return LateEvent(self._thread.submit(read))


class LateEvent:
    """The end of a copy."""

    def __init__(self, copy: Future[None]) -> None:
        self._copy = copy

    def synchronize(self) -> None:
        self._copy.result()


@contextlib.contextmanager
def late_readings() -> Iterator[LateStream]:
    """Let copies to the device, which come at once, read late what they bring."""
    stream, up = LateStream(), HostCopies.up
    events: list[LateEvent] = []

    def late(copies: Any, out: Tensor, source: Tensor, then: Any, after: Any = None) -> Any:
        events.append(stream.read(source))
        copies._up = events[-1]
        return up(copies, out, source, then, after)

    with mock.patch.object(HostCopies, "up", late):
        yield stream
    for event in events:
        event.synchronize()
