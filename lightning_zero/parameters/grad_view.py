"""The gradient that ``parameter.grad`` shows on the module, and what users make of it.

==================== ================================ ============================================
state                ``parameter.grad``               the piece's part of the averaged gradient
==================== ================================ ============================================
NONE                 ``None``                         none
SHARDED              a ShardedGrad                    what the stand-in stands for
HIDDEN               ``None``                         kept, while a backward pass runs
UNSYNCED             an UnsyncedGrad: this rank's own none
UNSYNCED_ON_SHARDED  an UnsyncedGrad                  kept, to be added at the first use
==================== ================================ ============================================

A backward pass begins with :meth:`GradientView.hide`, since autograd adds to what it finds, and
ends with :meth:`~GradientView.show_sharded`, or with :meth:`~GradientView.show_unsynced` where
nothing was sent. In between, and between steps, users may drop the parameter's gradient or put
another in its place, which :meth:`~GradientView.follow` repeats on the piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from sys import getrefcount
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_zero.parameters.sharded_grad import ShardedGrad
from lightning_zero.parameters.stand_in import StandIn
from lightning_zero.parameters.unsynced_grad import UnsyncedGrad
from lightning_zero.tensors import internals, lasting_tensors

if TYPE_CHECKING:
    from lightning_zero.parameters.piece import Piece

_GRAD: Any = Tensor.grad


class GradState(Enum):
    """The state of a parameter's gradient, as the engine left it; the table above says more."""

    NONE = "none"
    SHARDED = "sharded"
    HIDDEN = "hidden"
    UNSYNCED = "unsynced"
    UNSYNCED_ON_SHARDED = "unsynced on sharded"

    def __init__(self, _: str) -> None:
        # An attribute, as optimizers ask for it through every piece.
        self.is_unsynced = self.name.startswith("UNSYNCED")


def drop_gradients(pieces: Iterable[Piece]) -> None:
    """Let neither the parameters of ``pieces`` nor the pieces have gradients."""
    with internals.as_plain_tensors():
        for piece in pieces:
            if piece.gradient.state is not GradState.NONE:
                piece.gradient.drop()
            _GRAD.__set__(piece.parameter, None)
            _GRAD.__set__(piece, None)


def averages(pieces: Sequence[Piece]) -> list[Tensor | None]:
    """Return what each piece has of its averaged gradient, and follow what users made of that."""
    with internals.as_plain_tensors():
        for piece in pieces:
            if _GRAD.__get__(piece.parameter) is not piece.gradient.shown:
                piece.gradient.follow()
        return list(map(_GRAD.__get__, pieces))


