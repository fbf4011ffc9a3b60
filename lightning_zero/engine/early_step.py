"""Optimizer steps of units during the backward pass, as soon as their gradients are reduced.

::

    backward    unit 3 | unit 2 | unit 1 | unit 0 |
    reduce               unit 3   unit 2   unit 1   unit 0
    step                          unit 3   unit 2   unit 1    the rest, by the optimizer's call

A thread steps each unit when its gradients have landed on the host. The unit's files are read and
written while the next units go backward. The results are those of a step after the pass, because:

======================================== ==========================================================
no rank reads a unit's masters any more  all ranks have sent all of its gradients; a later gather
                                         in this step raises
its gradients are final                  the pass runs in the closure of the only optimizer's step,
                                         and no gradient was missing when their reduction began;
                                         one that comes after the unit was stepped raises; a step
                                         waits until they have landed
nothing comes between pass and step      the caller of :meth:`EarlyStep.allowed` vouches for it;
                                         changed gradients or hyperparameters raise in the step,
                                         and so does a pass that never ended
weights were not edited                  otherwise the unit is stepped after the pass
nothing is compiled during a step        it holds the compiler's lock; torch's optimizers compute
                                         differently while anything is compiled
all ranks agree                          by a flag that they exchange when the pass begins
======================================== ==========================================================

The first unit for which a condition does not hold ends the early step: it and all later ones are
stepped after the pass. An error leaves some units stepped: the optimizer's step is torn.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence

from lightning_zero.comm import Arrived, Work
from lightning_zero.engine import rank_check
from lightning_zero.engine.sharded_model import ShardedModel
from lightning_zero.engine.unit import Unit
from lightning_zero.engine.weights import Masters
from lightning_zero.optimizer import UnitStep, unit_step_of
from lightning_zero.parameters import Piece, settle, unsettle


class EarlyStep:
    """Steps units in the order of their reductions, each when its reduction has ended.

    Attributes:
        is_on: Whether any rank may step units in this pass; an attribute, as each unit reads it.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        self._is_allowed = False
        self.is_on = False
        # Steps the units in this pass, if all ranks want it.
        self._step: UnitStep | None = None
        # The units that are not stepped yet, next first; none once the early step has ended.
        self._turns: list[Unit] = []
        # The units that had all of this rank's gradients when their reduction began.
        self._complete: set[Unit] = set()
        self._lent: list[Lent] = []
        self._groups: list[rank_check.Description] = []
        self._has_ended = False

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Enter a context for a backward pass whose gradients reach the optimizer unchanged."""
        self._is_allowed = self._sharded.settings.step_in_backward
        try:
            yield
        finally:
            self._is_allowed = False

    def _sure_step(self) -> UnitStep | None:
        """Return the only optimizer's ``UnitStep``, if its step is waiting for its closure."""
        optimizers = self._sharded.optimizers
        step = unit_step_of(optimizers[0]) if len(optimizers) == 1 else None
        return step if step is not None and step.is_sure else None

    @property
    def is_wanted(self) -> bool:
        """Return whether this rank would step units in the pass that begins."""
        return self._is_allowed and self._sure_step() is not None

    def begin(self, turns: Sequence[Unit]) -> None:
        """Begin a pass in which all ranks want to step; ``turns`` are its units in their order."""
        self._step, self._turns, self.is_on = self._sure_step(), [*turns], True
        assert self._step is not None
        self._has_ended = False
        self._groups = self._hyperparameters()

    def note(self, unit: Unit) -> None:
        """Note that the reduction of a unit begins."""
        unit.weights.masters = Masters.PASSING
        if unit.gradients.are_complete:
            self._complete.add(unit)

    def step(self, unit: Unit) -> None:
        """Step a unit whose reduction has ended, or end the early step if it may not be stepped."""
        if not self._turns or self._step is None:
            return
        is_final = self._turns[0] is unit and unit in self._complete
        if not is_final or unit.weights.is_edited:
            self.stop()
            return
        pieces = unit.pieces
        had_any = [piece.reduced is not None for piece in pieces]
        works = unit.gradients.lend()
        settle(pieces)  # so that the stepping thread ignores what autograd does to parameters
        lent = [Lent(piece, is_first=not had) for piece, had in zip(pieces, had_any, strict=True)]
        self._lent += lent
        land = functools.partial(_land, works, lent)
        if all(isinstance(work, Arrived) for work in works):
            land()
        else:
            for piece in pieces:
                piece.gradient.landing = land  # for reads during the pass
        unit.weights.masters = Masters.STEPPED
        order = [one.pieces for one in self._turns]
        self._step.step_ahead(order, land)
        self._turns.pop(0)

    def end_pass(self) -> None:
        """Note all gradients: they have landed, and users may see and change them from now on."""
        self._has_ended = True
        for lent in self._lent:
            lent.note()

    def wait(self) -> None:
        """Wait until all units given to the thread are stepped; raise if a step failed."""
        if self._step is not None:
            self._step.wait_ahead()

    @property
    def stepped(self) -> list[bool]:
        """For each unit, whether it is stepped already."""
        return [unit.weights.masters is Masters.STEPPED for unit in self._sharded.units]

    def stop(self, late: Sequence[Unit] = (), stepped: Sequence[bool] = ()) -> None:
        """Leave all units that are not stepped yet to the optimizer's step.

        Raises:
            RuntimeError: Some rank has ``stepped`` one of the ``late`` units, which have gradients
                still to be added. Raised on all ranks.
        """
        self._turns = []
        for unit in late:
            if stepped and stepped[unit.index]:
                raise RuntimeError(
                    f"A gradient of {unit.label!r} arrived after step_in_backward=True had stepped"
                    " the unit, because each of its parameters already had a gradient. Remove"
                    " step_in_backward."
                )

    def check(self) -> None:
        """Raise if the optimizer's step finds other values than the units were stepped with."""
        if not self.is_on:
            return
        if self._lent and not self._has_ended:  # gradients may never land
            raise RuntimeError(
                "A backward pass raised an error after step_in_backward=True may have stepped some"
                " units, and the closure of the optimizer's step caught the error. Let the closure"
                " raise it, or remove step_in_backward."
            )
        self.wait()
        unsettle(lent.piece for lent in self._lent)
        if self._groups != self._hyperparameters():
            raise _differs("the hyperparameters of the optimizer")
        if self._step is not None and (what := self._step.changed_meanwhile()):
            raise _differs(f"{what} of the optimizer")
        for lent in self._lent:
            if not lent.is_as_it_was:
                raise _differs(f"the gradient of {lent.piece.range.slot.name!r}")
        for unit in self._sharded.units:
            if unit.weights.masters is Masters.STEPPED and unit.weights.is_edited:
                raise _differs(f"the weights of {unit.label!r}")

    def abandon(self) -> None:
        """Drop a pass that an exception ended, with its gradients."""
        if self._step is not None:
            self._step.stop_ahead()
        unsettle(lent.piece for lent in self._lent)
        for lent in self._lent:
            lent.piece.gradient.landing = None
            if lent.is_first:
                lent.piece.reduced = None
        self.end()

    def end(self) -> None:
        """End a step."""
        if not self.is_on:
            return
        self.stop()
        self._step, self._complete, self._lent, self.is_on = None, set(), [], False
        for unit in self._sharded.units:
            unit.weights.masters = Masters.OLD

    def _hyperparameters(self) -> list[rank_check.Description]:
        return [
            rank_check.optimizer_description(optimizer, "the optimizer")
            for optimizer in self._sharded.optimizers
        ]


