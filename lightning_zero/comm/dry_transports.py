"""Transports of a dry run: they allocate as they would, and send nothing."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import Self, override

from lightning_zero.comm.control import Control
from lightning_zero.comm.mesh import Axis, Mesh
from lightning_zero.comm.traffic import Ledger
from lightning_zero.comm.transport import Arrived, ReduceBuffer, Shards, Then, Transport
from lightning_zero.tensors import Storages, Work

_META = torch.device("meta")
OnMessage = Callable[..., Callable[[], None]]
"""Called with the verb and bytes of a message that begins; its result is called at its end."""


class DryTransport(Transport):
    """A device's collectives, which need no buffers of ours; also the base of the other transports.

    Attributes:
        on_change: Called whenever memory has been allocated.
        on_message: Called with the verb and bytes of each message that begins.
        ledger: What this rank would send.
    """

    ledger: _DryLedger

    def __init__(self) -> None:
        super().__init__(Control(alone=True), Mesh.of(0, 1).shard, _META)
        self.ledger = _DryLedger()
        self.on_message: OnMessage = lambda *_: _nothing
        self.on_change: Callable[..., None] = lambda: None
        self._wholes = Storages()
        self._partials = Storages()
        self._in_flight: defaultdict[str, Storages] = defaultdict(Storages)
        self._shards: defaultdict[str, Storages] = defaultdict(Storages)
        self._last: dict[str, int] = {}

    def along(self, axis: Axis) -> Self:
        """Return a copy of this transport along ``axis``; both count what either holds."""
        other = copy.copy(self)
        other.axis, other.rank, other.size = axis, axis.rank, axis.size
        other.ledger = _DryLedger()
        return other

    @property
    def gathered(self) -> int:
        """Bytes held now by buffers into which weights have been gathered."""
        return self._wholes.nbytes

    @property
    def reduced(self) -> dict[str, int]:
        """Bytes of the shards into which gradients have been reduced, by unit."""
        return {unit: held.nbytes for unit, held in self._shards.items()}

    @property
    def targets(self) -> dict[str, int]:
        """Bytes of the shards into which gradients are being reduced, by unit."""
        return {unit: held.nbytes for unit, held in self._in_flight.items()}

    @property
    def partials(self) -> int:
        """Bytes of gradients before and during their reduction, and of the buffers it needs."""
        return self._partials.nbytes

    @property
    def last_reduced(self) -> dict[str, int]:
        """Bytes of the shards of the last two units reduced in this backward pass, by unit."""
        return dict([*self._last.items()][-2:])

    @override
    def _gather(self, whole: Tensor, shard: Shards, unit: str, tag: int) -> Work:
        self._wholes.add(whole)
        self.on_change()
        return Then(Arrived(), self._sent())

    def _sent(self) -> Callable[[], None]:
        """Report the message that begins, the latest in the ledger, to :attr:`on_message`."""
        return self.on_message(*self.ledger.latest)

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
    def _trade(self, received: Tensor, sent: Tensor, out: Tensor, unit: str, tag: int) -> Work:
        self._begin(out, unit)
        _, nbytes = self.ledger.latest
        message = Then(Arrived(), self.on_message("trade", nbytes))
        return Then(message, lambda: self._end(out, unit))

    @override
    def reduce_buffer(self, numel: int, dtype: torch.dtype) -> ReduceBuffer:
        buffer = super().reduce_buffer(numel, dtype)
        self._partials.add(buffer.tensor)
        self.on_change()
        return buffer

    @override
    def _reduce(self, partial: ReduceBuffer, out: Tensor, unit: str, tag: int) -> Work:
        self._begin(out, unit)
        message = Then(Arrived(), self._sent())
        return Then(message, lambda: self._finish(partial, out, unit))

    def _begin(self, out: Tensor, unit: str) -> None:
        self._partials.remove(out)  # one rank's gradients are their own sum
        self._in_flight[unit].add(out)
        self._last[unit] = self._last.get(unit, 0) + out.nbytes
        self.on_change()

    def _end(self, out: Tensor, unit: str) -> None:
        self._in_flight[unit].remove(out)
        self._shards[unit].add(out)

    def _finish(self, partial: ReduceBuffer, out: Tensor, unit: str) -> None:
        self._end(out, unit)

    @override
    def release_scratch(self) -> None:
        self._last.clear()


class DryMessages(DryTransport):
    """Messages between hosts' CPUs: all other ranks' parts are received before they are added."""

    def __init__(self) -> None:
        super().__init__()
        self._inboxes = 0
        self._free: Counter[tuple[int, torch.dtype]] = Counter()

    @property
    @override
    def partials(self) -> int:
        return super().partials + self._inboxes

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
        super().release_scratch()
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
