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
                                         and none is missing; one that comes late raises
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
        self._read: list[tuple[Piece, Tensor | None, int]] = []
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
        """What steps the optimizer, if it is the only one and its step waits for the pass."""
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

    def require_final(self, unit: Unit) -> None:
        """Note that the reduction of a unit begins; raise if its gradients had been final."""
        if unit.weights.masters is not Masters.OLD:
            raise RuntimeError(
                f"A gradient of {unit.label!r} came when, by step_in_backward=True, the unit may"
                " have been stepped already, as all of its gradients had come once. Leave it out."
            )
        unit.weights.masters = Masters.PASSING

    def step(self, unit: Unit) -> None:
        """Step a unit whose reduction has ended, if it is its turn and it may be."""
        if not self._turns:
            return
        is_final = self._turns[0] is unit and unit.gradients.are_complete
        if not is_final or unit.weights.is_edited or self._step is None:
            self._turns = []
            return
        unit.gradients.lend()
        for piece in _pieces(unit):
            gradient = piece.reduced
            self._read.append((piece, gradient, 0 if gradient is None else gradient._version))
        unit.weights.masters = Masters.STEPPED
        self._step.step_ahead([_pieces(one) for one in self._turns])
        self._turns.pop(0)

    def check(self) -> None:
        """Raise if the optimizer's step finds other values than units were stepped with."""
        if not self.is_on:
            return
        if self._groups != self._hyperparameters():
            raise _differs("hyperparameters of the optimizer")
        for piece, gradient, version in self._read:
            now = piece.reduced
            if now is None or gradient is None:
                is_same = now is gradient
            else:
                is_same = now.data_ptr() == gradient.data_ptr() and now._version == version
            if not is_same:
                raise _differs(f"the gradient of {piece.range.slot.name!r}")
        for unit in self._sharded.units:
            if unit.weights.masters is Masters.STEPPED and unit.weights.is_edited:
                raise _differs(f"weights of {unit.label!r}")

    def end(self) -> None:
        """End a step, or a pass that an exception ended."""
        if not self.is_on:
            return
        self.is_on, self._turns, self._read = False, [], []
        for unit in self._sharded.units:
            unit.weights.masters = Masters.OLD

    def _hyperparameters(self) -> list[rank_check.Description]:
        return [
            rank_check.optimizer_description(optimizer, "the optimizer")
            for optimizer in self._sharded.optimizers
        ]


def _pieces(unit: Unit) -> list[Piece]:
    return [piece for flat in unit.flat_parameters for piece in flat.pieces]


def _differs(what: str) -> RuntimeError:
    return RuntimeError(
        f"Between the backward pass and the optimizer's step something has changed {what}, of which"
        " units were stepped in the pass already, by step_in_backward=True. Leave it out."
    )
