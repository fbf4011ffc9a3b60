"""Transport of weights and gradients quantized to 8 bits per element.

A gather sends each rank's quantized shard, and every rank decodes all of them, including its own,
so that all get the same bits. A reduction is an all-to-all of quantized gradients, which each rank
decodes and adds up in fp32: no sum is ever quantized.
"""

from __future__ import annotations

import zlib
from enum import Enum

import torch
from torch import Tensor

from lightning_zero.comm.codec import Codec
from lightning_zero.comm.transport import Pending, ReduceBuffer, Shards, Transport, Verbs
from lightning_zero.plan import ALIGNMENT
from lightning_zero.tensors import Work


class Cargo(Enum):
    """Data that is sent in code; the value is the kind of memory that its codes count as."""

    WEIGHTS = "gathered"
    """Rounded to nearest: the same masters always give the same weights."""
    GRADIENTS = "unreduced"
    """Rounded stochastically, so that errors have no direction in which they add up."""


class Coded(Verbs):
    """Quantized gathers and reductions of one store along one axis.

    Args:
        transport: Carries the codes.
        cargo: What is sent.
        ranks: The transport's ranks as this rank's noise knows them: equal on ranks that have parts
            of one model, whose parameters that are not cut stay alike.

    Attributes:
        size: Ranks along the axis.
    """

    def __init__(self, transport: Transport, cargo: Cargo, ranks: tuple[int, ...]) -> None:
        self.size = transport.size
        self._transport = transport
        self._cargo, self._ranks = cargo, ranks
        self._num_coded = 0

    def gather(self, out: Tensor, source: Shards, *, unit: str, tag: int) -> Work:
        """Gather like :meth:`Transport.gather`, in code."""
        codec = Codec(source.own.numel())
        codes = self._buffer(self.size * codec.nbytes)
        own = codes.view(self.size, codec.nbytes)[self._transport.rank]
        codec.encode(source.own, own, self._noise(unit, tag, codes.device))
        work = self._transport.gather(codes, Shards(own), unit=unit, tag=tag)
        return Pending(work, then=lambda: codec.decode(codes, out))

    def reduce_buffer(self, numel: int, dtype: torch.dtype) -> ReduceBuffer:
        """Return memory for the source of :meth:`reduce`."""
        return self._transport.reduce_buffer(numel, dtype)

    def reduce(self, out: Tensor, source: ReduceBuffer, *, unit: str, tag: int) -> Work:
        """Reduce like :meth:`Transport.reduce`, in code; ``source`` has been read on return."""
        codec = Codec(out.numel())
        sent = self._buffer(self.size * codec.nbytes)
        codec.encode(source.tensor, sent, self._noise(unit, tag, sent.device))
        received = self._buffer(sent.numel())
        work = self._transport.all_to_all(received, sent, out, unit=unit, tag=tag)
        return Pending(work, then=lambda: codec.add_up(received, out), kept=[sent])

    def all_reduce(self, tensor: Tensor, *, unit: str, tag: int) -> Work:
        """Add up like :meth:`Transport.all_reduce`, in code both ways.

        Ranks take part in whole blocks: a tensor of another size is padded with zeros.
        """
        numel, multiple = tensor.numel(), self.size * ALIGNMENT
        padded = -(-numel // multiple) * multiple
        if padded == numel:
            return super().all_reduce(tensor, unit=unit, tag=tag)
        whole = self._transport.passing_buffer(padded, tensor.dtype, self._cargo.value)
        whole[:numel].copy_(tensor)
        whole[numel:].zero_()
        work = super().all_reduce(whole, unit=unit, tag=tag)
        return Pending(work, then=lambda: tensor.copy_(whole[:numel]))

    def _buffer(self, nbytes: int) -> Tensor:
        return self._transport.passing_buffer(nbytes, torch.uint8, self._cargo.value)

    def _noise(self, unit: str, tag: int, device: torch.device) -> torch.Generator | None:
        """Return this rank's noise for a unit's next code, the same in every run."""
        if self._cargo is Cargo.WEIGHTS:
            return None
        if device.type == "meta":
            return torch.default_generator
        self._num_coded += 1
        number, rank = self._num_coded, self._transport.rank
        seed = zlib.crc32(f"{unit} {tag} {self._ranks} {rank} {number}".encode())
        return torch.Generator(device).manual_seed(seed)
