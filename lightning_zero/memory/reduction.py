"""What a rank holds of gradients while they arrive and are reduced, event by event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from lightning_zero.memory.dry_run import Event
from lightning_zero.memory.terms import BundleTerms, UnitTerms


class Instant(NamedTuple):
    """Bytes on the device at one time.

    Attributes:
        gradients: Reduced ones, with those on their way to host memory.
        unreduced: Those before and during their reduction, and what that needs.
        activations: What forward and backward hold beside.
    """

    gradients: int
    unreduced: int
    activations: int


class Reductions:
    """Goes through backward passes as the engine's turns do, and counts bytes.

    A unit's gradients are copied, one by one as they arrive, into a buffer of their own; when all
    are there the unit is reduced into a shard, as soon as those before it in the order of turns
    have been, and the one before it is waited for. Receive buffers are kept to the end of the
    backward pass, shards until they are dropped: the Trainer does so before the next backward.

    Args:
        units: The terms of all units, the root last.
        turns: The units in the order in which they are reduced.
        shares_memory: Whether ranks read each other's buffers. They are then kept from step to
            step, and how many there are depends on who is how far: what is counted is the most.
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
        self._shards: set[BundleTerms] = set()
        self._missing: dict[int, int] = {}
        self._passed: set[int] = set()
        self._sends = True
        self._left: list[UnitTerms] = []
        self._under_way: UnitTerms | None = None
        self._in_flight: list[BundleTerms] = []
        self._boxes: Counter[tuple[int, torch.dtype]] = Counter()
        self._unread: list[BundleTerms] = []
        self._num_buffers = 0
        self._flushing: list[int] = []
        self._activations = 0
        self._instants: list[Instant] = []

    # -- a backward pass -------------------------------------------------------------------------

    def begin(self, *, sends: bool) -> None:
        """Begin a backward pass, whose gradients are reduced if it ``sends``."""
        self._shards &= set(self._reduced)
        self._missing = {
            id(unit): sum(len(bundle.members) for bundle in unit.bundles) for unit in self._units
        }
        self._passed = set()
        self._sends = sends
        self._left = list(self._turns) if sends else []

    def take(self, event: Event) -> None:
        """A gradient arrives, or the backward of a unit has ended."""
        self.note(event.before)
        self.note(event.now)
        if isinstance(event.subject, str):
            self._passed |= {id(unit) for unit in self._units if unit.name == event.subject}
            self._advance()
            return
        unit, bundle = self._places[event.subject]
        self._fill(bundle, {event.subject})
        self._missing[id(unit)] -= 1
        self.note(event.now)
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
        # What this rank has no piece of, or what nobody used, is not shown.
        self._shards = {b for b in self._shards if self._reduced[b] & b.owned}
        self._boxes.clear()
        self._flushing = []

    def step(self) -> None:
        """An optimizer step, after which gradients are dropped; it waits for all readers."""
        self._reduced, self._unread = {}, []

    def note(self, activations: int) -> None:
        """Remember what is held now, beside so many bytes of activations."""
        self._activations = activations
        self._instants.append(Instant(self.gradients, self.unreduced, activations))

    def look(self) -> list[Instant]:
        """What was held at every instant since the last look."""
        seen, self._instants = self._instants, []
        return seen

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
            self._in_flight.append(bundle)
            boxes[bundle.box] += bundle.num_boxes
            reduced |= arrived
        self._boxes |= boxes
        self._under_way = unit
        self._flushing = [*self._flushing[-1:], unit.flushed]
        self.note(self._activations)

    def _end_reduction(self) -> None:
        if self._under_way is None:
            return
        # A peer that has come to this reduction has read the buffers of the one before.
        self._unread, self._in_flight, self._under_way = self._in_flight, [], None
        self._shards |= set(self._unread)

    def _fill(self, bundle: BundleTerms, members: Iterable[int]) -> None:
        if bundle not in self._filled:
            self._filled[bundle] = set()
            used = len(self._filled) + len(self._in_flight) + len(self._unread)
            self._num_buffers = max(self._num_buffers, used)
        self._filled[bundle] |= set(members)

    # -- bytes -----------------------------------------------------------------------------------

    @property
    def gradients(self) -> int:
        """Bytes of reduced gradients, now."""
        return sum(bundle.target for bundle in self._shards) + sum(self._flushing)

    @property
    def unreduced(self) -> int:
        """Bytes of gradients before and during their reduction, and of what that needs, now."""
        targets = sum(bundle.target for bundle in self._in_flight)
        if self._shares_memory:
            return targets + self.kept
        partials = sum(bundle.partial for bundle in (*self._filled, *self._in_flight))
        boxes = sum(n * numel * dtype.itemsize for (numel, dtype), n in self._boxes.items())
        return partials + targets + boxes

    @property
    def kept(self) -> int:
        """The most bytes of buffers that peers read, and that stay between steps.

        Each may have held the largest bundle of all.
        """
        largest = max((b.partial for unit in self._units for b in unit.bundles), default=0)
        return self._num_buffers * largest if self._shares_memory else 0
