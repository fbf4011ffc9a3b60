"""The order in which units are needed, and what comes next.

Each step's needs are recorded, and the last record predicts this step's: after the n-th need comes
what followed it last time. A step that goes another way (a branch, another data loader) finds its
place again at the next need that the record knows; until then nothing is predicted. A wrong guess
costs a gather that nobody uses, never a wrong number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple


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

    def forget(self) -> None:
        """Predict nothing: ranks whose step broke off in different places expect the same again."""
        self._last, self._now, self._place = [], [], -1

    def record(self, need: Need) -> None:
        """Note that ``need`` has come up."""
        self._now.append(need)
        try:
            self._place = self._last.index(need, self._place + 1)
        except ValueError:
            # Not ahead of us: the step took another way. Stay, in case the record joins again.
            return

    def ahead(self, count: int) -> list[Need]:
        """The next ``count`` needs, as far as they can be told."""
        return self._last[self._place + 1 : self._place + 1 + count]

    def units_in_forward(self) -> list[int]:
        """The units of this step's forward, in the order in which they ran."""
        return [need.unit for need in self._now if not need.is_backward]


class Schedules:
    """One schedule for steps with gradients and one for those without.

    Attributes:
        now: The one of this step.
    """

    def __init__(self) -> None:
        self._with_grad, self._without_grad = Schedule(), Schedule()
        self.now = self._with_grad

    def begin(self, *, with_grad: bool) -> None:
        """Start a step."""
        self.now = self._with_grad if with_grad else self._without_grad
        self.now.begin()

    def units_in_forward(self) -> list[int]:
        """The units of the last forward with gradients, in the order in which they ran."""
        return self._with_grad.units_in_forward()

    def forget(self) -> None:
        """Predict nothing, in any step."""
        self._with_grad.forget()
        self._without_grad.forget()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """A context in which nothing is learnt: its needs are no guide to those behind it."""
        before = self._with_grad, self._without_grad, self.now
        self._with_grad, self._without_grad = Schedule(), Schedule()
        self.now = self._with_grad
        try:
            yield
        finally:
            self._with_grad, self._without_grad, self.now = before
