"""Forwards without gradients in which ranks may run different units, some none at all.

A gather needs every rank. So a rank that needs a resting unit asks the others, and all gather it
together, each between two modules of its own; a rank that has come to the end goes on to help until
all have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from lightning_zero.comm import Comm
from lightning_zero.unit import State, Unit


class Join:
    """The context in which the ranks ask each other.

    Args:
        units: All units.
        comm: The ranks.

    Attributes:
        must_ask: Whether a gather needs the others at all. Where ranks read each other's memory, or
            nothing rests, nobody needs to ask.
        is_open: Whether the context was entered.
        asks: Whether a gather must be asked for now.
    """

    def __init__(self, units: Sequence[Unit], comm: Comm) -> None:
        self._units = units
        self._comm = comm
        self.must_ask = comm.gathers_together and any(unit.gives_weights_back for unit in units)
        self.is_open = self.asks = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """The context; its end waits for all ranks."""
        self.is_open = True
        try:
            if self.must_ask:
                for unit in self._units:
                    unit.wait_if_in_flight()
            self.asks = self.must_ask
            yield
            if self.must_ask:
                self._answer(None)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Leave the context without a word to the others."""
        self.is_open = self.asks = False

    def gather(self, unit: Unit) -> None:
        """Make a resting unit whole, together with all ranks."""
        self._answer(unit)

    @torch.no_grad()
    def _answer(self, wanted: Unit | None) -> None:
        """Gather what each rank wants, until all have come to the end or this one has its unit."""
        while True:
            index = -1 if wanted is None else wanted.index
            asked = set(self._comm.gather_objects(index))
            for unit in (self._units[index] for index in sorted(asked - {-1})):
                was_resting = unit.state is State.RESTING
                unit.gather_again()
                if was_resting and unit is not wanted:
                    unit.reshard()
            if wanted is not None or asked == {-1}:
                return
