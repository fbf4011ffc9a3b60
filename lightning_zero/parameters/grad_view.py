"""Views that ``parameter.grad`` shows on the module, and how user changes to it are followed.

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
nothing was sent. In between, and between steps, users may drop or replace the parameter's gradient,
which :meth:`~GradientView.follow` repeats on the piece.
"""

from __future__ import annotations

from enum import Enum
from sys import getrefcount
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_zero.parameters.sharded_grad import ShardedGrad
from lightning_zero.parameters.stand_in import OwnPart, StandIn, UnsyncedGrad
from lightning_zero.tensors import internals, lasting_tensors

_GRAD: Any = Tensor.grad


class GradState(Enum):
    """The state of a parameter's gradient, as the engine left it; see the table above."""

    NONE = "none"
    SHARDED = "sharded"
    HIDDEN = "hidden"
    UNSYNCED = "unsynced"
    UNSYNCED_ON_SHARDED = "unsynced on sharded"

    def __init__(self, _: str) -> None:
        # Not a property: optimizers read it through every piece.
        self.is_unsynced = self.name.startswith("UNSYNCED")
        self.is_hidden = self.name == "HIDDEN"


class GradientView:
    """The gradient of one parameter as its module shows it.

    Attributes:
        piece: This rank's piece of the parameter.
        sharded: The stand-in for the averaged gradient.
        state: What the engine left as the parameter's gradient.
        shown: The tensor for that state, by which a replacement by the user is noticed.
        arrival: A gradient that autograd added to :attr:`shown` before that was hidden.
        is_of_copy: Whether the average is over the ranks of one copy only (hybrid sharding).
        follows: Whether each read of the piece's gradient looks for changes by the user; not while
            an optimizer is stepping, when nothing else changes gradients.
    """

    def __init__(self, piece: OwnPart, sharded: ShardedGrad) -> None:
        self.piece = piece
        self.sharded = sharded
        self.state = GradState.NONE
        self.shown: Tensor | None = None
        self.arrival: Tensor | None = None
        self.is_of_copy, self.follows = False, True

    def __getstate__(self) -> dict[str, Any]:
        # Without gradients, like a pickled parameter; reading one would be a collective.
        none = dict.fromkeys(("sharded", "shown", "arrival"))
        flags = {"is_of_copy": False, "follows": True}
        return {"piece": self.piece, "state": GradState.NONE, **flags, **none}

    def show_sharded(self, reduced: Tensor | None = None, *, is_of_copy: bool = False) -> None:
        """Show the stand-in for the averaged gradient; the piece takes ``reduced`` if given."""
        self.is_of_copy = is_of_copy
        with internals.as_plain_tensors():
            _GRAD.__set__(self.piece.parameter, self.sharded)
            # An optimizer would make a state for a gradient without elements.
            if reduced is not None and reduced.numel():
                _GRAD.__set__(self.piece, reduced)
        self.state, self.shown = GradState.SHARDED, self.sharded

    def show_unsynced(self, held: Tensor) -> None:
        """Show ``held``, this rank's own gradient."""
        if self.state is GradState.NONE:
            self.state = GradState.UNSYNCED
        else:
            self.state = GradState.UNSYNCED_ON_SHARDED
            # A kept reference would show the sum under DDP, of which there are no pieces.
            self.sharded = self.sharded.another()
        self.shown = UnsyncedGrad(self.piece, self.sharded, held)
        self.piece.parameter.grad = self.shown

    def hide(self) -> bool:
        """Clear the parameter's gradient for autograd; return whether it was an unsynced one.

        The piece keeps its part of the averaged gradient.
        """
        with internals.as_plain_tensors():
            if _GRAD.__get__(self.piece.parameter) is not self.shown:
                self.follow()
        self.follows = True  # in case an exception ended a step
        before = self.state
        has_sharded = before is GradState.SHARDED or before is GradState.UNSYNCED_ON_SHARDED
        self.state = GradState.HIDDEN if has_sharded else GradState.NONE
        if self.shown is not None:
            self.piece.parameter.grad = self.shown = None
        return before.is_unsynced

    def show_hidden(self) -> None:
        """Show again what a backward pass that was interrupted has hidden."""
        if self.state is GradState.HIDDEN and self.shown is None and not internals.in_backward():
            self.show_sharded(is_of_copy=self.is_of_copy)

    def claim(self) -> Tensor | None:
        """Remove the gradient that autograd just finished from the parameter, and return it."""
        parameter = self.piece.parameter
        grad, self.arrival = self.arrival, None
        if grad is not None:
            parameter.grad = self.shown
            return grad
        grad, parameter.grad = parameter.grad, None
        if self.shown is not None:
            # Autograd did not add to the shown gradient, so the user had dropped it.
            self.drop()
        return grad

    def drop(self) -> None:
        """Clear the gradient of the parameter and of the piece."""
        with internals.as_plain_tensors():
            if _GRAD.__get__(self.piece.parameter) is self.shown:
                _GRAD.__set__(self.piece.parameter, None)
            self.shown = None
            # The stand-in is shown again in the next step, unless the user holds on to it, or a
            # graph, which `getrefcount` does not count in older versions of torch. A new one in
            # each step would need no count of references, and cost as much as all the rest.
            if self.state is not GradState.NONE and (
                getrefcount(self.sharded) != _ALONE or internals.num_uses(self.sharded) > 1
            ):
                self._leave()
            _GRAD.__set__(self.piece, None)
        self.state = GradState.NONE

    def _leave(self) -> None:
        """Leave the stand-in to whoever holds it, with a copy of the values; show another one."""
        part = self.piece.last_reduced
        self.sharded.kept = torch.zeros_like(self.piece.detach()) if part is None else part.clone()
        self.sharded = self.sharded.another()

    def follow(self) -> None:
        """Repeat on the piece what the user did: drop or replace the parameter's gradient.

        Ours in a view (``p.grad = p.grad.detach()``) is shown as it was, and so is one that the
        user put back while it was hidden.
        """
        piece = self.piece
        with internals.as_plain_tensors():
            theirs = _GRAD.__get__(piece.parameter)
        if theirs is None:
            self.drop()
        elif isinstance(theirs, StandIn) and theirs.piece is not piece:
            raise _of_another(piece, theirs.piece)
        elif isinstance(theirs, StandIn) and theirs.original is self.shown:
            piece.parameter.grad = self.shown
        elif isinstance(theirs, StandIn) and theirs.original is self.sharded:
            self.show_sharded(is_of_copy=self.is_of_copy)
        elif self.state.is_unsynced:
            # This rank's own: what replaces it is sent in its place, without an earlier average.
            assert self.shown is not None
            piece.parameter.grad, piece.reduced = self.shown, None
            self.state = GradState.UNSYNCED
            self.shown.copy_(theirs.detach())
        else:
            # Every rank must have assigned the same; each takes its part.
            with lasting_tensors():
                is_kept = isinstance(theirs, ShardedGrad)
                part = theirs.part if is_kept else piece.range.part_of(theirs.detach())
                part = part.to(piece.device, piece.dtype, copy=True)
            self.drop()
            self.show_sharded(part)

    def add_sharded(self, held: Tensor) -> None:
        """Add an earlier averaged gradient, if there is one, to the unsynced gradient ``held``."""
        if self.state is GradState.UNSYNCED_ON_SHARDED:
            # Every rank adds the same, so the next average leaves it unchanged.
            held.add_(self.sharded.whole())
            self.piece.reduced, self.state = None, GradState.UNSYNCED


_HOLDER = SimpleNamespace(sharded=object())
_ALONE = getrefcount(_HOLDER.sharded)
"""The reference count of a stand-in that only its view refers to."""


def _of_another(piece: OwnPart, other: OwnPart) -> RuntimeError:
    name, source = piece.range.slot.name, other.range.slot.name
    return RuntimeError(
        f"The gradient of parameter {source!r} was assigned to parameter {name!r}"
        " (`p.grad = q.grad`). Gradients are sharded over the ranks, and two parameters cannot"
        " share one. Assign a copy instead: `p.grad = q.grad.clone()`"
    )
