"""An optimizer whose run has ended: what it refuses, and how a second run goes on with its states.

It holds this rank's parts only. The same ranks, with the same parts, may go on with them. Anybody
else would step it differently on each rank, or save parts as if they were whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_zero.comm import Communicator
from lightning_zero.optimizer.announced import Around
from lightning_zero.optimizer.optimizer_copy import with_inner
from lightning_zero.optimizer.pieces import FindPiece, exchange, take_state
from lightning_zero.optimizer.shown import ENDED
from lightning_zero.optimizer.steppers import Stepper, pieces_of, stepper_of
from lightning_zero.parameters import Piece


def end(optimizer: Optimizer) -> None:
    """Make an optimizer refuse what needs the engine that owns its pieces, which has ended."""
    stepper = stepper_of(optimizer)
    if stepper.shown is None or not stepper.shown.pieces:
        return
    stepper.shown.comm = None
    stepper.endings = [
        optimizer.register_step_pre_hook(lambda *_: _refuse(optimizer, str)),
        *(
            Around(holder, name, _refuse, optimizer)
            for holder in with_inner(optimizer)
            for name in ("train", "eval", "state_dict", "__getstate__")
        ),
    ]


def _refuse(optimizer: Optimizer, method: Callable[..., Any], *args: Any) -> Any:
    shown = stepper_of(optimizer).shown
    if shown is not None and shown.is_lent:  # to be saved by all ranks
        return method(*args)
    raise RuntimeError(ENDED.format(kind=type(optimizer).__name__))


class SecondRun:
    """The parts that an optimizer may have from a run that has ended, to go on in this one.

    Args:
        optimizer: The user's optimizer.
        find_piece: Returns this run's piece of a parameter.
        comm: The ranks.

    Raises:
        ValueError: This run's pieces are not those of the run that has ended, on any rank.
        RuntimeError: That run ended within a step.
    """

    def __init__(self, optimizer: Optimizer, find_piece: FindPiece, comm: Communicator) -> None:
        self._optimizer, self._comm = optimizer, comm
        self._before = stepper_of(optimizer)
        pairs = [(piece, find_piece(piece.parameter)) for piece in pieces_of(optimizer)]
        self._old = [old for old, new in pairs if old is not new]
        self._new = [new for old, new in pairs if old is not new and new is not None]
        if self._old:
            self._before.check()
            self._agree(list(map(_part, self._old)) == list(map(_part, self._new)))
            assert self._before.shown is not None
            self._before.shown.hide()
            exchange(optimizer, self._old, self._new)

    def give_to(self, stepper: Stepper) -> None:
        """Bring the states to where they rest in this run, if it steps them as the other one."""
        if not self._old:
            return
        before, pairs = self._before, zip(self._old, self._new, strict=True)
        is_alike = before.way is stepper.way and all(
            before.keeps_state_of(old) == stepper.keeps_state_of(new) for old, new in pairs
        )
        try:
            self._agree(is_alike)
        except ValueError:
            assert stepper.shown is not None
            assert before.shown is not None
            stepper.shown.hide()
            exchange(self._optimizer, self._new, self._old)
            before.attach()
            before.shown.show()
            raise
        for handle in before.endings:
            handle.remove()

        def kept(state: Any, piece: Piece) -> dict[str, Any]:
            return stepper.kept(_on(stepper.stepped_as(piece).device, state), piece)

        moved = dict(zip(self._new, self._new, strict=True))
        with stepper.holding_parts():
            take_state(self._optimizer, moved, kept)

    def _agree(self, is_alike: bool) -> None:
        if not all(self._comm.control.gather_objects(is_alike)):
            raise ValueError(ENDED.format(kind=type(self._optimizer).__name__))


def _on(device: torch.device, state: Any) -> Any:
    """Return a state on the device: a Trainer moved all but ``step`` to the host in the end."""

    def moved(value: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)

    if not isinstance(state, Mapping):
        return moved(state)
    return {key: value if key == "step" else moved(value) for key, value in state.items()}


def _part(piece: Piece) -> Any:
    return id(piece.parameter), piece.range.start, piece.range.stop, piece.dtype
