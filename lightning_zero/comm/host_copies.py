"""Copies between a device and its host, for what is offloaded to the host's memory."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from lightning_zero.comm.transport import Work
from lightning_zero.tensors import LentMemory, lasting_tensors

_MOST_LANDINGS = 2
"""Gradients that are added on the host may wait for it in as many buffers: one comes, one goes."""


def pinned_bytes(nbytes: int, device: torch.device) -> int:
    """Return what torch takes of the memory of a device's host for ``nbytes`` on their way.

    Its allocator of pinned memory has powers of two.
    """
    is_rounded = device.type == "cuda" and nbytes > 0
    return 1 << (nbytes - 1).bit_length() if is_rounded else nbytes


class HostCopies:
    """Copies between a device and its host, on a stream beside what the device computes.

    Args:
        device: The device; where it is the host itself, copies are made at once.

    Attributes:
        device: As given.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = None if device.type in ("cpu", "meta") else torch.Stream(device)
        # The last copy to the device.
        self._up: torch.Event | None = None
        self._landings: deque[Landing] = deque()
        self._recurring = LentMemory()
        # What is copied to the host, until it is there.
        self._held: deque[tuple[torch.Event, torch.UntypedStorage]] = deque()

    def can_copy(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies on the device, and is no more than torch's own."""
        return type(tensor) is Tensor and tensor.device.type == self.device.type

    def lasting_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros in host memory that the device reads by itself.

        The memory is of just this size: torch's own allocator would take the next power of two.
        """
        nbytes = numel * dtype.itemsize
        if self.device.type != "cuda" or not nbytes:
            with lasting_tensors():
                return torch.zeros(numel, dtype=dtype, device="cpu")
        block = mmap.mmap(-1, nbytes)
        with lasting_tensors():
            memory = torch.frombuffer(block, dtype=torch.uint8)
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), nbytes, 0))
        # The mapping ends after its finalizers.
        weakref.finalize(block, cudart.cudaHostUnregister, memory.data_ptr())
        return memory.view(dtype)

    def recurring_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return host memory for a while, of a size that recurs; its content is undefined.

        It is :meth:`lasting_memory`, which whoever asks for as many bytes gets when nobody holds it
        any more: neither a view of it, nor a copy that is under way.
        """
        self._let_go()
        return self._recurring.lend(numel, dtype, self.lasting_memory)

    def _let_go(self) -> None:
        """Hold no longer what has arrived."""
        # Each is taken before it is looked at: another thread may do the same.
        with contextlib.suppress(IndexError):
            while (held := self._held.popleft())[0].query():
                pass
            self._held.appendleft(held)

    def passing_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return host memory for a while, of any size; its content is undefined.

        Of a GPU's host torch takes :func:`pinned_bytes`, and keeps them for reuse.
        """
        with lasting_tensors():
            is_pinned = self.device.type == "cuda"
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=is_pinned)

    def storage_down(self, tensor: Tensor) -> Tensor:
        """Start to copy the storage of a tensor to host memory for a while; returns its bytes."""
        content = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        content.set_(tensor.untyped_storage())
        memory = self.passing_memory(content.numel(), torch.uint8)
        self.down(memory, content)
        return memory

    def up(self, out: Tensor, source: Tensor, then: Callable[[], Work]) -> Work:
        """Start to copy ``source`` to the device, and what follows there; returns both as one."""
        if self._stream is None:
            out.copy_(source)
            return then()
        with self._beside_computation(self._stream):
            out.copy_(source, non_blocking=True)
            self._up = self._stream.record_event()
            return _Arrival(then(), self._stream.record_event(), self.device)

    def wait_until_read(self) -> None:
        """Return when the device has read what was sent up, which may be written to then."""
        if self._up is not None:
            self._up.synchronize()

    def up_as_they_come(self, parts: Iterable[tuple[Tensor, Tensor]]) -> Work:
        """Return what copies each ``(out, source)`` to the device when it is waited for.

        To iterate may wait for a source. The copies wait for what the device was given until now,
        and for nothing that it is given in the meantime.
        """
        if self._stream is None:
            return _Ascent(parts, None, None)
        begin = torch.accelerator.current_stream(self.device).record_event()
        return _Ascent(parts, self._stream, begin)

    def down(
        self, out: Tensor, source: Tensor, then: Callable[[], object] | None = None
    ) -> Landing:
        """Start to copy ``source`` to the host, where ``then`` is called when it has landed."""
        if self._stream is None:
            out.copy_(source)
            landing = Landing(None, then)
        else:
            with self._beside_computation(self._stream):
                out.copy_(source, non_blocking=True)
                event = self._stream.record_event()
            landing = Landing(event, then)
            source.record_stream(self._stream)
            self._let_go()
            self._held.append((event, out.untyped_storage()))
        if then is not None:
            self._landings.append(landing)
            if len(self._landings) > _MOST_LANDINGS:
                self._landings.popleft().wait()
        return landing

    def abandon(self) -> None:
        """Let nothing follow what is on its way to the host."""
        for landing in self._landings:
            landing.abandon()
        self._landings.clear()

    @contextlib.contextmanager
    def _beside_computation(self, stream: torch.Stream) -> Iterator[None]:
        """Work on the stream, behind what was given to the device before."""
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            yield


class _Arrival:
    """Data on their way to the device."""

    def __init__(self, work: Work, event: torch.Event, device: torch.device) -> None:
        self._work, self._event, self._device = work, event, device

    def wait(self) -> None:
        """Let what the device is given next wait for them."""
        self._work.wait()
        torch.accelerator.current_stream(self._device).wait_event(self._event)


class _Ascent:
    """Data that go up as they come to the host."""

    def __init__(
        self,
        parts: Iterable[tuple[Tensor, Tensor]],
        stream: torch.Stream | None,
        begin: torch.Event | None,
    ) -> None:
        self._parts, self._stream, self._begin = parts, stream, begin

    def wait(self) -> None:
        """Send all of them, and let what the device is given next wait for them."""
        if self._stream is None:
            self._send()
            return
        assert self._begin is not None
        # Not when it was recorded: the stream may have had another unit's parts to send since.
        self._stream.wait_event(self._begin)
        try:
            with self._stream:
                self._send()
        finally:
            # Also for those that were sent before one failed: their memory is given back.
            torch.accelerator.current_stream(self._stream.device).wait_stream(self._stream)

    def _send(self) -> None:
        for out, source in self._parts:
            out.copy_(source, non_blocking=True)


class Landing:
    """Data on their way to the host, for which several threads may wait."""

    def __init__(self, event: torch.Event | None, then: Callable[[], object] | None) -> None:
        self._event, self._then = event, then
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when they are there, and what follows is done."""
        if self._event is not None:
            self._event.synchronize()
        with self._lock:
            then, self._then = self._then, None
            if then is not None:
                then()

    def abandon(self) -> None:
        """Let nothing follow, be they there or not."""
        with self._lock:
            self._then = None
