"""One order of gradient reductions on all ranks, whatever each rank computes.

A rank waits for a unit's reduction before it starts the next but one, so that whole gradients of
at most two units are in memory. Waiting is safe only if every rank reduces the same units in the
same order: two ranks that reduced what is ready, one expert here and another there, would wait for
each other forever. So each backward pass has **turns**, the same on all ranks:

1. The order is the reverse of that in which rank 0 first ran the units. Units that it did not run
   come after these, and the root last.
2. A unit has a turn if it wants gradients and any rank ran it in this step.
3. When a unit's turn comes, a rank reduces it if its gradients are all there, if its backward is
   over, or if this rank never ran it (it sends zeros). Otherwise the turn waits.
4. At the end of the backward pass, the remaining turns are taken. Then units are reduced again for
   which a gradient came after their turn on any rank.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_zero.comm import PendingSync, SyncPoint
from lightning_zero.engine.rank_check import ChangeCheck
from lightning_zero.engine.sharded_model import ShardedModel
from lightning_zero.engine.unit import Unit


class ReductionOrder:
    """The reductions of a backward pass, in one order on all ranks."""

    def __init__(self, sharded: ShardedModel) -> None:
        self._units = units = sharded.units
        self._control = sharded.comm.control
        num_parameters = sum(len(unit.gradients.parameters) for unit in units)
        self._control.channel.reserve(len(units) + max(num_parameters, ChangeCheck.NUM_FLAGS))
        self._change_check = ChangeCheck(sharded)
        self._order: list[Unit] | None = None
        self._left: list[Unit] | None = None
        self._under_way: Unit | None = None
        self._copies_under_way: Unit | None = None
        self._has_copies = sharded.comm.mesh.replicate.size > 1
        self._work: PendingSync | None = None

    def begin(self, forward_order: Iterable[int]) -> None:
        """Begin a backward pass, and start to exchange which units each rank ran.

        Rank 0's first ``forward_order`` sets the order of reductions.
        """
        if self._order is None:
            ran = [index for index in dict.fromkeys(forward_order) if index < len(self._units) - 1]
            agreed = self._control.broadcast_object(ran)
            rest = [unit.index for unit in self._units[:-1] if unit.index not in agreed]
            # The root runs from beginning to end.
            self._order = [self._units[index] for index in (*reversed(agreed), *reversed(rest), -1)]
        self._left = None
        have_run = [unit.calls.have_run for unit in self._units]
        have_run[-1] = True
        flags = [*self._change_check.flags(), *have_run]
        self._work = self._control.call(SyncPoint.BEGIN, bytes(flags))
        if self._change_check.has_frozen:
            self._turns_left()  # now: this rank may have no gradients that would ask for it

    def advance(self) -> None:
        """Start the reductions whose turn has come."""
        left = self._left if self._left is not None else self._turns_left()
        while left and (left[0].gradients.are_complete or self._is_over(left[0])):
            self._reduce(left.pop(0))

    def _is_over(self, unit: Unit) -> bool:
        """Return whether no further gradient of ``unit`` is expected, though some are missing."""
        return unit is not self._units[-1] and (unit.calls.have_passed or not unit.calls.have_run)

    def _turns_left(self) -> list[Unit]:
        if self._left is None:
            assert self._order is not None
            assert self._work is not None
            maxima = self._work.wait()
            has_turn = maxima[ChangeCheck.NUM_FLAGS :]
            self._change_check.compare(maxima[: ChangeCheck.NUM_FLAGS], self._work.exchange)
            self._left = [
                unit
                for unit in self._order
                if has_turn[unit.index] and True in unit.gradients.wants
            ]
        return self._left

    def _reduce(self, unit: Unit) -> None:
        # One reduction overlaps with the next unit's backward, as does one sum over the copies; two
        # would only hold memory.
        before, self._under_way = self._under_way, unit
        if before is not None:
            before.gradients.finish()
            if self._copies_under_way is not None:
                self._copies_under_way.gradients.wait_for_copies()
            self._copies_under_way = before if self._has_copies else None
        unit.gradients.reduce()

    def finish(self) -> None:
        """Take the remaining turns and show the gradients to the optimizer.

        A parameter that no rank used gets no gradient, as in a plain loop.
        """
        left = self._turns_left()
        while left:
            self._reduce(left.pop(0))
        flags = [unit.gradients.are_pending for unit in self._units]
        for unit in self._units:
            flags += unit.gradients.held
        maxima = self._control.call(SyncPoint.END, bytes(flags)).wait()
        agreed = [flag > 0 for flag in maxima]
        for unit in self._units:
            if agreed[unit.index]:
                self._reduce(unit)
        if self._under_way is not None:
            self._under_way.gradients.finish()
            # Behind all others: a host that waits for offloaded gradients waits once.
            self._under_way.gradients.wait()
        self._under_way = self._copies_under_way = None
        held = iter(agreed[len(self._units) :])
        for unit in self._units:
            unit.gradients.install(held)

    def abandon(self) -> None:
        """Drop a backward pass that an exception ended."""
        # Not waited for: the others may be gone, or be waiting for this rank.
        self._under_way = self._copies_under_way = self._left = self._work = None
