"""Transport of weights and gradients in 8 bits: blocks of small integers, each with a scale.

A gather sends each rank's quantized shard, and every rank decodes all of them, including its own,
so that all get the same bits. A reduction is an all-to-all of quantized gradients, which each rank
decodes and adds up in fp32: no sum is ever quantized.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from math import inf

import torch
from torch import Tensor

from lightning_zero.comm.control import Pending
from lightning_zero.comm.transport import ReduceBuffer, Shards, Transport
from lightning_zero.plan import ALIGNMENT
from lightning_zero.tensors import Work, numel_at_a_time

_HIGHEST = 127
_LEAST = 1e-35
"""Least maximum from which a scale is made, so that it and its inverse are finite and normal."""


class Codec:
    """A quantizer of flat tensors, which allocates no more than a few chunks.

    Elements are divided by the **scale** of their block, which maps its largest to the largest
    integer, and rounded. Blocks of 64 elements never span two parameters, which are aligned to 64.
    A non-finite element makes its whole block non-finite. The bytes of a part::

        | a scale for each block, fp32 | integers |

    Args:
        numel: Elements of a part, a multiple of 64.

    Attributes:
        numel: As given.
        nbytes: Bytes of an encoded part.
    """

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self._num_blocks = numel // ALIGNMENT
        self._scale_bytes = 4 * self._num_blocks
        self.nbytes = self._scale_bytes + numel

    def encode(self, source: Tensor, codes: Tensor, noise: torch.Generator | None = None) -> None:
        """Encode ``source`` (``[parts * numel]``) to ``codes`` (``[parts * nbytes]``).

        Rounds to nearest or, with ``noise``, stochastically and without bias.
        """
        for block, scale, integers in self._chunks(source, codes):
            block = block.float()
            largest = torch.linalg.vector_norm(block, inf, dim=-1)
            scale.copy_(largest.clamp_min_(_LEAST).div_(_HIGHEST))
            values = block / scale.unsqueeze(-1)
            if noise is None:
                values.round_()
            else:
                by = torch.rand(values.shape, generator=noise, device=values.device)
                values.add_(by).floor_()
            values.clamp_(-_HIGHEST, _HIGHEST)
            integers.copy_(values)

    def decode(self, codes: Tensor, out: Tensor) -> None:
        """Decode ``codes`` (``[parts * nbytes]``) to ``out`` (``[parts * numel]``)."""
        for block, scale, integers in self._chunks(out, codes):
            torch.mul(integers.float(), scale.unsqueeze(-1), out=block)

    def add_up(self, codes: Tensor, out: Tensor) -> None:
        """Write the sum of all parts to ``out`` (``[numel]``), added in fp32 in their order."""
        if not self.numel:
            return
        whole = out.expand(codes.numel() // self.nbytes, -1)
        for blocks, scale, integers in self._chunks(whole, codes):
            total = torch.zeros(blocks.shape[1:], device=out.device)
            for part, part_scale in zip(integers.float(), scale, strict=True):
                total.addcmul_(part, part_scale.unsqueeze(-1))
            blocks[0].copy_(total)

    def _chunks(self, values: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield chunks of blocks of all parts, with scales and integers."""
        if not self.numel:
            return
        parts = codes.numel() // self.nbytes
        blocks = values.view(parts, self._num_blocks, ALIGNMENT)
        rows = codes.view(parts, self.nbytes)
        scales = rows[:, : self._scale_bytes].view(torch.float32)
        integers = rows[:, self._scale_bytes :].view(torch.int8)
        integers = integers.view(parts, self._num_blocks, ALIGNMENT)
        step = max(1, numel_at_a_time(codes.device) // (parts * ALIGNMENT))
        for start in range(0, self._num_blocks, step):
            chunk = slice(start, start + step)
            yield blocks[:, chunk], scales[:, chunk], integers[:, chunk]


class Coded:
    """Quantized gathers and reductions of one store along one axis.

    Weights are rounded to nearest: the same masters always give the same. Gradients are rounded
    stochastically, so that errors have no direction in which they add up.

    Args:
        transport: Carries the codes.
        ranks: The transport's ranks, which seed the noise: the same on ranks that have parts of one
            model, so that parameters that are not cut stay equal.
    """

    def __init__(self, transport: Transport, ranks: tuple[int, ...]) -> None:
        self._transport, self._size, self._ranks = transport, transport.size, ranks
        self._num_coded = 0

    def gather(
        self,
        out: Tensor,
        source: Shards,
        *,
        unit: str,
        tag: int,
        noise: torch.Generator | None = None,
    ) -> Work:
        """Gather like :meth:`Transport.gather`, quantized; with ``noise``, sums of gradients."""
        codec = Codec(source.own.numel())
        codes = self._buffer(codec, "gathered" if noise is None else "unreduced")
        own = codes.view(self._size, codec.nbytes)[self._transport.rank]
        codec.encode(source.own, own, noise)
        work = self._transport.gather(codes, Shards(own), unit=unit, tag=tag)
        return Pending([work], then=lambda: codec.decode(codes, out))

    def reduce(self, out: Tensor, source: ReduceBuffer, *, unit: str, tag: int) -> Work:
        """Reduce like :meth:`Transport.reduce`, quantized; ``source`` has been read on return."""
        codec = Codec(out.numel())
        sent, received = self._buffer(codec, "unreduced"), self._buffer(codec, "unreduced")
        codec.encode(source.tensor, sent, self._noise(unit, tag, sent.device))
        work = self._transport.all_to_all(received, sent, unit=unit, tag=tag)
        return Pending([work], then=lambda: codec.add_up(received, out))

    def all_reduce(self, tensor: Tensor, *, unit: str, tag: int) -> Work:
        """Add up gradients like :meth:`Transport.all_reduce`, quantized both ways.

        Ranks take part in whole blocks: a tensor of another size is padded with zeros.
        """
        numel, multiple = tensor.numel(), self._size * ALIGNMENT
        whole, padded = tensor, -(-numel // multiple) * multiple
        if padded != numel:
            whole = self._transport.passing_buffer(padded, tensor.dtype, "unreduced")
            whole[:numel].copy_(tensor)
            whole[numel:].zero_()
        part = whole.new_empty(padded // self._size)

        def gather() -> None:
            noise = self._noise(unit, tag, part.device)
            self.gather(whole, Shards(part), unit=unit, tag=tag, noise=noise).wait()
            if whole is not tensor:
                tensor.copy_(whole[:numel])

        reduced = self.reduce(part, ReduceBuffer(whole), unit=unit, tag=tag)
        return Pending([reduced], then=gather)

    def _buffer(self, codec: Codec, kind: str) -> Tensor:
        return self._transport.passing_buffer(self._size * codec.nbytes, torch.uint8, kind)

    def _noise(self, unit: str, tag: int, device: torch.device) -> torch.Generator:
        """Return this rank's noise for a unit's next code, the same in every run."""
        if device.type == "meta":
            return torch.default_generator
        self._num_coded += 1
        number, rank = self._num_coded, self._transport.rank
        seed = zlib.crc32(f"{unit} {tag} {self._ranks} {rank} {number}".encode())
        return torch.Generator(device).manual_seed(seed)
