"""Steps in fp32 of weights and states that rest in bf16, with stochastic rounding.

Rounding to nearest, bf16 loses every change smaller than a 512th of the number: weights stand still
at small learning rates, and means over a thousand steps never move. Stochastic rounding goes up or
down at random, more likely to the nearer neighbour, so that the expected value is exact (Zamirai et
al., *Revisiting BFloat16 Training*, 2020). One unit at a time is in fp32.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.optimizer.pieces import is_of_elements, with_entries
from lightning_zero.optimizer.unit_step import ParamGroups, UnitStep
from lightning_zero.parameters import Piece
from lightning_zero.tensors import numel_at_a_time


class RoundedStep(UnitStep):
    """Steps an optimizer in fp32, with states that rest in bf16, like the weights."""

    place = "bf16, stepped in fp32 with stochastic rounding"

    def __init__(self, optimizer: Optimizer, batches: Sequence[Sequence[Piece]]) -> None:
        super().__init__(optimizer, batches)
        self._lent: dict[Piece, Parameter] = {}
        self._num_steps: dict[str, int] = {}

    @override
    def stepped_as(self, piece: Piece) -> Tensor:
        is_rounded = piece.dtype is torch.bfloat16
        return torch.empty(0, device=piece.device) if is_rounded else piece

    @override
    def fetch(self, number: int, groups: ParamGroups) -> None:
        for group in groups:
            group["params"][:] = map(self._lend, group["params"])

    def _lend(self, piece: Parameter) -> Parameter:
        """Return the parameter to step in place of ``piece``, with its gradient and state."""
        grad = piece.grad
        if not isinstance(piece, Piece) or piece.dtype is not torch.bfloat16 or grad is None:
            return piece
        stand_in = self._lent[piece] = Parameter(piece.detach().float())
        stand_in.grad = grad.float()
        state = self.optimizer.state
        if piece in state:
            state[stand_in] = with_entries(
                state.pop(piece),
                lambda key, value: value.float() if is_of_elements(key, value, piece) else value,
            )
        return stand_in

    @override
    @torch.no_grad()
    def flush(self) -> None:
        for piece, stand_in in self._lent.items():
            entries = self.optimizer.state.pop(stand_in, {})
            noise = self._noise(piece, entries.get("step"))
            if entries:
                rounded = partial(_rounded, piece, noise)
                self.optimizer.state[piece] = with_entries(entries, rounded)
            round_by_chance(stand_in.detach(), piece.detach(), noise)
        self._lent.clear()

    @override
    def close(self) -> None:
        for piece, stand_in in self._lent.items():  # left by a step that failed
            if entries := self.optimizer.state.pop(stand_in, None):
                self.optimizer.state[piece] = entries
        self._lent.clear()

    def _noise(self, piece: Piece, step: Any) -> torch.Generator:
        """Return the noise for a step of a piece: the same in every run and all copies of it."""
        place = f"{piece.range.slot.name} {piece.range.start}"
        if place not in self._num_steps:
            # A resumed run continues the noise if the optimizer counts its steps.
            is_count = isinstance(step, int | float) or (torch.is_tensor(step) and not step.dim())
            self._num_steps[place] = int(step or 1) - 1 if is_count else 0
        self._num_steps[place] += 1
        seed = zlib.crc32(f"{place} {self._num_steps[place]}".encode())
        return torch.Generator(piece.device).manual_seed(seed)


def _rounded(piece: Piece, noise: torch.Generator, key: str, value: Any) -> Any:
    """Return an entry of a state in the form in which it rests."""
    if not is_of_elements(key, value, piece):
        return value
    out = torch.empty_like(value, dtype=piece.dtype)
    round_by_chance(value, out, noise)
    return out


def round_by_chance(source: Tensor, out: Tensor, noise: torch.Generator) -> None:
    """Write fp32 numbers to a bf16 tensor, rounded at random so that the expected value is exact.

    Numbers that bf16 can represent stay as they are, and so do infinities and NaN.
    """
    together = numel_at_a_time(source.device)
    for part, target in zip(torch.split(source, together), torch.split(out, together), strict=True):
        # bf16 is the upper half of fp32: noise added to the lower half carries at random.
        bits = torch.randint(
            2**16, part.shape, dtype=torch.int32, device=part.device, generator=noise
        )
        bits.add_(part.view(torch.int32)).bitwise_and_(-(2**16))
        target.copy_(torch.where(part.isfinite(), bits.view(torch.float32), part))
