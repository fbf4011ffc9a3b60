"""The order in which units are needed, and the gathers that follow from it.

Each step's needs are recorded, and the last record predicts this step's: after each need comes what
followed it last time. A step that diverges (a branch, another data loader) finds its place again at
the next need that follows in the record; until then the prediction stays the same. A wrong
prediction costs a useless gather, never a wrong result.

Within `join`, ranks may run different units, or none at all, but a gather needs every rank. A rank
that needs a resting unit therefore asks the others, and all gather it together, each between two
of its own modules; a rank that has reached the end keeps helping until all have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lightning_zero.engine.sharded_model import ShardedModel
from lightning_zero.engine.unit import Residency, Unit, store_edits

Need = tuple[int, bool]
"""The index of a unit whose weights must be whole, and whether it is for its backward."""


class Schedule:
    """The needs of the last step, and how far this one has followed them."""

    def __init__(self) -> None:
        self._last: list[Need] = []
        self._now: list[Need] = []
        self._place = -1

    def begin(self) -> None:
        """Start a step; the needs recorded since the last start become the prediction."""
        if self._now:
            self._last, self._now = self._now, []
        self._place = -1

    def record(self, need: Need) -> None:
        """Note that ``need`` has come up."""
        self._now.append(need)
        try:
            self._place = self._last.index(need, self._place + 1)
        except ValueError:
            # Not ahead in the record: the step has diverged. Stay, in case it returns.
            return

    def ahead(self, count: int) -> list[Need]:
        """Return the next ``count`` needs, as far as they can be predicted."""
        return self._last[self._place + 1 : self._place + 1 + count]

    def units_in_forward(self) -> list[int]:
        """Return the units of this step's forward, in the order in which they ran."""
        return [unit for unit, is_backward in self._now if not is_backward]


class Prefetcher:
    """Gathers units that are needed, and prefetches those that the schedule predicts.

    Attributes:
        schedule: The order in which this step needs units. Steps with and without gradients have
            one each.
        last_backward: The unit that was needed last, if it was for its backward.
        is_joined: Whether `join` was entered.
        asks: Whether a gather must now be requested from the other ranks.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded, self._units = sharded, sharded.units
        self._count = sharded.settings.prefetch if sharded.reshards else 0
        self.last_backward: Unit | None = None
        self.abandon()

    def abandon(self) -> None:
        """Drop all records: ranks interrupted at different places must predict the same again."""
        self._schedules = {True: Schedule(), False: Schedule()}
        self.schedule = self._schedules[True]
        self.is_joined = self.asks = False

    def begin_step(self, *, with_grad: bool) -> None:
        """Choose the schedule of a step."""
        if not self.asks:
            self.schedule = self._schedules[with_grad]
            self.schedule.begin()

    def comes_next(self, unit: Unit) -> bool:
        """Return whether ``unit`` is predicted to be needed next."""
        ahead = self.schedule.ahead(1)
        return bool(ahead) and ahead[0][0] == unit.index and not self.asks

    def need(self, unit: Unit, *, is_backward: bool) -> None:
        """Make a unit whole, and prefetch those that are needed after it."""
        if not self.asks:
            # What one rank runs in a join does not predict what all ranks need next.
            self.schedule.record((unit.index, is_backward))
        self.unshard(unit)
        last, self.last_backward = self.last_backward, unit if is_backward else None
        if self._count and (last is None or last is unit or not last.will_reshard):
            self.prefetch()
        # Otherwise the unit whose backward just ended is still whole: the gradients of its inputs
        # are those of this unit's outputs, and this event comes first. Prefetching now would hold
        # one more unit; it starts in a moment, when that one is resharded.
        if unit.weights.residency is Residency.IN_FLIGHT:
            unit.weights.wait()

    def unshard(self, unit: Unit) -> None:
        """Start to gather a resting unit; in a join, together with ranks that do not need it."""
        weights = unit.weights
        if weights.has_masters:
            self._sharded.hide([unit])
        if weights.residency is Residency.RELEASED and not weights.has_masters:
            if self.asks:
                self._gather_together(unit)
            else:
                weights.unshard()

    def prefetch(self) -> None:
        """Start to gather the released units that are needed next."""
        for index, _ in () if self.asks else self.schedule.ahead(self._count):
            weights = self._units[index].weights
            if weights.rests:
                weights.unshard()

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Enter the context of `join`; its end waits for all ranks."""
        if self.is_joined:
            yield
            return
        sharded = self._sharded
        sharded.hide()
        self.is_joined = True
        try:
            # Where nothing rests, no rank needs the others.
            if sharded.reshards and sharded.comm.transport.size > 1:
                for unit in self._units:
                    unit.weights.wait()
                self.asks = True
            yield
            if self.asks:
                self._gather_together(None)
        finally:
            self.is_joined = self.asks = False

    @torch.no_grad()
    def _gather_together(self, wanted: Unit | None) -> None:
        """Gather what ranks want until this one has ``wanted`` or, without it, all are done."""
        while True:
            index = -1 if wanted is None else wanted.index
            asked = set(self._sharded.comm.control.gather_objects(index))
            for unit in (self._units[index] for index in sorted(asked - {-1})):
                weights, before = unit.weights, unit.weights.residency
                if before >= Residency.WHOLE:
                    store_edits(unit.flat_parameters)
                weights.unshard()
                weights.wait()
                if before is Residency.SHOWN:
                    weights.show()
                elif before is Residency.RELEASED and unit is not wanted:
                    weights.reshard()
            if wanted is not None or asked == {-1}:
                return
