"""Forwards without gradients in which ranks may run different units, or none at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lightning_zero.engine.sharded_model import ShardedModel
from lightning_zero.engine.unit import Unit


class Join:
    """The context in which ranks gather units on request.

    A gather needs every rank. A rank that needs a resting unit therefore asks the others, and all
    gather it together, each between two modules of its own; a rank that has reached the end keeps
    helping until all have.

    Attributes:
        must_ask: Whether gathers need other ranks at all: not where nothing rests.
        is_open: Whether the context was entered.
        asks: Whether a gather must be asked for now.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self._units = sharded.units
        self._control = sharded.comm.control
        self.must_ask = sharded.gives_weights_back and sharded.comm.transport.gathers_together
        self.is_open = self.asks = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Enter the context; its end waits for all ranks."""
        self.is_open = True
        try:
            if self.must_ask:
                for unit in self._units:
                    unit.weights.wait()
            self.asks = self.must_ask
            yield
            if self.must_ask:
                self.gather(None)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Leave the context without waiting for the others."""
        self.is_open = self.asks = False

    def ask_for(self, unit: Unit) -> None:
        """Make a released unit whole, together with ranks that do not need it."""
        if unit.weights.rest:
            self.gather(unit)

    @torch.no_grad()
    def gather(self, wanted: Unit | None) -> None:
        """Gather what ranks want until this one has ``wanted`` or, without it, all are done."""
        while True:
            index = -1 if wanted is None else wanted.index
            asked = set(self._control.gather_objects(index))
            for unit in (self._units[index] for index in sorted(asked - {-1})):
                was_resting = unit.weights.rest
                unit.weights.gather_again()
                if was_resting and unit is not wanted:
                    unit.weights.reshard()
            if wanted is not None or asked == {-1}:
                return
