"""Steps in fp32 of weights and states that rest in bf16, rounded by chance.

Rounded to the nearest, bf16 loses every change that is less than a 512th of the number: weights
stand still at small learning rates, and means over a thousand steps never move. Rounded up or down
by chance, with the nearer neighbour the likelier one, the mean is true (Zamirai et al., *Revisiting
BFloat16 Training*, 2020). One unit at a time is in fp32.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.optimizer.pieces import is_of_elements, with_entries
from lightning_zero.optimizer.states import ParamGroups, States
from lightning_zero.parameters import Piece
from lightning_zero.tensors import numel_at_a_time


class RoundedStates(States):
    """The states of an optimizer in bf16, as the weights are, each stepped in fp32."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._lent: dict[Piece, Parameter] = {}
        self._num_steps: dict[str, int] = {}

    @property
    @override
    def place(self) -> str:
        return "bf16, stepped in fp32 and rounded by chance"

    @override
    def stepped_as(self, piece: Piece) -> Tensor:
        is_rounded = piece.dtype is torch.bfloat16
        return torch.empty(0, device=piece.device) if is_rounded else piece

    @override
    def fetch(self, number: int, groups: ParamGroups) -> None:
        for group in groups:
            group["params"][:] = map(self._lend, group["params"])

    def _lend(self, piece: Parameter) -> Parameter:
        """Return what is stepped in the place of ``piece``, with its gradient and state."""
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
        for piece, stand_in in self._lent.items():  # of a step that failed
            if entries := self.optimizer.state.pop(stand_in, None):
                self.optimizer.state[piece] = entries
        self._lent.clear()

    def _noise(self, piece: Piece, step: Any) -> torch.Generator:
        """Return the noise of a piece's step: the same in every run and in all copies of it."""
        place = f"{piece.range.slot.name} {piece.range.start}"
        if place not in self._num_steps:
            # A run that was resumed goes on with its noise, if the optimizer counts steps.
            is_count = isinstance(step, int | float) or (torch.is_tensor(step) and not step.dim())
            self._num_steps[place] = int(step or 1) - 1 if is_count else 0
        self._num_steps[place] += 1
        seed = zlib.crc32(f"{place} {self._num_steps[place]}".encode())
        return torch.Generator(piece.device).manual_seed(seed)


def _rounded(piece: Piece, noise: torch.Generator, key: str, value: Any) -> Any:
    """Return an entry of a state as it rests."""
    if not is_of_elements(key, value, piece):
        return value
    out = torch.empty_like(value, dtype=piece.dtype)
    round_by_chance(value, out, noise)
    return out


def round_by_chance(source: Tensor, out: Tensor, noise: torch.Generator) -> None:
    """Write fp32 numbers to bf16 ones, up or down by chance so that the mean is true.

    Those of bf16 stay as they are, also those that are not finite.
    """
    together = numel_at_a_time(source.device)
    for part, target in zip(torch.split(source, together), torch.split(out, together), strict=True):
        # Of an fp32 number bf16 has the upper half: what is added to the lower carries by chance.
        bits = torch.randint(
            2**16, part.shape, dtype=torch.int32, device=part.device, generator=noise
        )
        bits.add_(part.view(torch.int32)).bitwise_and_(-(2**16))
        target.copy_(torch.where(part.isfinite(), bits.view(torch.float32), part))
