"""Transports of a dry run: they allocate as they would, and send nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self, override

from lightning_zero.comm.control import Control
from lightning_zero.comm.mesh import Axis, Mesh
from lightning_zero.comm.traffic import Ledger
from lightning_zero.comm.transport import Pending, ReduceBuffer, Shards, Transport
from lightning_zero.tensors import Storages, Work, tensors_in

_META = torch.device("meta")
OnMessage = Callable[..., Callable[[], None]]
"""Called with the verb and bytes of a message that begins; its result is called at its end."""


class DryTransport(Transport):
    """A device's collectives, which need no buffers of ours; also the base of the other transports.

    Attributes:
        on_change: Called whenever memory has been allocated.
        on_message: Called with the verb and bytes of each message that begins.
        ledger: What this rank would send.
        temporary: What encoding and decoding takes.
    """

    ledger: _DryLedger
    lands_apart: ClassVar[bool] = True
    """Whether a sum of another dtype than its result's arrives in memory of its own."""

    def __init__(self) -> None:
        super().__init__(Control(alone=True), Mesh.of(0, 1).shard, _META)
        self.ledger = _DryLedger()
        self.on_message: OnMessage = lambda *_: _nothing
        self.on_change: Callable[..., None] = lambda: None
        self._wholes = Storages()
        self._partials = Storages()
        self._in_flight = Storages()
        self.temporary = Storages()
        self._shards = Storages()

    def along(self, axis: Axis, *, gathers_weights: bool = True) -> Self:
        """Return another such transport along ``axis``; both count weights that either gathers."""
        other = type(self)()
        other.axis, other.rank, other.size = axis, axis.rank, axis.size
        if gathers_weights:
            other._wholes = self._wholes
        return other

    @property
    def gathered(self) -> int:
        """Bytes held now by buffers into which weights have been gathered."""
        return self._wholes.nbytes

    @property
    def reduced(self) -> int:
        """Bytes of the shards into which gradients have been reduced, while they are there."""
        return self._shards.nbytes

    @property
    def partials(self) -> int:
        """Bytes of gradients before and during their reduction, and of the buffers it needs."""
        return self._partials.nbytes + self._in_flight.nbytes

    @override
    def _gather(self, whole: Tensor, shard: Shards, unit: str, tag: int) -> Work:
        self._wholes.add(whole)
        self.on_change()
        return Pending(then=self._sent())

    def _sent(self) -> Callable[[], None]:
        """Report the message that begins, the latest in the ledger, to :attr:`on_message`."""
        return self.on_message(*self.ledger.latest)

    @override
    def all_reduce(self, tensor: Tensor, *, unit: str, tag: int) -> Work:
        works = []
        for verb in ("reduce", "gather"):
            sent = tensor.numel() // self.size * (self.size - 1)
            self.ledger.note(unit, verb, sent, tensor.element_size())
            works.append(Pending(then=self._sent()))
        return Pending(*works)

    @override
    def coding(self, *held: Tensor) -> Temporaries:
        for one in held:
            self._in_flight.add(one)
        return Temporaries(self.temporary, self.on_change)

    @override
    def gather_codes(self, codes: Tensor, own: Tensor, out: Tensor, *, unit: str, tag: int) -> Work:
        self.ledger.note(unit, "gather", own.numel() * (self.size - 1), 1)
        return self._gather(out, Shards(own), unit, tag)

    @override
    def passing_buffer(self, numel: int, dtype: torch.dtype, kind: str) -> Tensor:
        buffer = super().passing_buffer(numel, dtype, kind)
        self.on_change()
        return buffer

    @override
    def _all_to_all(self, received: Tensor, sent: Tensor, out: Tensor, unit: str, tag: int) -> Work:
        self._begin(out)
        _, nbytes = self.ledger.latest
        message = Pending(then=self.on_message("trade", nbytes))
        return Pending(message, then=lambda: self._end(out))

    @override
    def reduce_buffer(self, numel: int, dtype: torch.dtype) -> ReduceBuffer:
        buffer = super().reduce_buffer(numel, dtype)
        self._partials.add(buffer.tensor)
        self.on_change()
        return buffer

    @override
    def _reduce(self, partial: ReduceBuffer, out: Tensor, unit: str, tag: int) -> Work:
        landing = []
        if self.lands_apart and out.dtype != partial.tensor.dtype:
            landing = [partial.tensor.new_empty(out.shape)]
            self._partials.add(*landing)
        self._begin(out)
        message = Pending(then=self._sent())
        return Pending(message, then=lambda: self._finish(partial, out, unit), kept=landing)

    def _begin(self, out: Tensor) -> None:
        self._partials.remove(out)  # one rank's gradients are their own sum
        self._in_flight.add(out)
        self.on_change()

    def _end(self, out: Tensor) -> None:
        self._in_flight.remove(out)
        self._shards.add(out)

    def _finish(self, partial: ReduceBuffer, out: Tensor, unit: str) -> None:
        self._end(out)


class Temporaries(TorchDispatchMode):
    """A context that counts the storages which operations in it make, while they are alive.

    Args:
        held: Counts them.
        on_change: Called whenever memory has been allocated.
    """

    def __init__(self, held: Storages, on_change: Callable[..., None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held, self._on_change = held, on_change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {one.untyped_storage()._cdata for one in tensors_in((args, kwargs))}
        for one in tensors_in(out):
            if one.untyped_storage()._cdata not in known:
                self._held.add(one)
        self._on_change()
        return out


class DryMessages(DryTransport):
    """Messages between hosts' CPUs: all other ranks' parts are received before they are added."""

    lands_apart: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._inboxes = 0
        self._free: Counter[tuple[int, torch.dtype]] = Counter()

    @property
    @override
    def partials(self) -> int:
        return super().partials + self._inboxes

    @override
    def all_reduce(self, tensor: Tensor, *, unit: str, tag: int) -> Work:
        return Transport.all_reduce(self, tensor, unit=unit, tag=tag)

    @override
    def _reduce(self, partial: ReduceBuffer, out: Tensor, unit: str, tag: int) -> Work:
        key = (out.numel(), partial.tensor.dtype)
        if self._free[key]:
            self._free[key] -= 1
        else:
            self._inboxes += (self.size - 1) * out.numel() * partial.tensor.itemsize
        return super()._reduce(partial, out, unit, tag)

    @override
    def _finish(self, partial: ReduceBuffer, out: Tensor, unit: str) -> None:
        super()._finish(partial, out, unit)
        self._free[out.numel(), partial.tensor.dtype] += 1

    @override
    def release_scratch(self) -> None:
        self._inboxes = 0
        self._free.clear()


class _DryLedger(Ledger):
    """A ledger that knows the verb and the bytes of its latest entry."""

    latest: tuple[str, int] = ("", 0)

    @override
    def note(self, unit: str, verb: str, elements: int, itemsize: int) -> None:
        super().note(unit, verb, elements, itemsize)
        self.latest = verb, elements * itemsize


def _nothing() -> None:
    return
