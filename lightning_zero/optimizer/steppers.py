"""Steppers of the optimizers that engines have adopted, and what becomes of their states.

=============== ================================= ================================================
stepper         steps                             states on each rank
=============== ================================= ================================================
``Stepper``     all pieces in one call            of its pieces
``UnitStep``    pieces, one unit after the other  of its pieces, in memory or in files
``WholeStep``   whole parameters                  of those it owns, or of all
=============== ================================= ================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.optimizer.known import Way
from lightning_zero.optimizer.pieces import FindPiece, cut_state, held_by, owned
from lightning_zero.optimizer.shared_state import OfOptimizer, bare
from lightning_zero.optimizer.shown import Shown
from lightning_zero.parameters import Piece


class Stepper(OfOptimizer):
    """Steps an optimizer: here by element, all pieces in the user's own call.

    Attributes:
        way: How the optimizer is stepped.
        is_torn: Whether some units are stepped and others not.
        steps_before_call: Whether it steps members before the user's own call of ``step``, and so
            after all pre-hooks.
        shown: What the optimizer shows between steps; ``None`` if it belongs to no engine.
    """

    way = Way.BY_ELEMENT
    is_torn = False
    steps_before_call = False
    shown: Shown | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether it steps whole parameters, which have whole states."""
        return self.way is not Way.BY_ELEMENT

    @property
    def has_own_format(self) -> bool:
        """Return whether only the optimizer itself knows the format of its state dict."""
        return False

    def attach(self) -> None:
        """Be what :func:`stepper_of` returns for the optimizer."""
        setattr(self.optimizer, _NAME, self)

    def stepped_as(self, piece: Piece) -> Tensor:
        """Return a tensor with the dtype and on the device in which a piece is stepped."""
        return piece

    def require_room(self, find_piece: FindPiece) -> None:
        """Raise on all ranks if there is no room for the states of new param group members."""

    def take(self, pieces: Iterable[Piece]) -> None:
        """Note the pieces that the optimizer holds."""

    # -- states ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict with what this rank keeps of the states."""
        with self.holding_parts():
            return self.optimizer.state_dict()

    def holding_parts(self) -> AbstractContextManager[None]:
        """Return a context in which the optimizer holds this rank's parts, as in a step."""
        return nullcontext() if self.shown is None else self.shown.hidden()

    def part_of(self, state: Mapping[str, Any], piece: Piece) -> Mapping[str, Any] | None:
        """Return a copy of the part of a parameter's state that this rank keeps, if any."""
        return self.kept(cut_state(state, piece), piece)

    def kept(self, state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
        """Return a copy of a piece's state where states rest."""
        return owned(state)  # type: ignore[no-any-return]

    def keeps_state_of(self, piece: Piece) -> bool:
        """Return whether this rank has the optimizer's state for a parameter, or a part of it."""
        return piece.numel() > 0 or not piece.range.slot.numel

    @contextmanager
    def whole_members(self) -> Iterator[None]:
        """Enter a context in which an optimizer that steps all at once has whole parameters.

        They are without values, in the param groups and as keys of the states.
        """
        yield

    # -- a step ----------------------------------------------------------------------------------

    def mean_of(self, loss: Any) -> Any:
        """Return what a closure's loss is to the optimizer."""
        return loss

    def begin(self) -> None:
        """Prepare for the user's own call on what is then in the param groups."""

    def end(self) -> None:
        """Take in what that call has stepped."""

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Enter a context, within a step, in which the param groups hold all pieces."""
        yield

    def abandon(self) -> None:
        """Restore the param groups after a step that an exception ended."""
        if self.shown is not None:
            self.shown.show()

    def remove(self) -> None:
        """Stop stepping: the engine has ended."""
        self.abandon()

    def check(self) -> None:
        """Clean up after a step that an exception ended; raise if it is torn."""
        self.abandon()

    def describe(self, reason: str) -> str | None:
        """Return a line on how the optimizer is stepped, and the cost; ``None`` if as usual."""
        return None


_NAME = "_lightning_zero_stepper"


def stepper_of(optimizer: Optimizer) -> Stepper:
    """Return what steps an optimizer, or did in a run that has ended."""
    found = vars(bare(optimizer)).get(_NAME)
    return found if isinstance(found, Stepper) else Stepper(optimizer)


def are_torn(optimizers: Iterable[Optimizer]) -> bool:
    """Return whether a step of one of them ended half-way, on this rank."""
    return any(stepper_of(optimizer).is_torn for optimizer in optimizers)


def require_whole_steps(optimizers: Iterable[Optimizer]) -> None:
    """Raise a ``RuntimeError`` if a step of one of them ended half-way."""
    for stepper in map(stepper_of, optimizers):
        if stepper.is_torn:
            stepper.check()


def pieces_of(optimizer: Optimizer, find_piece: FindPiece | None = None) -> list[Piece]:
    """Return the pieces of the parameters that an optimizer holds.

    With ``find_piece``, include those of parameters that were added since its last step.
    """
    found = [
        one if isinstance(one, Piece) or find_piece is None else find_piece(one)
        for one in members(optimizer)
    ]
    return [one for one in found if isinstance(one, Piece)]


def members(optimizer: Optimizer) -> list[Parameter]:
    """Return the pieces, and parameters of no engine, that an optimizer steps, in order."""
    shown = stepper_of(optimizer).shown
    pieces = {} if shown is None else shown.pieces
    return [pieces.get(id(member), member) for member in held_by(optimizer)]
