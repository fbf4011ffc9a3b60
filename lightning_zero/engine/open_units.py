"""Whole weights between steps, for hooks of modules, callbacks, loggers and plain loops."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_zero.comm import Communicator, SyncPoint
from lightning_zero.engine.unit import Unit
from lightning_zero.engine.weights import State

_MOST = 2
"""Units that stay open at a time; more only while one operation uses them all."""


class OpenUnits:
    """The units that code between steps has touched, whole until others are touched.

    Where a gather needs every rank, all ranks must touch the same units, in the same order. Where
    ranks read each other's memory, no touch waits for another rank: there an edited unit stays open
    until all ranks meet, as others may still read its masters.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        # The least recently touched one first.
        self._open: list[Unit] = []

    def __len__(self) -> int:
        return len(self._open)

    def touch(self, units: Sequence[Unit]) -> None:
        """Make ``units`` readable and writable together, and close the least recently touched.

        Raises:
            RuntimeError: A gather needs every rank, and other ranks touch other units or none.
        """
        for unit in units:
            unit.weights.wait_if_in_flight()
        new = [unit for unit in units if unit.weights.can_open]
        if new and self._comm.transport.gathers_together:
            what = ", ".join(unit.label for unit in new)
            self._comm.control.call(SyncPoint.TOUCH, about=what).wait()
        self._close_down_to(_MOST - len(new), units)
        for unit in new:
            unit.weights.open()
        touched = [unit for unit in units if unit.weights.state is State.OPEN]
        self._open = [unit for unit in self._open if unit not in touched] + touched

    def _close_down_to(self, count: int, used: Sequence[Unit]) -> None:
        """Close units until ``count`` are open, but none that is ``used`` now or must stay open."""
        for unit in [unit for unit in self._open if unit not in used]:
            if len(self._open) <= count:
                return
            if unit.weights.is_edited:
                if self._comm.transport.reads_peers:
                    continue
                unit.weights.store_edits()
            unit.weights.close()
            self._open.remove(unit)

    def close(self) -> None:
        """Close all units; changes that are not stored are lost."""
        opened, self._open = self._open, []
        for unit in opened:
            unit.weights.close()
