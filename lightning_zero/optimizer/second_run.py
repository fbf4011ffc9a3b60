"""An optimizer whose run has ended, in a run that continues with the parts of its states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.comm import Communicator
from lightning_zero.optimizer.pieces import FindPiece, exchange, with_entries
from lightning_zero.optimizer.shown import ENDED
from lightning_zero.optimizer.steppers import Stepper, pieces_of, stepper_of
from lightning_zero.parameters import Piece


def end(optimizer: Optimizer) -> None:
    """Let an optimizer refuse what needs the engine that owns its pieces, which has ended."""
    if (shown := stepper_of(optimizer).shown) is not None and shown.pieces:
        shown.comm = None


def take_over(
    optimizer: Optimizer, find_piece: FindPiece, stepper: Stepper, comm: Communicator
) -> Sequence[Piece]:
    """Point an optimizer at this run's pieces if it holds those of another run; return them.

    Raises:
        ValueError: On any rank, its parts or the way in which it steps are not those of this run.
    """
    before = stepper_of(optimizer)
    pairs = [(old, find_piece(old.parameter)) for old in pieces_of(optimizer)]
    pairs = [(old, new) for old, new in pairs if old is not new]
    is_alike = before.way is stepper.way and all(_part(old) == _part(new) for old, new in pairs)
    if pairs and not all(comm.control.gather_objects(is_alike)):
        raise ValueError(ENDED.format(kind=type(optimizer).__name__))
    new = [piece for _, piece in pairs if piece is not None]
    if new and before.shown is not None:
        before.check()
        before.shown.hide()
        exchange(optimizer, [old for old, _ in pairs], new)
    return new


def bring_to_rest(optimizer: Optimizer, pieces: Sequence[Piece], stepper: Stepper) -> None:
    """Bring states of another run, moved to the host when it ended, to where they rest in this."""
    for piece in pieces:
        device = stepper.stepped_as(piece).device

        def moved(key: str, value: Any, device: torch.device = device) -> Any:
            return value.to(device) if isinstance(value, Tensor) and key != "step" else value

        if isinstance(state := optimizer.state.get(piece), Mapping):
            optimizer.state[piece] = stepper.kept(with_entries(state, moved), piece)


def _part(piece: Piece | None) -> Any:
    return None if piece is None else (piece.range.start, piece.range.stop, piece.dtype)
