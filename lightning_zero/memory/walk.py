"""What a rank holds: at rest, by the plan, and in a step, walked through by its events.

At rest a model is a list of **terms**, one per unit, made from the specs that an engine builds its
buffers from. In a step a rank also holds the whole weights of the root and of the units in use or
prefetched, the unreduced gradients of the unit in backward and of the one being reduced, and
activations. Which unit is whole, and when its gradients are reduced, follows the engine's rules
(``engine/schedule``, ``engine/backward``) in a step whose order of units is that of the step
before.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import Parameter

from lightning_zero.comm import Codec
from lightning_zero.memory.dry_run import Event, Kind
from lightning_zero.plan import Layout, Medium, Offload, Plan, Settings, UnitSpec
from lightning_zero.tensors import RING_BYTES, numel_at_a_time

RESTING = ("weights", "gradients", "master", "states", "buffers")
KINDS = (*RESTING, "gathered", "unreduced", "activations")
"""Kinds of bytes: those that a rank always holds, and those that come and go in a step.

``gathered`` are whole weights of units that rest sharded, ``unreduced`` gradients before and during
their reduction; ``docs/memory.md`` describes the others.
"""

HOST_KINDS = (*RESTING, "staging")
"""Kinds of bytes in host memory apart from the device's.

``staging`` is in transit: between the device and the host, or between files and a step.
"""

AWAY_ROWS = (
    *(f"host {kind}" for kind in ("weights", "gradients", "master", "states")),
    *(f"disk {kind}" for kind in ("weights", "master", "states")),
)
"""Kinds of bytes in host memory and in files, as ``ShardedModel.memory`` and tables name them."""

Kinds = dict[str, int]
StateOf = Callable[[Parameter, int], int]
"""Returns the optimizer state bytes of a number of elements of a parameter; 0 if it is frozen."""


@dataclass
class UnitTerms:
    """The bytes of one unit on one rank.

    Attributes:
        name: The unit's name; the root's is ``""``.
        resting: Bytes between steps, by medium and kind.
        gathered: Bytes of whole weights that are released after use.
        coded: Bytes of the encoded weights while they are gathered.
        partial: Bytes of whole gradients before their reduction.
        in_flight: Bytes of a reduction under way, without its result.
        coding: Bytes beside whole gradients while these are encoded: codes and temporary tensors.
        shard: Bytes of the rank's reduced gradients.
        sends_shard: Whether these leave the device for its host.
        ring: Bytes of pinned memory that stage the upload of weights from files.
        lent: Bytes of fp32 masters, gradients and states while the unit is stepped, if they rest in
            bf16 with stochastic rounding.
        trainable: The ids of the trainable parameters.
    """

    name: str
    resting: dict[Medium, Kinds] = field(
        default_factory=lambda: {medium: dict.fromkeys(RESTING, 0) for medium in Medium}
    )
    gathered: int = 0
    coded: int = 0
    partial: int = 0
    in_flight: int = 0
    coding: int = 0
    shard: int = 0
    sends_shard: bool = False
    ring: int = 0
    lent: int = 0
    trainable: set[int] = field(default_factory=set)

    def add(self, layout: Layout, plan: Plan, kinds: Kinds, *, trainable: bool) -> None:
        """Count a group of flat parameters with its ``kinds`` of resting bytes."""
        for kind, count in kinds.items():
            self.resting[plan.media[kind]][kind] += count
        codes = layout.world_size * Codec(layout.shard_numel).nbytes
        if plan.reshards:
            self.gathered += layout.numel * plan.weight.dtype.itemsize
            self.coded += codes if plan.gather_bits else 0
        if trainable:
            partial = layout.numel * plan.grad.dtype.itemsize
            self.partial += partial
            self.in_flight += partial if plan.reduce_bits is None else 2 * codes
            if plan.reduce_bits is not None:
                at_once = min(layout.numel, numel_at_a_time(plan.grad.device))
                self.coding = max(self.coding, codes + 2 * torch.float32.itemsize * at_once)
            self.shard += kinds["gradients"]
            self.sends_shard |= plan.media["gradients"] is not Medium.DEVICE


def flat_bytes(
    plan: Plan,
    layout: Layout,
    parameters: Sequence[Parameter],
    rank: int,
    state_of: StateOf,
    *,
    trainable: bool,
) -> Kinds:
    """Return the bytes of a rank's part of flat parameters between steps, by kind."""
    kinds = plan.resting_bytes(layout.numel, layout.world_size, trainable=trainable)
    sizes = [stop - start for start, stop, _ in layout.pieces(rank)]
    if not any(size or not p.numel() for size, p in zip(sizes, parameters, strict=True)):
        kinds["gradients"] = 0  # a rank whose shard is padding keeps none
    return {**kinds, "states": sum(map(state_of, parameters, sizes))}


