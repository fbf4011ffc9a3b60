"""What one rank holds of a model, term by term: arithmetic on layouts and plans.

A model is a list of **terms**, one for each unit, which say what the unit weighs in each state.
They come from the drafts that an engine builds its buffers from, and every number from the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch.nn import Parameter

from lightning_zero.draft import UnitDraft
from lightning_zero.layout import Layout
from lightning_zero.memory.dry_run import Stretch
from lightning_zero.optim import StateBytes
from lightning_zero.plan import Plan

RESTING = ("weights", "gradients", "master", "states", "buffers")
PASSING = ("gathered", "unreduced", "activations")
KINDS = (*RESTING, *PASSING)
"""Kinds of bytes: those that a rank holds all the time, and those that come and go in a step.

``gathered`` is whole weights of units that rest sharded, ``unreduced`` gradients before and during
their reduction; the other words are the vocabulary's.
"""

Kinds = dict[str, int]
StateOf = Callable[[Parameter], StateBytes]


@dataclass
class UnitTerms:
    """What one unit weighs on one rank.

    Attributes:
        name: The unit's name; the root's is ``""``.
        resting: Bytes between steps, by kind.
        whole: Bytes of the whole weights, if they rest sharded.
        partial: Bytes of whole gradients before they are reduced.
        scratch: Sizes in bytes of the receive buffers of one reduction, and how many of each.
        target: Bytes of a second gradient shard, into which later microbatches are reduced.
    """

    name: str
    resting: Kinds = field(default_factory=lambda: dict.fromkeys(RESTING, 0))
    whole: int = 0
    partial: int = 0
    scratch: Counter[int] = field(default_factory=Counter)
    target: int = 0

    def add(self, layout: Layout, plan: Plan, *, trainable: bool, receives: bool) -> None:
        """Count one bundle."""
        for kind, count in plan.resting_bytes(
            layout.numel, layout.world_size, trainable=trainable
        ).items():
            self.resting[kind] += count
        if plan.gives_weights_back:
            self.whole += layout.numel * plan.weight.dtype.itemsize
        if trainable:
            self.partial += layout.numel * plan.grad.dtype.itemsize
            self.target += layout.shard_numel * plan.master.dtype.itemsize
            if receives:
                self.scratch[layout.shard_numel * plan.grad.dtype.itemsize] += layout.world_size - 1


def terms_of_drafts(
    drafts: Iterable[UnitDraft], state_of: StateOf, *, world_size: int, rank: int, receives: bool
) -> list[UnitTerms]:
    """The terms of units that have no memory yet."""
    found = []
    for draft in drafts:
        terms = UnitTerms(draft.name)
        for named, plan in draft.bundles:
            layout = Layout.build(
                [(name, tuple(p.shape), tuple(p.stride())) for name, p in named], world_size
            )
            trainable = named[0][1].requires_grad
            terms.add(layout, plan, trainable=trainable, receives=receives)
            for index, (_, parameter) in enumerate(named if trainable else ()):
                start, stop = layout.piece(index, rank)
                terms.resting["states"] += state_of(parameter).of(stop - start)
        found.append(terms)
    return found


@dataclass(frozen=True)
class Moment:
    """What a rank holds at a point of a step.

    Attributes:
        unit: The unit that runs; the root's is ``""``.
        phase: ``"forward"``, ``"backward"`` or ``"rest"``.
        kinds: Bytes by kind.
    """

    unit: str
    phase: str
    kinds: Kinds

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.kinds.values())

    @property
    def label(self) -> str:
        """The words to show."""
        return "at rest" if self.phase == "rest" else f"{self.phase} of {self.unit or 'the root'}"


@dataclass(frozen=True)
class Pace:
    """The settings that decide how many units are in memory at once."""

    prefetch: int = 1
    reshard_after_forward: bool = True
    holds_partials: bool = False
    """Whole gradients of all units stay between microbatches."""
    accumulates: bool = False
    """A step has several microbatches."""


def moments(
    units: Sequence[UnitTerms], stretches: Sequence[Stretch], resting: Kinds, pace: Pace
) -> list[Moment]:
    """What a rank holds in every stretch of a step, from its first to the rest after it."""
    by_name = {unit.name: unit for unit in units}
    needs = [stretch for stretch in stretches if stretch.unit is not None]
    held = _Unreduced(by_name[""], units, pace)
    found, place = [], -1
    for stretch in stretches:
        place += stretch.unit is not None
        kinds = {
            **resting,
            "gathered": max(
                sum(by_name[name].whole for name in names)
                for names in _whole_sets(needs, place, stretch, list(by_name), pace)
            ),
            "unreduced": held.during(by_name[stretch.unit or ""], is_backward=stretch.is_backward),
            "activations": stretch.activations,
        }
        phase = "backward" if stretch.is_backward else "forward"
        found.append(Moment(stretch.unit or "", phase, kinds))
    found.append(Moment("", "rest", {**dict.fromkeys(KINDS, 0), **resting}))
    return found


def _whole_sets(
    needs: Sequence[Stretch], place: int, stretch: Stretch, names: Sequence[str], pace: Pace
) -> list[set[str]]:
    """The units that are whole together at some instant of a stretch."""

    def units(stretches: Sequence[Stretch]) -> set[str]:
        return {str(need.unit) for need in stretches}

    ahead = needs[place + 1 : place + 1 + pace.prefetch]
    always = {""}
    if not pace.reshard_after_forward:
        still = needs[max(place, 0) :]
        seen = units([need for need in needs[: place + 1] if not need.is_backward])
        always |= seen & units([need for need in still if need.is_backward])
    if stretch.unit is None:
        turn = needs[place : place + 2]
        stays = len(turn) == 2 and turn[0].unit == turn[1].unit
        return [always | units(ahead) | (units(turn) if stays else set())]
    always |= _around(stretch.unit, names)
    sets = [always | units([stretch, *ahead])]
    before = needs[place - 1 : place] if place else []
    if before and stretch.is_backward and before[0].is_backward:
        # What just ended is given back an instant after this unit is needed, and prefetching waits
        # for it. Only the outermost unit is left of several that end together.
        ended = {str(before[0].unit), *_around(str(before[0].unit), names)}
        left = min(ended - always - {stretch.unit}, key=len, default=stretch.unit)
        waits = left == before[0].unit
        reach = max(pace.prefetch, 1) if waits else pace.prefetch + 1
        sets.append(always | {left} | units(needs[place : place + reach]))
    return sets


def _around(unit: str, names: Sequence[str]) -> set[str]:
    """The units inside of which ``unit`` lies."""
    return {name for name in names if name and unit.startswith(f"{name}.")}


class _Unreduced:
    """Gradients before and during their reduction, as a backward goes from unit to unit.

    One unit's gradients arrive while those of the unit before it are reduced. The root's are
    counted all along: they may come first and be complete last.
    """

    def __init__(self, root: UnitTerms, units: Sequence[UnitTerms], pace: Pace) -> None:
        self._root = root
        self._pace = pace
        self._all = sum(unit.partial for unit in units)
        self._arriving = self._reducing = UnitTerms("nothing")
        self._scratch = Counter(root.scratch)

    def during(self, unit: UnitTerms, *, is_backward: bool) -> int:
        """Bytes in the next stretch; receive buffers are kept to the end of the backward."""
        if not is_backward:
            return self._all if self._pace.holds_partials else 0
        if unit.partial and unit is not self._arriving:
            self._reducing, self._arriving = self._arriving, unit
            self._scratch |= self._reducing.scratch
        held = {id(u): u.partial for u in (self._root, self._arriving, self._reducing)}
        partial = self._all if self._pace.holds_partials else sum(held.values())
        target = max(self._reducing.target, self._root.target) if self._pace.accumulates else 0
        return partial + target + sum(size * count for size, count in self._scratch.items())
