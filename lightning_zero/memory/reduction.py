"""What a rank holds of gradients while they arrive and are reduced, event by event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from lightning_zero.memory.dry_run import Event
from lightning_zero.memory.terms import BundleTerms, UnitTerms


class Reductions:
    """Goes through backward passes as the engine's turns do, and counts bytes.

    A unit's gradients are copied, one by one as they arrive, into a buffer of their own; when all
    are there the unit is reduced, as soon as those before it in the order of turns have been, and
    the one before it is waited for. Receive buffers are kept to the end of the backward pass.

    Args:
        units: The terms of all units, the root last.
        turns: The units in the order in which they are reduced.
        shares_memory: Whether ranks read each other's buffers. They are then kept from step to
            step, and how many there are depends on who is how far: what is counted is the most.

    Attributes:
        most: The most bytes since the last :meth:`look`.
        most_flushed: The most bytes of reduced gradients on their way to host memory.
    """

    def __init__(
        self, units: Sequence[UnitTerms], turns: Sequence[UnitTerms], *, shares_memory: bool
    ) -> None:
        self._units = units
        self._turns = [unit for unit in turns if unit.bundles]
        self._places = {
            member: (unit, bundle)
            for unit in units
            for bundle in unit.bundles
            for member in bundle.members
        }
        self._shares_memory = shares_memory
        self._filled: dict[BundleTerms, set[int]] = {}
        self._reduced: dict[BundleTerms, set[int]] = {}
        self._settled: set[BundleTerms] = set()
        self._missing: dict[int, int] = {}
        self._passed: set[int] = set()
        self._sends = True
        self._left: list[UnitTerms] = []
        self._under_way: UnitTerms | None = None
        self._in_flight: list[tuple[BundleTerms, int]] = []
        self._boxes: Counter[tuple[int, torch.dtype]] = Counter()
        self._unread: list[BundleTerms] = []
        self._num_buffers = 0
        self._flushing: list[int] = []
        self.most = self.most_flushed = 0

    # -- a backward pass -------------------------------------------------------------------------

    def begin(self, *, sends: bool) -> None:
        """Begin a backward pass, whose gradients are reduced if it ``sends``."""
        self._missing = {
            id(unit): sum(len(bundle.members) for bundle in unit.bundles) for unit in self._units
        }
        self._passed = set()
        self._sends = sends
        self._left = list(self._turns) if sends else []

    def take(self, event: Event) -> None:
        """A gradient arrives, or the backward of a unit has ended."""
        if isinstance(event, str):
            self._passed |= {id(unit) for unit in self._units if unit.name == event}
            self._advance()
            return
        unit, bundle = self._places[event]
        self._fill(bundle, {event})
        self._missing[id(unit)] -= 1
        self._note()
        if not self._missing[id(unit)]:
            self._advance()

    def finish(self) -> None:
        """End a backward pass: reduce what is left, and what came after its unit's turn."""
        if not self._sends:
            return
        while self._left:
            self._reduce(self._left.pop(0))
        for unit in self._units:
            if any(self._filled.get(bundle) for bundle in unit.bundles):
                self._reduce(unit)
        self._end_reduction()
        self._settled = set()
        self._boxes.clear()
        self._flushing = []

    def step(self) -> None:
        """An optimizer step, which drops reduced gradients and waits for all readers."""
        self._reduced, self._unread = {}, []

    def look(self) -> tuple[int, int]:
        """:attr:`most` and :attr:`most_flushed`, which begin anew at what is held now."""
        before = self.most, self.most_flushed
        self.most = self.most_flushed = 0
        self._note()
        return before

    # -- turns -----------------------------------------------------------------------------------

    def _advance(self) -> None:
        root = self._units[-1]
        while self._left:
            unit = self._left[0]
            is_complete = not self._missing[id(unit)]
            if not is_complete and (unit is root or id(unit) not in self._passed):
                return
            self._reduce(self._left.pop(0))

    def _reduce(self, unit: UnitTerms) -> None:
        self._end_reduction()
        boxes: Counter[tuple[int, torch.dtype]] = Counter()
        for bundle in unit.bundles:
            self._fill(bundle, set())
            arrived = self._filled.pop(bundle)
            reduced = self._reduced.setdefault(bundle, set())
            adds = bundle in self._settled or bool(reduced & bundle.owned)
            self._in_flight.append((bundle, bundle.target if adds else 0))
            boxes[bundle.box] += bundle.num_boxes
            self._settled.add(bundle)
            reduced |= arrived
        self._boxes |= boxes
        self._under_way = unit
        self._flushing = [*self._flushing[-1:], unit.flushed]
        self._note()

    def _end_reduction(self) -> None:
        if self._under_way is None:
            return
        # A peer that has come to this reduction has read the buffers of the one before.
        self._unread = [bundle for bundle, _ in self._in_flight]
        self._in_flight, self._under_way = [], None

    def _fill(self, bundle: BundleTerms, members: Iterable[int]) -> None:
        if bundle not in self._filled:
            self._filled[bundle] = set()
            used = len(self._filled) + len(self._in_flight) + len(self._unread)
            self._num_buffers = max(self._num_buffers, used)
        self._filled[bundle] |= set(members)

    # -- bytes -----------------------------------------------------------------------------------

    def _note(self) -> None:
        self.most = max(self.most, self.held)
        self.most_flushed = max(self.most_flushed, sum(self._flushing))

    @property
    def held(self) -> int:
        """Bytes of gradients and of what their reductions need, now."""
        targets = sum(target for _, target in self._in_flight)
        if self._shares_memory:
            return targets + self.kept
        partials = sum(bundle.partial for bundle in self._filled)
        partials += sum(bundle.partial for bundle, _ in self._in_flight)
        boxes = sum(n * numel * dtype.itemsize for (numel, dtype), n in self._boxes.items())
        return partials + targets + boxes

    @property
    def kept(self) -> int:
        """The most bytes of buffers that peers read, and that stay between steps.

        Each may have held the largest bundle of all.
        """
        largest = max((b.partial for unit in self._units for b in unit.bundles), default=0)
        return self._num_buffers * largest if self._shares_memory else 0
