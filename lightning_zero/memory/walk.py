"""What a rank holds: at rest, by the plan, and in a step, walked through by its events.

At rest a model is a list of **terms**, one per unit. In a step a rank also holds the whole weights
of the root, of the units in use and of those prefetched, the unreduced gradients of the unit in
backward and of the one being reduced, and activations.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch.nn import Parameter

from lightning_zero.comm import Codec
from lightning_zero.memory.dry_run import Event, Kind
from lightning_zero.plan import Layout, Medium, Plan, Settings
from lightning_zero.tensors import numel_at_a_time

RESTING = ("weights", "gradients", "master", "states", "buffers")
KINDS = (*RESTING, "gathered", "unreduced", "activations")
"""Kinds of bytes: those that a rank always holds, and those that come and go in a step.

``gathered`` are whole weights of units that rest sharded, ``unreduced`` gradients before and during
their reduction; ``docs/memory.md`` describes the others.
"""

AWAY_ROWS = (
    *(f"host {kind}" for kind in ("weights", "gradients", "master", "states")),
    *(f"disk {kind}" for kind in ("weights", "master", "states")),
)
"""Kinds of bytes in host memory and in files, as ``ShardedModel.memory`` and tables name them."""

StateOf = Callable[[Parameter, int], int]
"""Returns the optimizer state bytes of a number of elements of a parameter; 0 if it is frozen."""


Flat = tuple[Plan, Layout, Sequence[Parameter], bool]
"""Parameters on one flat buffer, and whether they are trained."""


@dataclass
class UnitTerms:
    """The bytes of one unit on one rank; under DDP, of one parameter.

    Attributes:
        name: The unit's name; the root's is ``""``.
        rests: Bytes between steps, by kind and medium.
        gathered: Bytes of whole weights that are released after use.
        partial: Bytes of whole gradients before their reduction.
        coding: Bytes beside these while they are encoded: codes and temporary tensors.
        in_flight: Bytes of a reduction under way, without its result.
        shard: Bytes of a result that stays on the device.
        leaving: Bytes of a result that leaves the device for its host.
        trainable: The names of the trainable parameters.
    """

    name: str
    rests: Counter[str] = field(default_factory=Counter)
    gathered: int = 0
    partial: int = 0
    coding: int = 0
    in_flight: int = 0
    shard: int = 0
    leaving: int = 0
    trainable: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, name: str, flats: Iterable[Flat], rank: int, state_of: StateOf) -> UnitTerms:
        """Return the terms of a unit, allocated or not, on a rank of a copy."""
        terms = cls(name)
        for plan, layout, parameters, trainable in flats:
            kinds = plan.resting_bytes(layout.numel, layout.world_size, trainable=trainable)
            sizes = [piece.numel for piece in layout.pieces(rank)]
            if not any(size or not p.numel() for size, p in zip(sizes, parameters, strict=True)):
                kinds["gradients"] = 0  # a rank whose shard is padding keeps none
            kinds["states"] = sum(map(state_of, parameters, sizes))
            terms.rests += plan.rows(kinds)
            if plan.reshards:
                terms.gathered += layout.numel * plan.weight.dtype.itemsize
            if not trainable:
                continue
            partial = in_flight = layout.numel * plan.grad.dtype.itemsize
            if plan.reduce_bits is not None:
                codes = layout.world_size * Codec(layout.shard_numel).nbytes
                at_once = min(layout.numel, numel_at_a_time(plan.grad.device))
                terms.coding += codes + 2 * torch.float32.itemsize * at_once
                in_flight = 2 * codes
            shard = kinds["gradients"]
            terms.partial += partial
            # The sum of one rank's gradients is these themselves.
            terms.in_flight += 0 if layout.world_size == 1 and shard == partial else in_flight
            if plan.media["gradients"] is Medium.DEVICE:
                terms.shard += shard
            else:
                terms.leaving += shard
            terms.trainable |= {slot.name for slot in layout.slots}
        return terms


def in_order(units: Sequence[UnitTerms]) -> list[Event]:
    """Return the events of a step that runs units as they are registered, without activations."""
    *inner, root = units
    events = [Event(kind, u.name) for u in inner for kind in (Kind.FORWARD, Kind.FORWARD_END)]
    events += [Event(Kind.LOSS), *(Event(Kind.GRAD, name) for name in root.trainable)]
    last = ""
    for unit in reversed(inner):
        events.append(Event(Kind.BACKWARD, unit.name))
        # The gradients of the last unit's inputs are those of this one's outputs.
        events += [Event(Kind.BACKWARD_END, last)] if last else []
        events += [Event(Kind.GRAD, name) for name in unit.trainable]
        last = unit.name
    return [*events, Event(Kind.END)]


_LABELS = {"rest": "at rest", "step": "in the optimizer's step"}


@dataclass
class Snapshot:
    """The bytes that a rank holds on the device in a part of a step.

    Attributes:
        unit: The unit that runs; the root's is ``""``.
        phase: ``"forward"``, ``"backward"`` and ``"rest"``, and ``"step"`` if the optimizer's step
            takes memory for whole parameters.
        kinds: Bytes by kind, at the instant of the largest total.
    """

    unit: str
    phase: str
    kinds: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.kinds.values())

    @property
    def label(self) -> str:
        """When it is, as a phrase: ``in backward of blocks.3``."""
        return _LABELS.get(self.phase) or f"in {self.phase} of {self.unit or 'the root'}"


class Walk:
    """A walk through the last microbatch of a rank's step, in the order of the step before.

    Args:
        events: The events of the microbatch.
        units: The terms of all units.
        still: Bytes on the device that rest, by kind.
        settings: The settings of the run.
        keeps_whole: Whether whole gradients of earlier microbatches wait for this one.
        adds: Whether reduced gradients of earlier microbatches do.

    Attributes:
        parts: What the rank holds in each part of the microbatch.
        most: The most bytes of each kind at any instant.
    """

    def __init__(
        self,
        events: Sequence[Event],
        units: Sequence[UnitTerms],
        still: Mapping[str, int],
        settings: Settings,
        *,
        keeps_whole: bool = False,
        adds: bool = False,
    ) -> None:
        self.parts, self.most = [Snapshot("", "forward", {})], Counter[str]()
        self._units = {unit.name: unit for unit in units}
        self._still, self._adds = still, adds
        self._needs = deque(e.name for e in events if e.kind in (Kind.FORWARD, Kind.BACKWARD))
        self._prefetched = settings.prefetch
        # How many needs from now on keep a unit whole after its forward.
        self._kept_for = 1 if settings.reshard_after_forward else len(self._needs)
        self._whole, self._last_backward = {"", *self._ahead(settings.prefetch)}, ""
        self._owners = {name: unit for unit in units for name in unit.trainable}
        self._missing = Counter({unit.name: 0 for unit in self._owners.values()})
        self._missing.update(self._owners[e.name].name for e in events if e.kind is Kind.GRAD)
        self._partial = {unit.name: unit.partial for unit in units} if keeps_whole else {}
        self._gradients = 0 if keeps_whole else still["gradients"]
        self._under_way = self._left = 0
        self._note(0)
        for event in events:
            self._note(event.most)
            self._follow(event)

    def _note(self, activations: int) -> None:
        """Account for what is held now, with these bytes of activations."""
        kinds = {
            **self._still,
            "gradients": self._gradients,
            "gathered": sum(
                self._units[name].gathered for name in self._whole & self._units.keys()
            ),
            "unreduced": self._still["unreduced"] + sum(self._partial.values()) + self._under_way,
            "activations": activations,
        }
        self.most |= Counter(kinds)
        part = self.parts[-1]
        if not part.kinds or sum(kinds.values()) > part.total:
            part.kinds = kinds

    def _follow(self, event: Event) -> None:
        """Change what is held as an event does."""
        kind, name = event.kind, event.name
        phase = "backward" if kind is Kind.LOSS else self.parts[-1].phase
        if kind not in (Kind.BACKWARD_END, Kind.GRAD):
            unit = name if kind in (Kind.FORWARD, Kind.BACKWARD) else ""
            if (unit, phase) != (self.parts[-1].unit, self.parts[-1].phase):
                self.parts.append(Snapshot(unit, phase, {}))
        if kind is Kind.LOSS and not self._adds:
            self._gradients = 0  # the Trainer drops those of the step before
        elif kind in (Kind.FORWARD, Kind.BACKWARD):
            self._need(name, phase)
        elif kind is Kind.FORWARD_END and phase == "forward":
            self._whole -= {name} - self._ahead(self._kept_for)
        elif kind is Kind.BACKWARD_END:
            self._whole.discard(name)
            self._whole |= self._ahead(self._prefetched)
        elif kind is Kind.GRAD:
            owner = self._owners[name]
            self._missing[owner.name] -= 1
            self._partial.setdefault(owner.name, owner.partial)
            self._note(event.now)  # and not after the reduction, when it is freed
            if owner.name and not self._missing[owner.name]:
                self._reduce(owner, event.now)
            return
        elif kind is Kind.END:
            for waiting in [*self._missing]:
                self._reduce(self._units[waiting], event.now)
        self._note(event.now)

    def _ahead(self, count: int) -> set[str]:
        return set(islice(self._needs, count))

    def _need(self, unit: str, phase: str) -> None:
        """Make a unit whole, and prefetch unless the one before it in backward is still whole."""
        self._needs.popleft()
        last, self._last_backward = self._last_backward, unit if phase == "backward" else ""
        if last in ("", unit) or last not in self._whole:
            self._whole |= self._ahead(self._prefetched)
        self._whole.add(unit)

    def _reduce(self, unit: UnitTerms, activations: int) -> None:
        """Begin a unit's reduction, when that of the unit before it has ended."""
        self._partial.setdefault(unit.name, unit.partial)
        self._note(activations and activations + unit.coding)
        del self._partial[unit.name], self._missing[unit.name]
        # The result of the unit before may still be leaving, and what it was added to as well.
        left = self._left * (1 + self._adds)
        self._under_way = unit.in_flight + unit.shard * self._adds + unit.leaving + left
        self._left = unit.leaving
        self._gradients += unit.shard * (not self._adds)