class GradientView:
    """The gradient of one parameter as its module shows it.

    Attributes:
        piece: This rank's piece of the parameter.
        sharded: The stand-in for the averaged gradient.
        state: What the engine left as the parameter's gradient.
        shown: The tensor for that state, to notice that the user has left another.
        arrival: A gradient that autograd added to :attr:`shown` before it was hidden.
        is_of_copy: Whether the average is one over the ranks of one copy of what is sharded.
        is_settled: Whether nobody but an optimizer, which steps now, changes gradients.
        landing: Waits until the piece's part has its numbers; ``None`` if it has.
    """

    def __init__(self, piece: Piece, sharded: ShardedGrad) -> None:
        self.piece = piece
        self.sharded = sharded
        self.state = GradState.NONE
        self.shown: Tensor | None = None
        self.arrival: Tensor | None = None
        self.is_of_copy = self.is_settled = False
        self.landing: Callable[[], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # As a pickled parameter has no gradient; to read one takes all ranks, in one order.
        none = dict.fromkeys(("sharded", "shown", "arrival", "landing"))
        flags = dict.fromkeys(("is_of_copy", "is_settled"), False)
        return {"piece": self.piece, "state": GradState.NONE, **flags, **none}

    def show_sharded(self, reduced: Tensor | None = None, *, is_of_copy: bool = False) -> None:
        """Show the stand-in for what the piece holds of the averaged gradient, or ``reduced``."""
        self.is_of_copy = is_of_copy
        with internals.as_plain_tensors():
            _GRAD.__set__(self.piece.parameter, self.sharded)
            # An optimizer that saw a gradient of no elements would make a state for it.
            if reduced is not None and reduced.numel():
                _GRAD.__set__(self.piece, reduced)
        self.state, self.shown = GradState.SHARDED, self.sharded

    def show_unsynced(self, held: Tensor) -> None:
        """Show the gradient ``held``, which is this rank's own."""
        if self.state is GradState.NONE:
            self.state = GradState.UNSYNCED
        else:
            self.state = GradState.UNSYNCED_ON_SHARDED
            # One that is kept would be the sum under DDP, of which there are no pieces.
            self.sharded = self.sharded.another()
        self.shown = UnsyncedGrad(self.piece, self.sharded, held)
        self.piece.parameter.grad = self.shown

    def hide(self) -> bool:
        """Clear the parameter for autograd's own gradient; return whether an unsynced one was left.

        The piece keeps what it has of the averaged gradient.
        """
        with internals.as_plain_tensors():
            if _GRAD.__get__(self.piece.parameter) is not self.shown:
                self.follow()
        self.is_settled = False  # also if an exception ended a step
        before = self.state
        has_sharded = before is GradState.SHARDED or before is GradState.UNSYNCED_ON_SHARDED
        self.state = GradState.HIDDEN if has_sharded else GradState.NONE
        if self.shown is not None:
            self.piece.parameter.grad = self.shown = None
        return before.is_unsynced

    def claim(self) -> Tensor | None:
        """Take the gradient that autograd just finished off the parameter."""
        parameter = self.piece.parameter
        grad, self.arrival = self.arrival, None
        if grad is not None:
            parameter.grad = self.shown
            return grad
        grad, parameter.grad = parameter.grad, None
        if self.shown is not None:
            # Autograd did not add to what was shown, so the user had dropped it.
            self.drop()
        return grad

    def drop(self) -> None:
        """Let neither the parameter nor the piece have a gradient."""
        with internals.as_plain_tensors():
            if _GRAD.__get__(self.piece.parameter) is self.shown:
                _GRAD.__set__(self.piece.parameter, None)
            self.shown = None
            # Older versions of torch do not tell Python of what C++ holds: a graph, another's grad.
            if self.state is not GradState.NONE and (
                getrefcount(self.sharded) != _ALONE or internals.num_uses(self.sharded) > 1
            ):
                self._leave()
            _GRAD.__set__(self.piece, None)
        self.state = GradState.NONE

    def _leave(self) -> None:
        """Let the stand-in, which somebody keeps, have the values for itself from now on.

        Not a new one in each step, which would cost as much as all else that is done there.
        """
        if self.landing is not None:
            self.landing()
        part = self.piece.kept
        self.sharded.kept = torch.zeros_like(self.piece.detach()) if part is None else part.clone()
        self.sharded = self.sharded.another()

    def follow(self) -> None:
        """Repeat what the user did: dropped the parameter's gradient, or put another there."""
        piece = self.piece
        with internals.as_plain_tensors():
            theirs = _GRAD.__get__(piece.parameter)
        if theirs is None:
            self.drop()
        elif isinstance(theirs, StandIn) and theirs.piece is not piece:
            raise _of_another(piece, theirs.piece)
        elif isinstance(theirs, StandIn) and theirs.original is self.shown:
            piece.parameter.grad = self.shown
        elif isinstance(theirs, StandIn) and theirs.original is self.sharded:  # it was hidden
            self.show_sharded(is_of_copy=self.is_of_copy)
        elif self.state.is_unsynced:
            assert self.shown is not None
            piece.parameter.grad, piece.reduced = self.shown, None
            self.state = GradState.UNSYNCED
            self.shown.copy_(theirs.detach())
        else:
            with lasting_tensors():
                is_kept = isinstance(theirs, ShardedGrad)
                part = theirs.part if is_kept else piece.range.part_of(theirs.detach())
                part = part.to(piece.device, piece.dtype, copy=True)
            self.drop()
            self.show_sharded(part)

    def add_sharded(self, held: Tensor) -> None:
        """Add the averaged gradient of before, if there is one, to the unsynced one ``held``."""
        if self.state is GradState.UNSYNCED_ON_SHARDED:
            # Averaging it once more, with what every rank adds, leaves it what it is.
            held.add_(self.sharded.whole())
            self.piece.reduced, self.state = None, GradState.UNSYNCED


_HOLDER = SimpleNamespace(sharded=object())
_ALONE = getrefcount(_HOLDER.sharded)
"""The uses of a stand-in that its view alone has: nobody keeps it."""


def _of_another(piece: Piece, other: Piece) -> RuntimeError:
    name, source = piece.range.slot.name, other.range.slot.name
    return RuntimeError(
        f"The gradient of parameter {source!r} was assigned to parameter {name!r}"
        " (`p.grad = q.grad`). Gradients lie in pieces over the ranks, and two parameters cannot"
        " share one. Assign a copy: `p.grad = q.grad.clone()`"
    )
