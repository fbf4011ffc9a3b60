"""The order in which units are needed, and prefetching.

Each step's needs are recorded, and the last record predicts this step's: after each need comes what
followed it last time. A step that diverges (a branch, another data loader) finds its place again at
the next need that follows in the record; until then the prediction stays the same. A wrong
prediction costs a useless gather, never a wrong result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from lightning_zero.engine.join_context import Join
from lightning_zero.engine.sharded_model import ShardedModel
from lightning_zero.engine.unit import Unit
from lightning_zero.engine.weights import Residency, Shows


class Need(NamedTuple):
    """A unit whose weights must be whole for its forward or its backward."""

    unit: int
    is_backward: bool


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

    def comes_next(self, unit: int) -> bool:
        """Return whether ``unit`` is predicted to be needed next."""
        place = self._place + 1
        return place < len(self._last) and self._last[place].unit == unit

    def units_in_forward(self) -> list[int]:
        """Return the units of this step's forward, in the order in which they ran."""
        return [need.unit for need in self._now if not need.is_backward]


class Prefetcher:
    """Gathers units that are needed, and prefetches those that the schedule predicts.

    Attributes:
        schedule: The order in which this step needs units. Steps with and without gradients have
            one each.
        last_backward: The unit that was needed last, if it was for its backward.
    """

    def __init__(self, sharded: ShardedModel, join: Join) -> None:
        self.last_backward: Unit | None = None
        self._sharded, self._units = sharded, sharded.units
        self._join = join
        self._count = sharded.settings.prefetch
        self.forget()

    def forget(self) -> None:
        """Drop all records: ranks interrupted at different places must predict the same again."""
        self._with_grad, self._without_grad = Schedule(), Schedule()
        self.schedule = self._with_grad

    @contextlib.contextmanager
    def separate(self) -> Iterator[None]:
        """Enter a context with schedules of its own, which predict nothing outside of it."""
        before = self._with_grad, self._without_grad, self.schedule
        self.forget()
        try:
            yield
        finally:
            self._with_grad, self._without_grad, self.schedule = before

    def begin_step(self, *, with_grad: bool) -> None:
        """Choose the schedule of a step."""
        self.schedule = self._with_grad if with_grad else self._without_grad
        self.schedule.begin()

    def units_in_forward(self) -> list[int]:
        """Return the units of the last forward with gradients, in the order in which they ran."""
        return self._with_grad.units_in_forward()

    def need(self, unit: Unit, *, is_backward: bool) -> None:
        """Make a unit whole, and prefetch those that are needed after it."""
        self.schedule.record(Need(unit.index, is_backward))
        if self._join.asks:
            self._join.ask_for(unit)
        weights, released = unit.weights, []
        if weights.shows is Shows.MASTERS:
            self._sharded.shown.hide([unit.weights])
        # As `weights.rest`, without a call.
        if weights.residency is Residency.RELEASED and weights.shows is Shows.GUARD:
            released.append(unit)
        before, self.last_backward = self.last_backward, unit if is_backward else None
        if before is None or before is unit or not before.will_reshard:
            released += self._released_ahead(unit)
        # Otherwise the unit whose backward just ended is still whole: the gradients of its inputs
        # are those of this unit's outputs, and this event comes first. Prefetching now would hold
        # one more unit; it starts in a moment, when that one is resharded.
        for one in released:
            one.weights.unshard()
        weights.wait()

    def unshard(self, unit: Unit) -> None:
        """Start to gather a resting unit; in a join, together with ranks that do not need it."""
        if unit.weights.shows is Shows.MASTERS:
            self._sharded.shown.hide([unit.weights])
        if self._join.asks:
            self._join.ask_for(unit)
        if unit.weights.rest:
            unit.weights.unshard()

    def prefetch(self) -> None:
        """Start to gather the units that are needed next."""
        for unit in self._released_ahead():
            unit.weights.unshard()

    def _released_ahead(self, needed: Unit | None = None) -> list[Unit]:
        """Return the released units but the ``needed`` one that come next, each once."""
        found: list[Unit] = []
        for need in () if self._join.asks else self.schedule.ahead(self._count):
            unit = self._units[need.unit]
            if unit is not needed and unit not in found and unit.weights.rest:
                found.append(unit)
        return found
