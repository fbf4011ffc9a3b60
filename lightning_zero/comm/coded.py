"""Transports of what a codec makes of weights and gradients, in a few bits for each element.

A gather sends each rank's shard in code, and every rank decodes all of them, its own too: so all
have the same bits. A reduction sends each rank its part of every rank's summands in code, all to
all, and adds up what it has decoded in fp32: no sum is ever rounded to so few bits on its way.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from lightning_zero.comm.codec import Codec
from lightning_zero.comm.transport import ReduceBuffer, Shared, Transport, Work


class Cargo(Enum):
    """Data that are sent in code; the value is the kind of memory that its codes count as."""

    WEIGHTS = "gathered"
    """Rounded to the nearest: the same masters are always the same weights."""
    GRADIENTS = "unreduced"
    """Rounded by chance, so that what is lost has no direction in which it adds up.

    With feedback of errors, rounded to the nearest, and what is lost is added to the next ones.
    """


class Coded:
    """The gathers and reductions of one store along one axis, in code.

    Args:
        transport: Carries the codes.
        bits: As :class:`Codec` takes them.
        cargo: What is sent.
        keeps_errors: Whether what a reduction loses is added to the next one.

    Attributes:
        size: Ranks along the axis.
    """

    def __init__(
        self, transport: Transport, bits: int, cargo: Cargo, *, keeps_errors: bool = False
    ) -> None:
        self.size = transport.size
        self._transport = transport
        self._bits, self._cargo = bits, cargo
        self._num_coded = 0
        self._keeps_errors = keeps_errors
        self._lost: Tensor | None = None

    def gather(self, out: Tensor, source: Shared, *, unit: str, tag: int) -> Work:
        """Do what :meth:`Transport.gather` does."""
        codec = Codec(self._bits, source.own.numel())
        codes = self._buffer(self.size * codec.nbytes)
        own = codes.view(self.size, codec.nbytes)[self._transport.rank]
        codec.encode(source.own, own, self._noise(unit, tag, codes.device))
        work = self._transport.gather_codes(codes, own, out, unit=unit, tag=tag)
        return _Then(work, lambda: codec.decode(codes, out))

    def reduce_buffer(self, numel: int, dtype: torch.dtype) -> ReduceBuffer:
        """Return memory for what :meth:`reduce` takes."""
        return self._transport.reduce_buffer(numel, dtype)

    def reduce(self, out: Tensor, source: ReduceBuffer, *, unit: str, tag: int) -> Work:
        """Do what :meth:`Transport.reduce` does; ``source`` is read when this returns."""
        codec = Codec(self._bits, out.numel())
        sent = self._buffer(self.size * codec.nbytes)
        if self._keeps_errors:
            self._encode_with_lost(codec, source.tensor, sent)
        else:
            codec.encode(source.tensor, sent, self._noise(unit, tag, sent.device))
        received = self._buffer(sent.numel())
        work = self._transport.trade(received, sent, out, unit=unit, tag=tag)
        return _Then(work, lambda: codec.add_up(received, out), sent)

    def _encode_with_lost(self, codec: Codec, values: Tensor, codes: Tensor) -> None:
        """Encode ``values`` and what those before have lost; they may be changed."""
        if self._lost is None:
            kind, numel = self._cargo.value, values.numel()
            self._lost = self._transport.passing_buffer(numel, torch.float32, kind).zero_()
        values = values.float().add_(self._lost)
        codec.encode(values, codes)
        codec.decode(codes, self._lost)
        # A gradient that is not finite is lost by all, and no reason to lose the next.
        torch.sub(values, self._lost, out=self._lost).nan_to_num_(0.0, 0.0, 0.0)

    def _buffer(self, nbytes: int) -> Tensor:
        return self._transport.passing_buffer(nbytes, torch.uint8, self._cargo.value)

    def _noise(self, unit: str, tag: int, device: torch.device) -> torch.Generator | None:
        """Return this rank's noise for the next code of a unit; it is the same in every run."""
        if self._cargo is Cargo.WEIGHTS or device.type == "meta":
            return None
        self._num_coded += 1
        axis = self._transport.axis
        seed = zlib.crc32(f"{unit} {tag} {axis.ranks} {axis.rank} {self._num_coded}".encode())
        return torch.Generator(device).manual_seed(seed)


class _Then:
    """Work, and what to do when it is over."""

    def __init__(self, work: Work, finish: Callable[[], None], *read: Tensor) -> None:
        self._work: Work | None = work
        self._finish: Callable[[], None] | None = finish
        # What the work reads has to live until then.
        self._read = read

    def wait(self) -> None:
        """Return when it is done; what it needed is let go."""
        if self._work is not None and self._finish is not None:
            self._work.wait()
            self._finish()
        self._work, self._finish, self._read = None, None, ()