class Lent:
    """A gradient that a piece was stepped with before the pass had ended.

    Attributes:
        piece: The piece.
        gradient: The gradient; ``None`` if there was none.
        is_first: Whether the piece had none from earlier passes.
    """

    def __init__(self, piece: Piece, *, is_first: bool) -> None:
        self.piece, self.gradient, self.is_first = piece, piece.reduced, is_first
        self._versions: dict[str, int] = {}

    def note(self) -> None:
        """Note the gradient's version when it landed, unless it is noted already."""
        if self.gradient is not None:
            # In one atomic call: another thread may do the same.
            self._versions.setdefault("landed", self.gradient._version)

    @property
    def is_as_it_was(self) -> bool:
        """Return whether the piece still has the same gradient, unchanged."""
        now = self.piece.reduced
        if now is None or self.gradient is None:
            return now is self.gradient
        is_there = now.data_ptr() == self.gradient.data_ptr()
        return is_there and now._version == self._versions.get("landed")


def _land(works: Iterable[Work], all_lent: Iterable[Lent]) -> None:
    """Wait until lent gradients have landed, and note their versions."""
    for work in works:
        work.wait()
    for lent in all_lent:
        lent.note()
        lent.piece.gradient.landing = None


def _differs(what: str) -> RuntimeError:
    return RuntimeError(
        f"Something changed {what} between the backward pass and the optimizer's step, but"
        " step_in_backward=True may already have stepped units with the old values. Remove"
        " step_in_backward."
    )
