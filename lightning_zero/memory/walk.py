"""A training step, walked through by its events: what a rank holds at each.

A rank holds what rests, the whole weights of the root and of the units in use or prefetched, the
unreduced gradients of the unit in backward and of the one being reduced, and activations. Which
unit is whole, and when its gradients are reduced, follows the engine's rules (``engine/schedule``,
``engine/reduction_order``) in a step whose order of units is that of the step before.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_zero.memory.dry_run import Event, Kind
from lightning_zero.memory.terms import Kinds, UnitTerms
from lightning_zero.plan import Settings

_LABELS = {"rest": "at rest", "step": "in the optimizer's step"}


@dataclass
class Snapshot:
    """The bytes that a rank holds in a part of a step.

    Attributes:
        unit: The unit that runs; the root's is ``""``.
        phase: ``"forward"``, ``"backward"``, ``"rest"``, or ``"step"`` if the optimizer's step
            takes memory: for staging, whole parameters, or fp32 copies of rounded states.
        kinds: Bytes on the device by kind, at the instant of the largest total.
        host: Bytes in host memory apart from the device's, by kind.
        disk: Bytes in files, by kind.
        at_other_times: The most bytes of each kind on the device, at any instant of the part.
        away: The most bytes of activations in host memory.
    """

    unit: str
    phase: str
    kinds: Kinds = field(default_factory=dict)
    host: Kinds = field(default_factory=dict)
    disk: Kinds = field(default_factory=dict)
    at_other_times: Kinds = field(default_factory=dict)
    away: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds on the device."""
        return sum(self.kinds.values())

    @property
    def label(self) -> str:
        """When it is, as a phrase: ``in backward of blocks.3``."""
        return _LABELS.get(self.phase) or f"in {self.phase} of {self.unit or 'the root'}"

    def note(self, kinds: Kinds, away: int = 0) -> None:
        """Account for one instant."""
        self.away = max(self.away, away)
        if not self.kinds or sum(kinds.values()) > self.total:
            self.kinds = kinds
        most = self.at_other_times
        self.at_other_times = {kind: max(n, most.get(kind, 0)) for kind, n in kinds.items()}


class _Parts:
    """The parts of a step; ``held`` returns the bytes held now, by kind, but activations."""

    def __init__(self, held: Callable[[], Kinds]) -> None:
        self._held = held
        self.found = [Snapshot("", "forward")]

    def note(self, activations: int, away: int = 0) -> None:
        """Account for what is held now, with these bytes of activations."""
        self.found[-1].note({**self._held(), "activations": activations}, away)

    def begin(self, event: Event, *, is_backward: bool) -> None:
        """Begin a part if the event begins one: of a unit, or of the code around units."""
        if event.kind in (Kind.BACKWARD_END, Kind.GRAD):
            return
        runs = event.kind in (Kind.FORWARD, Kind.BACKWARD)
        unit, phase = event.unit if runs else "", "backward" if is_backward else "forward"
        if (unit, phase) != (self.found[-1].unit, self.found[-1].phase):
            self.found.append(Snapshot(unit, phase))


