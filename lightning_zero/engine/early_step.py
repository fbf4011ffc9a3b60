"""Steps of units amid a backward pass, as soon as their gradients are reduced.

::

    backward    unit 3 | unit 2 | unit 1 | unit 0 |
    reduce               unit 3   unit 2   unit 1   unit 0
    step                          unit 3   unit 2   unit 1    the rest, by the optimizer's call

The files of a unit are read, and written, while the next ones go backward. What makes the numbers
those of a step behind the pass:

======================================== ==========================================================
a unit's masters are read no more        all ranks have sent all gradients of it; a later gather in
                                         this step raises
its gradients are final                  the pass is in the closure of the only optimizer's step,
                                         and none was missing when their reduction began; one that
                                         comes when the unit is stepped raises
nothing comes between pass and step      whoever enters :meth:`EarlyStep.allowed` says so; other
                                         gradients or hyperparameters in the step raise
weights were not edited                  else the unit is stepped behind the pass
all ranks agree                          a flag that they exchange where the pass begins
======================================== ==========================================================

A unit of which one of these is not so ends the early step: it and all others are stepped behind the
pass. What raises leaves some units stepped, which the optimizer's step knows as torn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_zero.engine import rank_check
from lightning_zero.engine.sharded_model import ShardedModel
from lightning_zero.engine.unit import Unit
from lightning_zero.engine.weights import Masters
from lightning_zero.optimizer import UnitStep, unit_step_of
from lightning_zero.parameters import Piece


class EarlyStep:
    """Steps units in the order of their reductions, each when its own has ended.

    Attributes:
        is_on: Whether units are stepped in this pass on any rank.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        self._is_allowed = False
        self.is_on = False
        # Those that are not stepped yet, the next first; none when the early step has ended.
        self._turns: list[Unit] = []
        # Those that had all gradients of this rank when their reduction began.
        self._complete: set[Unit] = set()
        self._lent: list[Lent] = []
        self._groups: list[rank_check.Description] = []

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Enter a backward pass behind which the optimizer's step finds what the pass has left."""
        self._is_allowed = self._sharded.settings.step_in_backward
        try:
            yield
        finally:
            self._is_allowed = False

    @property
    def _step(self) -> UnitStep | None:
        """The steps by unit of the optimizer, if it is alone and its step waits for the pass."""
        optimizers = self._sharded.optimizers
        step = unit_step_of(optimizers[0]) if len(optimizers) == 1 else None
        return step if step is not None and step.is_sure else None

    @property
    def is_wanted(self) -> bool:
        """Return whether this rank would step units in the pass that begins."""
        return self._is_allowed and self._step is not None

    def begin(self, turns: Sequence[Unit]) -> None:
        """Begin with a pass in which all ranks want it, of units in the order of reductions."""
        self.is_on, self._turns = True, [*turns]
        self._groups = self._hyperparameters()

    def note(self, unit: Unit) -> None:
        """Note that the reduction of a unit begins."""
        unit.weights.masters = Masters.PASSING
        if unit.gradients.are_complete:
            self._complete.add(unit)

    def step(self, unit: Unit) -> None:
        """Step a unit whose reduction has ended, if it is its turn and it may be."""
        if not self._turns:
            return
        is_final = self._turns[0] is unit and unit in self._complete
        if not is_final or unit.weights.is_edited or self._step is None:
            self.stop()
            return
        pieces = unit.pieces
        have_any = [piece.reduced is not None for piece in pieces]
        unit.gradients.lend()
        for piece, had_any in zip(pieces, have_any, strict=True):
            gradient = piece.reduced
            version = 0 if gradient is None else gradient._version
            self._lent.append(Lent(piece, gradient, version, is_first=not had_any))
        unit.weights.masters = Masters.STEPPED
        self._step.step_ahead([one.pieces for one in self._turns])
        self._turns.pop(0)

    @property
    def stepped(self) -> list[bool]:
        """For each unit, whether it is stepped already."""
        return [unit.weights.masters is Masters.STEPPED for unit in self._sharded.units]

    def stop(self, late: Sequence[Unit] = (), stepped: Sequence[bool] = ()) -> None:
        """Leave all units that are not stepped yet to the optimizer's step.

        Raises:
            RuntimeError: On all ranks, of ``late`` units, of which gradients are still to be added,
                some rank has ``stepped`` one.
        """
        self._turns = []
        for unit in late:
            if stepped and stepped[unit.index]:
                raise RuntimeError(
                    f"A gradient of {unit.label!r} came when, by step_in_backward=True, the unit"
                    " was stepped already, as all of its gradients had come once. Leave it out."
                )

    def check(self) -> None:
        """Raise if the optimizer's step finds other values than units were stepped with."""
        if not self.is_on:
            return
        if self._groups != self._hyperparameters():
            raise _differs("hyperparameters of the optimizer")
        for lent in self._lent:
            if not lent.is_as_it_was:
                raise _differs(f"the gradient of {lent.piece.range.slot.name!r}")
        for unit in self._sharded.units:
            if unit.weights.masters is Masters.STEPPED and unit.weights.is_edited:
                raise _differs(f"weights of {unit.label!r}")

    def abandon(self) -> None:
        """End a pass that an exception ended: its gradients are nobody's."""
        for lent in self._lent:
            if lent.is_first:
                lent.piece.reduced = None
        self.end()

    def end(self) -> None:
        """End a step."""
        if not self.is_on:
            return
        self.stop()
        self.is_on, self._complete, self._lent = False, set(), []
        for unit in self._sharded.units:
            unit.weights.masters = Masters.OLD

    def _hyperparameters(self) -> list[rank_check.Description]:
        return [
            rank_check.optimizer_description(optimizer, "the optimizer")
            for optimizer in self._sharded.optimizers
        ]


class Lent(NamedTuple):
    """A gradient that a piece was stepped with before the pass had ended.

    Attributes:
        piece: The piece.
        gradient: What it got; ``None`` if no rank has any.
        version: How often that had been changed.
        is_first: Whether the piece had none from earlier passes.
    """

    piece: Piece
    gradient: Tensor | None
    version: int
    is_first: bool

    @property
    def is_as_it_was(self) -> bool:
        """Return whether the piece has the same, unchanged."""
        now = self.piece.reduced
        if now is None or self.gradient is None:
            return now is self.gradient
        is_there = now.data_ptr() == self.gradient.data_ptr()
        return is_there and now._version == self.version


def _differs(what: str) -> RuntimeError:
    return RuntimeError(
        f"Between the backward pass and the optimizer's step something has changed {what}, by which"
        " units may have been stepped in the pass already (step_in_backward=True). Leave it out."
    )
