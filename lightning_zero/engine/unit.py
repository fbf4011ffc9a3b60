"""A module whose parameters are gathered, released and reduced together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from lightning_zero.engine.backward_events import Calls
from lightning_zero.engine.gradients import Gradients
from lightning_zero.engine.weights import Residency, Shows, Weights
from lightning_zero.parameters import FlatParameters, Piece

_MAX_GROUPS = 16
"""The most groups of parameters that a unit can have, and so the tags reserved for each unit."""


class Unit:
    """One module, with the weights and gradients of its parameters and the calls of its forward.

    Attributes:
        name: The module's qualified name; the root's is ``""``.
        module: The module whose forward the unit serves.
        flat_parameters: Its parameters, by dtype and trainability.
        index: Its number; the root's is the last.
        label: The name to show.
        weights, gradients, calls: The states of its weights, gradients and forwards.
        is_inlined: Whether it was compiled into a larger graph, which needs its weights whole when
            a step begins.
    """

    def __init__(
        self, name: str, module: nn.Module, flats: Sequence[FlatParameters], index: int
    ) -> None:
        self.name = name
        self.module = module
        self.flat_parameters = list(flats)
        self.index = index
        self.label = name or "root"
        first_tag = _MAX_GROUPS * index + 1
        self.weights = Weights(self.label, self.flat_parameters, first_tag)
        self.gradients = Gradients(self.label, self.flat_parameters, first_tag)
        self.calls = Calls(index)
        self.is_inlined = False

    @property
    def pieces(self) -> list[Piece]:
        """This rank's pieces of the parameters."""
        return [piece for flat in self.flat_parameters for piece in flat.pieces]

    @property
    def numel(self) -> int:
        """Number of elements of the parameters."""
        slots = [slot for flat in self.flat_parameters for slot in flat.layout.slots]
        return sum(slot.numel for slot in slots)

    @property
    def will_reshard(self) -> bool:
        """Return whether the weights are whole and the end of the backward will release them."""
        weights = self.weights
        is_gone = weights.residency is Residency.RELEASED
        return weights.gives_back and not (is_gone or weights.is_pinned or not self.calls.awaited)

    def pin(self) -> None:
        """Keep the weights whole until the end of the step, for a use that no event announces."""
        self.weights.is_pinned = True
        self.calls.have_run = True

    def inline(self) -> bool:
        """Return whether a compiled graph may contain the unit: its weights are whole beforehand.

        Torch's compiler traces this, and replays its side effects whenever the graph runs.
        """
        if self.weights.shows is not Shows.WEIGHTS or self.weights.is_cast:
            return False
        self.is_inlined = True
        self.calls.have_run = True
        return True

    def abandon(self) -> None:
        """Drop what is under way, including weights and gradients in flight."""
        self.calls.abandon()
        self.weights.abandon()
        self.gradients.abandon()


def listed(units: Iterable[Unit]) -> Iterator[str]:
    """Yield units with their sizes, consecutive equal ones, except the root, on one line."""
    for (_, numel), equal in itertools.groupby(units, lambda unit: (not unit.name, unit.numel)):
        first, *others = [unit.label for unit in equal]
        names = f"{first} to {others[-1]}: {len(others) + 1} x" if others else f"{first}:"
        yield f"  {names} {numel:,} parameters"