def terms_of_specs(
    specs: Iterable[UnitSpec],
    state_of: StateOf,
    *,
    num_shards: int,
    num_copies: int,
    rank: int,
    offload: Offload | None = None,
    on_host: bool = False,
) -> list[UnitTerms]:
    """Return the terms that units, not allocated yet, will have on a rank of a copy.

    If the device to offload from is the host (``on_host``), files are mapped and nothing is staged.
    """
    found = []
    for spec in specs:
        terms = UnitTerms(spec.name)
        for flat in spec.flat_parameters:
            plan, trainable = flat.plan, flat.trainable
            if offload is not None:
                plan = offload.of(plan, trainable=trainable, on_host=on_host)
            layout, parameters = flat.layout(num_shards, num_copies), [p for _, p in flat.named]
            kinds = flat_bytes(plan, layout, parameters, rank, state_of, trainable=trainable)
            terms.add(layout, plan, kinds, trainable=trainable)
            if plan.master.medium is Medium.DISK and not on_host:
                terms.ring = RING_BYTES
            if trainable:
                terms.trainable |= set(map(id, parameters))
            if plan.stochastic_rounding and trainable:
                for own, (start, stop, _) in zip(parameters, layout.pieces(rank), strict=True):
                    # Twice the elements have twice the states, but not twice the step count.
                    numel = stop - start
                    states = state_of(own, 2 * numel) - state_of(own, numel)
                    terms.lent += 2 * (states + 2 * numel * plan.master.dtype.itemsize)
        found.append(terms)
    return found


_LABELS = {"rest": "at rest", "step": "in the optimizer's step"}