class Walk:
    """A step of a rank under the engine, its last microbatch.

    Args:
        events: The events of a microbatch.
        units: The terms of all units, the root last.
        parameters: For each parameter, by its number in the module, its id and its bytes.
        still: Bytes on the device that rest, by kind.
        settings: The settings.
        is_local: Whether gradients are reduced in the last microbatch only.
        num_microbatches: Microbatches per step.
        num_shards: Ranks that share one copy.
        receives: Whether a reduction receives the other ranks' parts into buffers of its own, as
            messages between CPUs do.
    """

    def __init__(
        self,
        events: Sequence[Event],
        units: Sequence[UnitTerms],
        parameters: Sequence[tuple[int, int]],
        still: Kinds,
        settings: Settings,
        *,
        is_local: bool,
        num_microbatches: int,
        num_shards: int,
        receives: bool,
    ) -> None:
        self._events, self._parameters, self._still = events, parameters, still
        self._units = {unit.name: unit for unit in units}
        self._unit_of = {number: unit for unit in units for number in unit.trainable}
        self._settings, self._num_shards, self._receives = settings, num_shards, receives
        self._adds = num_microbatches > 1 and not is_local
        self._needs = list(_needs(events))
        self._place, self._last_backward = -1, ""
        self._whole: set[str] = set()
        self._on_way: set[str] = set()
        # Calls whose backward is still to begin or to end, by unit.
        self._awaited = Counter(e.unit for e in events if e.kind in _OF_BACKWARD)
        self._missing = Counter(
            self._unit_of[parameters[e.parameter][0]].name for e in events if e.kind is Kind.GRAD
        )
        order = dict.fromkeys(unit for unit, is_backward in self._needs if not is_backward)
        rest = [unit.name for unit in units if unit.name not in order]
        self._turns = [name for name in (*reversed(order), *rest) if self._units[name].trainable]
        self._under_way: UnitTerms | None = None
        is_kept = is_local and num_microbatches > 1
        self._partial = {unit.name: unit.partial for unit in units} if is_kept else {}
        self._received: dict[int, int] = {}
        self._gradients = 0 if is_kept else still["gradients"]
        # Shards of the last two units, on their way to the host.
        self._leaving: deque[int] = deque(maxlen=2)
        self._note: Callable[[], None] = lambda: None

    def parts(self) -> list[Snapshot]:
        """Return what the rank holds in the parts of the microbatch."""
        parts, is_backward = _Parts(self._held), False
        counts = any(event.before for event in self._events)  # otherwise there was no batch
        self._make_whole("")
        self._prefetch()
        for event in self._events:
            grad = 0
            parts.note(event.before, event.away)
            is_backward |= event.kind is Kind.LOSS
            parts.begin(event, is_backward=is_backward)
            if event.kind is Kind.GRAD:
                number, nbytes = self._parameters[event.parameter]
                unit = self._unit_of[number]
                self._partial.setdefault(unit.name, unit.partial)
                grad = nbytes if counts else 0
            parts.note(event.now + grad, event.away)
            self._note = functools.partial(parts.note, event.now, event.away)
            self._follow(event, is_backward=is_backward)
            self._note()
        return parts.found

    def _held(self) -> Kinds:
        units = self._units
        received = sum(self._received.values())
        unit, in_flight = self._under_way, 0
        if unit is not None:
            # The result counts as a gradient once it has arrived; one rank's are their own sum.
            is_own = self._num_shards == 1 and unit.shard == unit.partial
            in_flight = unit.partial if is_own else unit.in_flight + unit.shard
        return {
            **self._still,
            "gathered": sum(units[name].gathered for name in self._whole)
            + sum(units[name].coded for name in self._on_way),
            "gradients": self._gradients + sum(self._leaving),
            "unreduced": sum(self._partial.values()) + in_flight + received,
        }

    def _follow(self, event: Event, *, is_backward: bool) -> None:
        if event.kind is Kind.FORWARD:
            self._need(event.unit, is_backward=is_backward)
        elif event.kind is Kind.FORWARD_END and not is_backward:
            stays = self._awaited[event.unit] and not self._settings.reshard_after_forward
            if not stays and self._ahead(1)[:1] != [event.unit]:
                self._whole.discard(event.unit)
        elif event.kind is Kind.LOSS and not self._adds:
            # The Trainer drops the gradients of the step before.
            self._gradients = 0
        elif event.kind is Kind.BACKWARD:
            self._awaited[event.unit] -= 1
            self._need(event.unit, is_backward=True)
        elif event.kind is Kind.BACKWARD_END:
            self._awaited[event.unit] -= 1
            self._whole.discard(event.unit)
            self._prefetch()
        elif event.kind is Kind.GRAD:
            self._take(self._unit_of[self._parameters[event.parameter][0]])
        elif event.kind is Kind.END:
            while self._turns:
                self._reduce(self._turns.pop(0))
            self._finish()
            self._whole.clear()
            self._leaving.clear()
            self._received.clear()

    # -- weights ---------------------------------------------------------------------------------

    def _ahead(self, count: int) -> list[str]:
        return [unit for unit, _ in self._needs[self._place + 1 : self._place + 1 + count]]

    def _make_whole(self, unit: str) -> None:
        self._whole.add(unit)
        self._on_way.discard(unit)

    def _prefetch(self) -> None:
        for unit in self._ahead(self._settings.prefetch):
            if unit not in self._whole:
                self._whole.add(unit)
                self._on_way.add(unit)

    def _need(self, unit: str, *, is_backward: bool) -> None:
        self._place += 1
        before, self._last_backward = self._last_backward, unit if is_backward else ""
        if before in ("", unit) or before not in self._whole:
            self._prefetch()
        self._make_whole(unit)

    # -- gradients -------------------------------------------------------------------------------

    def _take(self, unit: UnitTerms) -> None:
        self._missing[unit.name] -= 1
        while self._turns and self._is_complete(self._turns[0]):
            self._reduce(self._turns.pop(0))
        if unit.name and not self._missing[unit.name] and self._awaited[unit.name] <= 0:
            self._whole.discard(unit.name)

    def _is_complete(self, name: str) -> bool:
        return not self._missing[name]

    def _reduce(self, name: str) -> None:
        """Finish the reduction under way, and start that of a unit."""
        self._finish()
        unit = self._units[name]
        self._partial.pop(name, None)
        if self._receives:
            size = unit.in_flight // self._num_shards
            self._received[size] = (self._num_shards - 1) * size
        self._under_way = unit
        self._note()

    def _finish(self) -> None:
        unit, self._under_way = self._under_way, None
        if unit is not None and unit.sends_shard:
            self._leaving.append(unit.shard)
        elif unit is not None and not self._adds:  # else it is added to earlier microbatches'
            self._gradients += unit.shard


_OF_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_END)


def _needs(events: Sequence[Event]) -> Iterator[tuple[str, bool]]:
    """Yield the units whose weights must be whole, in order, and whether for their backward."""
    is_backward = False
    for event in events:
        is_backward |= event.kind is Kind.LOSS
        if event.kind in (Kind.FORWARD, Kind.BACKWARD):
            yield event.unit, is_backward


def replicated_parts(
    events: Sequence[Event],
    sizes: Mapping[int, int] | Sequence[int],
    resting: Kinds,
    *,
    adds_gradients: bool,
) -> list[Snapshot]:
    """Return what a rank holds under DDP; ``sizes`` are the bytes of each parameter, by number."""
    # In addition to gradients, DDP keeps buckets of the same size, which it sends.
    held = {**resting, "unreduced": resting["gradients"]}
    parts, is_backward = _Parts(lambda: dict(held)), False
    for event in events:
        parts.note(event.before, event.away)
        is_backward |= event.kind is Kind.LOSS
        parts.begin(event, is_backward=is_backward)
        if event.kind is Kind.LOSS and not adds_gradients:
            held["gradients"] = 0  # the Trainer drops those of the step before
        elif event.kind is Kind.GRAD and not adds_gradients:
            held["gradients"] += sizes[event.parameter]
        parts.note(event.now, event.away)
    return [*parts.found, Snapshot("", "rest", {**resting, "unreduced": resting["gradients"]})]
