"""Whose gradients are reduced when: one order on all ranks, whatever each of them computes.

A rank waits for a unit's reduction before it starts the next but one, so that whole gradients of
two units at most are in memory. Waiting is safe only if every rank goes through the same units in
the same order: two ranks that reduced what is ready, one expert here and another there, would wait
for each other for ever. So each backward pass has its **turns**, the same on every rank:

1. The order is that in which rank 0 went backward through the units of its first step.
2. A unit has a turn if any rank ran it in this step.
3. When a unit's turn comes, a rank reduces it if its gradients are all there, if its backward is
   over, or if this rank never ran it (it sends zeros). Otherwise the turn waits.
4. At the end of the backward pass the turns that are left are taken, then those units once more
   for which a gradient came after their turn on any rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from lightning_zero.comm import Comm, Work
from lightning_zero.meeting import Subject
from lightning_zero.unit import Unit


class Turns:
    """The reductions of a backward pass, in the order of all ranks.

    Args:
        units: All units, the root last.
        comm: The ranks.
    """

    def __init__(self, units: list[Unit], comm: Comm) -> None:
        self._units = units
        self._comm = comm
        num_parameters = sum(len(bundle.parameters) for unit in units for bundle in unit.bundles)
        comm.meetings.reserve(len(units) + num_parameters)
        self._order: list[Unit] | None = None
        self._left: list[Unit] | None = None
        self._under_way: Unit | None = None
        self._flags = torch.empty(0)
        self._work: Work | None = None

    def begin(self, forward_order: Iterable[int]) -> None:
        """Start a backward pass: tell the other ranks which units this one ran.

        Args:
            forward_order: The units' indices in the order in which this rank ran them.
        """
        if self._order is None:
            ran = [index for index in dict.fromkeys(forward_order) if index < len(self._units) - 1]
            agreed = self._comm.broadcast_object(ran)
            rest = [unit.index for unit in self._units[:-1] if unit.index not in agreed]
            # The root has run from the beginning to the end.
            self._order = [self._units[index] for index in (*reversed(agreed), *reversed(rest), -1)]
        self._left = None
        self._flags = torch.tensor(
            [unit.has_run for unit in self._units], dtype=torch.uint8, device="cpu"
        )
        self._flags[-1] = 1
        self._work = self._comm.meetings.call(Subject.BEGIN, self._flags)

    def advance(self) -> None:
        """Start the reductions whose turn has come."""
        left = self._left if self._left is not None else self._turns_left()
        while left and (left[0].is_complete or self._is_over(left[0])):
            self._reduce(left.pop(0))

    def _is_over(self, unit: Unit) -> bool:
        """Whether no further gradient of ``unit`` is expected, though some are missing."""
        return unit is not self._units[-1] and (unit.is_passed or not unit.has_run)

    def _turns_left(self) -> list[Unit]:
        if self._left is None:
            assert self._order is not None
            assert self._work is not None
            self._work.wait()
            has_turn = self._flags.tolist()
            self._left = [unit for unit in self._order if has_turn[unit.index] and unit.wants_grads]
        return self._left

    def _reduce(self, unit: Unit) -> None:
        # One reduction is under way behind the backward of the next unit; two would only hold
        # memory.
        if self._under_way is not None:
            self._under_way.finish_reduce()
        unit.reduce()
        self._under_way = unit

    def finish(self) -> None:
        """Take the turns that are left and show the gradients to the optimizer.

        A parameter that no rank used keeps no gradient, as in a plain loop.
        """
        left = self._turns_left()
        while left:
            self._reduce(left.pop(0))
        late = [unit.has_arrivals for unit in self._units]
        reducers = [bundle.reducer for unit in self._units for bundle in unit.bundles]
        held = [flag for reducer in reducers for flag in reducer.has_grads]
        agreed = torch.tensor([*late, *held], dtype=torch.uint8, device="cpu")
        self._comm.meetings.call(Subject.END, agreed).wait()
        is_late, is_held = agreed[: len(late)].tolist(), iter(agreed[len(late) :].tolist())
        for unit in self._units:
            if is_late[unit.index]:
                self._reduce(unit)
        if self._under_way is not None:
            self._under_way.finish_reduce()
        self._under_way = None
        for reducer in reducers:
            reducer.install([bool(next(is_held)) for _ in reducer.used])

    def abandon(self) -> None:
        """Forget a backward pass that an exception ended."""
        if self._work is not None:
            # The others may be gone, or have come to another meeting: that ended the pass.
            with contextlib.suppress(RuntimeError):
                self._work.wait()
        self._under_way = self._left = self._work = None