@dataclass
class Snapshot:
    """The bytes that a rank holds in a part of a step.

    Attributes:
        unit: The unit that runs; the root's is ``""``.
        phase: ``"forward"``, ``"backward"``, ``"rest"``, or ``"step"`` if the optimizer's step
            takes memory: for staging, whole parameters, or fp32 copies of rounded states.
        kinds: Bytes on the device by kind, at the instant of the largest total.
        at_other_times: The most bytes of each kind on the device, at any instant of the part.
        staging: The most bytes in transit in host memory.
    """

    unit: str
    phase: str
    kinds: Kinds = field(default_factory=dict)
    at_other_times: Kinds = field(default_factory=dict)
    staging: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds on the device."""
        return sum(self.kinds.values())

    @property
    def label(self) -> str:
        """When it is, as a phrase: ``in backward of blocks.3``."""
        return _LABELS.get(self.phase) or f"in {self.phase} of {self.unit or 'the root'}"


class Walk:
    """A step of a rank, its last microbatch.

    Args:
        events: The events of a microbatch.
        still: Bytes on the device that rest, by kind.
        gradients: The gradients.
        weights: Weights that are gathered; ``None`` under DDP.
    """

    def __init__(
        self,
        events: Sequence[Event],
        still: Kinds,
        gradients: Buckets,
        weights: Gathered | None = None,
    ) -> None:
        self._events, self._still = events, still
        self._gradients, self._weights = gradients, weights
        self._parts = [Snapshot("", "forward")]

    def parts(self) -> list[Snapshot]:
        """Return what the rank holds in the parts of the microbatch."""
        phase = "forward"
        for event in self._events:
            self._note(event.before, event.away)
            if event.kind is Kind.LOSS:
                phase = "backward"
            if event.kind not in (Kind.BACKWARD_END, Kind.GRAD):
                unit = event.unit if event.kind in (Kind.FORWARD, Kind.BACKWARD) else ""
                if (unit, phase) != (self._parts[-1].unit, self._parts[-1].phase):
                    self._parts.append(Snapshot(unit, phase))
            self._note(event.now + self._gradients.begin(event), event.away)
            for _ in self._gradients.follow(event):
                self._note(event.now, event.away)
            if self._weights is not None:
                self._weights.follow(event)
            self._note(event.now, event.away)
        return self._parts

    def _note(self, activations: int, away: int) -> None:
        """Account for what is held now, with these bytes of activations."""
        kinds = {**self._still, **self._gradients.held(), "activations": activations}
        kinds["activations"] += self._gradients.temporary
        kinds["gathered"] = 0 if self._weights is None else self._weights.held
        part = self._parts[-1]
        part.staging = max(part.staging, away)
        if not part.kinds or sum(kinds.values()) > part.total:
            part.kinds = kinds
        most = part.at_other_times
        part.at_other_times = {kind: max(n, most.get(kind, 0)) for kind, n in kinds.items()}


class Gathered:
    """Whole weights of units that are released after use."""

    def __init__(self, events: Sequence[Event], reductions: Reductions, settings: Settings) -> None:
        self._units, self._missing = reductions.units, reductions.missing
        self._unit_of, self._settings = reductions.unit_of, settings
        self._needs = [e.unit for e in events if e.kind in (Kind.FORWARD, Kind.BACKWARD)]
        self._place, self._last_backward, self._is_backward = -1, "", False
        self._whole, self._on_way = {""}, set[str]()
        # Calls whose backward is still to begin or to end, by unit.
        self._awaited = Counter(
            e.unit for e in events if e.kind in (Kind.BACKWARD, Kind.BACKWARD_END)
        )
        self._prefetch()

    @property
    def held(self) -> int:
        """Bytes held now."""
        units = self._units
        whole = sum(units[name].gathered for name in self._whole)
        return whole + sum(units[name].coded for name in self._on_way)

    def follow(self, event: Event) -> None:
        """Gather and release what an event does."""
        unit = event.unit
        if event.kind is Kind.LOSS:
            self._is_backward = True
        elif event.kind is Kind.FORWARD:
            self._need(unit)
        elif event.kind is Kind.FORWARD_END and not self._is_backward:
            stays = self._awaited[unit] and not self._settings.reshard_after_forward
            if not stays and self._ahead(1)[:1] != [unit]:
                self._whole.discard(unit)
        elif event.kind is Kind.BACKWARD:
            self._awaited[unit] -= 1
            self._need(unit)
        elif event.kind is Kind.BACKWARD_END:
            self._awaited[unit] -= 1
            self._whole.discard(unit)
            self._prefetch()
        elif event.kind is Kind.GRAD:
            unit = self._unit_of[event.parameter]
            if unit and not self._missing[unit] and self._awaited[unit] <= 0:
                self._whole.discard(unit)
        elif event.kind is Kind.END:
            self._whole.clear()

    def _ahead(self, count: int) -> list[str]:
        return self._needs[self._place + 1 : self._place + 1 + count]

    def _prefetch(self) -> None:
        new = set(self._ahead(self._settings.prefetch)) - self._whole
        self._whole |= new
        self._on_way |= new

    def _need(self, unit: str) -> None:
        self._place += 1
        before, self._last_backward = self._last_backward, unit if self._is_backward else ""
        if before in ("", unit) or before not in self._whole:
            self._prefetch()
        self._whole.add(unit)
        self._on_way.discard(unit)


class Buckets:
    """Gradients under DDP, which sends them in buckets of the same size.

    Args:
        sizes: The bytes of each parameter's gradient, by its number in the module.
        total: Bytes of all gradients between steps.
        adds: Whether gradients are added to those of earlier microbatches.
    """

    def __init__(self, sizes: Sequence[int], total: int, *, adds: bool) -> None:
        self.sizes, self.adds = sizes, adds
        self.gradients = self._buckets = total
        self.temporary = 0

    def held(self) -> Kinds:
        """Return the bytes held now, by kind."""
        return {"gradients": self.gradients, "unreduced": self._buckets}

    def begin(self, event: Event) -> int:
        """Begin what an event does; return the bytes of a gradient that nobody else counts."""
        if event.kind is Kind.LOSS and not self.adds:
            self.gradients = 0  # the Trainer drops those of the step before
        return 0

    def follow(self, event: Event) -> Iterable[None]:
        """Do what an event does, and pause where the most may be held."""
        if event.kind is Kind.GRAD and not self.adds:
            self.gradients += self.sizes[event.parameter]
        return ()


class Reductions(Buckets):
    """Gradients under the engine.

    Args:
        events: The events of the step.
        sizes: The bytes of each parameter's gradient, by its number in the module.
        total: Bytes of all gradients between steps.
        units: The terms of all units, the root last.
        ids: The parameters' ids, by number.
        is_local: Whether gradients are reduced in the last microbatch only.
        num_microbatches: Microbatches per step.
        num_shards: Ranks that share one copy.
        receives: Whether a reduction receives the other ranks' parts into buffers of its own, as
            messages between CPUs do.
    """

    def __init__(
        self,
        events: Sequence[Event],
        sizes: Sequence[int],
        total: int,
        units: Sequence[UnitTerms],
        ids: Sequence[int],
        *,
        is_local: bool,
        num_microbatches: int,
        num_shards: int,
        receives: bool,
    ) -> None:
        is_kept = is_local and num_microbatches > 1
        super().__init__(sizes, 0 if is_kept else total, adds=num_microbatches > 1 and not is_local)
        self.units = {unit.name: unit for unit in units}
        by_id = {key: unit.name for unit in units for key in unit.trainable}
        self.unit_of = [by_id.get(key, "") for key in ids]
        self.missing = Counter(self.unit_of[e.parameter] for e in events if e.kind is Kind.GRAD)
        self._num_shards, self._receives = num_shards, receives
        self._counts = any(event.before for event in events)  # otherwise there was no batch
        kinds = [event.kind for event in events]
        forward = events[: kinds.index(Kind.LOSS)]
        order = dict.fromkeys(e.unit for e in forward if e.kind is Kind.FORWARD)
        rest = [name for name in self.units if name not in order]
        self._turns = [name for name in (*reversed(order), *rest) if self.units[name].trainable]
        self._under_way: UnitTerms | None = None
        self._partial = {unit.name: unit.partial for unit in units} if is_kept else {}
        self._received: dict[int, int] = {}
        # Shards of the last two units, on their way to the host.
        self._leaving: deque[int] = deque(maxlen=2)

    def held(self) -> Kinds:
        """Return the bytes held now, by kind."""
        unit, in_flight = self._under_way, 0
        if unit is not None:
            # The result counts as a gradient once it has arrived; one rank's are their own sum.
            is_own = self._num_shards == 1 and unit.shard == unit.partial
            in_flight = unit.partial if is_own else unit.in_flight + unit.shard
        waiting = sum(self._partial.values()) + sum(self._received.values())
        return {
            "gradients": self.gradients + sum(self._leaving),
            "unreduced": waiting + in_flight,
        }

    def begin(self, event: Event) -> int:
        """Begin what an event does; return the bytes of a gradient that nobody else counts."""
        super().begin(event)
        if event.kind is not Kind.GRAD:
            return 0
        unit = self.units[self.unit_of[event.parameter]]
        self._partial.setdefault(unit.name, unit.partial)
        return self.sizes[event.parameter] if self._counts else 0

    def follow(self, event: Event) -> Iterable[None]:
        """Do what an event does, and pause where the most may be held."""
        if event.kind is Kind.GRAD:
            self.missing[self.unit_of[event.parameter]] -= 1
        elif event.kind is not Kind.END:
            return
        while self._turns and (event.kind is Kind.END or not self.missing[self._turns[0]]):
            self._finish()
            unit = self.units[self._turns.pop(0)]
            if unit.coding and self._counts:
                self.temporary = unit.coding
                yield
                self.temporary = 0
            self._partial.pop(unit.name, None)
            if self._receives:
                size = unit.in_flight // self._num_shards
                self._received[size] = (self._num_shards - 1) * size
            self._under_way = unit
            yield
        if event.kind is Kind.END:
            self._finish()
            self._leaving.clear()
            self._received.clear()

    def _finish(self) -> None:
        unit, self._under_way = self._under_way, None
        if unit is not None and unit.sends_shard:
            self._leaving.append(unit.shard)
        elif unit is not None and not self.adds:  # else it is added to earlier microbatches'
            self.gradients += unit.shard
