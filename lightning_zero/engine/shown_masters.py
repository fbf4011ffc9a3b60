"""Whole masters for code outside of units' forwards: on touch between steps, or in `gathered`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from lightning_zero.comm import Communicator, SyncPoint
from lightning_zero.engine.unit import Unit
from lightning_zero.engine.weights import Shows, Weights
from lightning_zero.tensors import runs_outside

_MOST = 2
"""Units that code between steps sees at a time; more only while one operation uses them all."""


class ShownMasters:
    """The units whose whole masters are shown.

    Those that code between steps touches are shown until it touches others. All ranks must touch
    the same units, in the same order. A unit that an autograd graph has used stays
    whole while the graph lives, or until the next step, as under DDP the step changes it.

    Those within :meth:`gathered` are shown to the end of the context, whatever runs in it.

    Attributes:
        on_touch: Makes units readable that a step uses outside of their forward; returns ``False``
            between steps.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.on_touch: Callable[[Sequence[Unit]], bool] = lambda _: False
        # The least recently touched one first.
        self._touched: list[Unit] = []

    @property
    def is_within_step(self) -> bool:
        """Return whether code that runs now is part of a step, which all ranks take together."""
        return self.on_touch([])

    @property
    def num_touched(self) -> int:
        """The number of units that are shown to code between steps."""
        return len(self._touched)

    def touch(self, units: Sequence[Unit]) -> None:
        """Make ``units`` readable and writable together, and hide the least recently touched.

        Raises:
            RuntimeError: A gather needs every rank, and other ranks touch other units or none.
        """
        if self.on_touch(units):
            return
        for unit in units:
            unit.weights.wait_if_in_flight()
        new = [u for u in units if u.weights.hides_masters and u.weights.shows is not Shows.MASTERS]
        if new:
            self._hide_down_to(_MOST - len(new), units, self._agree_to_touch(new))
        for unit in new:
            unit.weights.show_masters()
        touched = [unit for unit in units if unit in self._touched or unit in new]
        self._touched = [unit for unit in self._touched if unit not in touched] + touched

    def _agree_to_touch(self, new: Sequence[Unit]) -> list[Unit]:
        """Return the shown units that graphs use: on any rank, if a gather needs all of them."""
        flags = bytes(unit.weights.are_in_graph for unit in self._touched)
        if self._comm.transport.gathers_together:
            what = ", ".join(unit.label for unit in new)
            flags = self._comm.control.call(SyncPoint.TOUCH, flags, about=what).wait()
        return [unit for unit, is_used in zip(self._touched, flags, strict=True) if is_used]

    def _hide_down_to(self, count: int, *kept: Sequence[Unit]) -> None:
        """Hide units until ``count`` are shown, but none that is in ``kept`` or must stay."""
        for unit in [unit for unit in self._touched if not any(unit in each for each in kept)]:
            if len(self._touched) <= count:
                return
            unit.weights.keep_edits()
            unit.weights.hide_masters()
            self._touched.remove(unit)

    def hide_touched(self) -> None:
        """Hide what code between steps has touched; changes that are not stored are lost."""
        touched, self._touched = self._touched, []
        for unit in touched:
            unit.weights.hide_masters()

    @contextlib.contextmanager
    def gathered(self, units: Sequence[Unit], *, modify: bool) -> Iterator[None]:
        """Enter a context in which the masters of ``units`` are shown; a collective.

        Raises:
            RuntimeError: As for :meth:`ShardedModel.gathered`.
        """
        wanted = [unit.weights for unit in units if not unit.weights.is_gathered]
        if modify and len(wanted) < len(units):
            raise RuntimeError(
                "gathered(modify=True) was entered within another `gathered` of the same weights."
                " Pass `modify=True` to the outer one."
            )
        before = [weights for weights in wanted if weights.shows is Shows.WEIGHTS]
        for weights in wanted:
            weights.show_masters(as_gathered=True)
        access = self._comm.write_access(SyncPoint.EDIT) if modify else contextlib.nullcontext()
        try:
            with access:
                try:
                    yield
                finally:
                    for weights in wanted if modify else ():
                        weights.store_gathered()
            changed = [name for weights in wanted for name in weights.changed]
        finally:
            self._end_gathered(wanted, before)
        if not modify:
            self._refuse(changed)

    def _end_gathered(self, wanted: Sequence[Weights], before: Sequence[Weights]) -> None:
        """Show what was shown ``before``, or what is now: a step may have begun or ended within."""
        is_within_step = self.is_within_step
        for weights in wanted:
            weights.hide_masters()
            if not weights.hides_masters or (is_within_step and weights in before):
                weights.wait()
            elif not is_within_step:
                weights.reshard()

    @runs_outside
    def _refuse(self, changed: list[str]) -> None:
        """Raise on all ranks if any rank changed weights that were gathered for reading."""
        (any_changed,) = self._comm.control.call(SyncPoint.EDIT, bytes([bool(changed)])).wait()
        if any_changed:
            what = f"Parameter {changed[0]!r}" if changed else "A parameter on another rank"
            raise RuntimeError(
                f"{what} was changed within `gathered(...)`, which is for reading only. Use"
                " `gathered(..., modify=True)`, which keeps rank 0's changes on all ranks."
            )
