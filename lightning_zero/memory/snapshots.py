"""Bytes of a rank in each part of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_zero.memory.terms import Kinds
from lightning_zero.memory.trace import Event, Kind

_LABELS = {"rest": "at rest", "step": "optimizer's step"}


@dataclass(frozen=True)
class Snapshot:
    """The bytes that a rank holds in a part of a step.

    Attributes:
        unit: The unit that runs; the root's is ``""``.
        phase: ``"forward"``, ``"backward"``, ``"rest"``, or ``"step"`` with offload or of an
            optimizer that steps whole parameters.
        kinds: Bytes on the device by kind, when they are most in all.
        host: Bytes in host memory beside the device's, by kind.
        disk: Bytes in files, by kind.
        at_other_times: The most bytes on the device of kinds that are most when others are less.
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
        """Its name, to show."""
        return _LABELS.get(self.phase) or f"{self.phase} of {self.unit or 'the root'}"


@dataclass
class Segment:
    """A part of a step in which the same unit runs, or no unit but the module between them.

    ``kinds`` are the bytes by kind when they are most in all, ``most`` the most of each kind, and
    ``away`` the most bytes of activations that wait on the host.
    """

    unit: str | None
    is_backward: bool
    kinds: Kinds = field(default_factory=dict)
    most: Kinds = field(default_factory=dict)
    away: int = 0

    def add(self, kinds: Kinds, away: int = 0) -> None:
        """Take an instant into account."""
        self.away = max(self.away, away)
        if not self.kinds or sum(kinds.values()) > sum(self.kinds.values()):
            self.kinds = kinds
        self.most = {kind: max(count, self.most.get(kind, 0)) for kind, count in kinds.items()}

    def snapshot(self, host: Kinds | None = None, disk: Kinds | None = None) -> Snapshot:
        """Return it with what lies beside the device."""
        phase = "backward" if self.is_backward else "forward"
        return Snapshot(self.unit or "", phase, self.kinds, host or {}, disk or {}, self.most)


class Segments:
    """The segments of a step, with the most bytes in each; ``held`` tells those of now, by kind."""

    def __init__(self, held: Callable[[], Kinds]) -> None:
        self._held = held
        self._activations = self._away = 0
        self.found = [Segment(None, is_backward=False)]

    def note(self) -> None:
        """Take what is held now into account."""
        self.found[-1].add({**self._held(), "activations": self._activations}, self._away)

    def follow(self, event: Event) -> None:
        """Note what was held before an event, and begin the segment that it begins."""
        self._activations, self._away = event.before, max(self._away, event.away)
        self.note()
        self._activations, self._away = event.now, event.away
        is_backward = self.found[-1].is_backward or event.kind is Kind.LOSS
        if event.kind is Kind.GRAD:
            self.note()
        elif event.kind in (Kind.FORWARD, Kind.BACKWARD):
            self._begin(event.unit, is_backward=event.kind is Kind.BACKWARD)
        elif event.kind is not Kind.BACKWARD_END:
            self._begin(None, is_backward=is_backward)

    def _begin(self, unit: str | None, *, is_backward: bool) -> None:
        last = self.found[-1]
        if (unit, is_backward) != (last.unit, last.is_backward):
            self.found.append(Segment(unit, is_backward))
