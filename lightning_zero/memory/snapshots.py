"""Bytes that a rank holds in each part of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_zero.memory.terms import Kinds
from lightning_zero.memory.trace import Event, Kind

_LABELS = {"rest": "at rest", "step": "in the optimizer's step"}


@dataclass(frozen=True)
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
    """

    unit: str
    phase: str
    kinds: Kinds
    host: Kinds = field(default_factory=dict)
    disk: Kinds = field(default_factory=dict)
    at_other_times: Kinds = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes of all kinds on the device."""
        return sum(self.kinds.values())

    @property
    def label(self) -> str:
        """When it is, as a phrase: ``in backward of blocks.3``."""
        return _LABELS.get(self.phase) or f"in {self.phase} of {self.unit or 'the root'}"


@dataclass
class Segment:
    """A part of a step in which one unit runs, or the module's code between units.

    ``kinds`` are the bytes by kind at the instant of the largest total, ``most`` the most bytes of
    each kind, and ``away`` the most bytes of activations kept on the host.
    """

    unit: str | None
    is_backward: bool
    kinds: Kinds = field(default_factory=dict)
    most: Kinds = field(default_factory=dict)
    away: int = 0

    def add(self, kinds: Kinds, away: int = 0) -> None:
        """Account for one instant."""
        self.away = max(self.away, away)
        if not self.kinds or sum(kinds.values()) > sum(self.kinds.values()):
            self.kinds = kinds
        self.most = {kind: max(count, self.most.get(kind, 0)) for kind, count in kinds.items()}

    def snapshot(self, host: Kinds | None = None, disk: Kinds | None = None) -> Snapshot:
        """Return the segment as a snapshot, with bytes in host memory and in files."""
        phase = "backward" if self.is_backward else "forward"
        return Snapshot(self.unit or "", phase, self.kinds, host or {}, disk or {}, self.most)


class Segments:
    """The segments of a step; ``held`` returns the bytes held now, by kind."""

    def __init__(self, held: Callable[[], Kinds]) -> None:
        self._held = held
        self._activations = self._away = 0
        self.found = [Segment(None, is_backward=False)]

    def note(self) -> None:
        """Account for what is held now."""
        kinds = self._held()
        self.found[-1].add(
            {**kinds, "activations": kinds["activations"] + self._activations}, self._away
        )

    def follow(self, event: Event) -> None:
        """Account for what was held before an event; begin a segment if the event begins one."""
        self._activations, self._away = event.before, max(self._away, event.away)
        self.note()
        self._activations, self._away = event.now, event.away
        is_backward = self.found[-1].is_backward or event.kind is Kind.LOSS
        if event.kind in (Kind.FORWARD, Kind.BACKWARD):
            self._begin(event.unit, is_backward=event.kind is Kind.BACKWARD)
        elif event.kind not in (Kind.BACKWARD_END, Kind.GRAD):
            self._begin(None, is_backward=is_backward)

    def _begin(self, unit: str | None, *, is_backward: bool) -> None:
        last = self.found[-1]
        if (unit, is_backward) != (last.unit, last.is_backward):
            self.found.append(Segment(unit, is_backward))
