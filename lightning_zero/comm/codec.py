"""Quantization to 8 bits: blocks of small integers, each with a scale."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import torch
from torch import Tensor

from lightning_zero.plan import ALIGNMENT
from lightning_zero.tensors import numel_at_a_time

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
