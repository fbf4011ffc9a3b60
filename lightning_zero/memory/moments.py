"""A step as a rank sees it: what it holds from moment to moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lightning_zero.memory.dry_run import Event, Stretch
from lightning_zero.memory.reduction import Instant, Reductions
from lightning_zero.memory.staging import staged_in_pass, staged_in_step
from lightning_zero.memory.terms import KINDS, RESTING, Kinds, UnitTerms
from lightning_zero.plan import Medium

_LABELS = {"rest": "at rest", "step": "optimizer's step"}


@dataclass(frozen=True)
class Moment:
    """What a rank holds in a part of a step.

    Attributes:
        unit: The unit that runs; the root's is ``""``.
        phase: ``"forward"``, ``"backward"``, ``"step"`` (only with offload) or ``"rest"``.
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
        """The words to show."""
        return _LABELS.get(self.phase) or f"{self.phase} of {self.unit or 'the root'}"


@dataclass(frozen=True)
class Pace:
    """The settings that decide how much is in memory at once.

    Attributes:
        prefetch: How many units are gathered ahead.
        reshard_after_forward: Whether units are given back between forward and backward.
        num_microbatches: How many a step has.
        reduces_every: Whether gradients are reduced in every microbatch, not only in the last.
        shares_memory: Whether ranks read each other's reduce buffers.
        offloads: Whether anything rests outside the device.
    """

    prefetch: int = 1
    reshard_after_forward: bool = True
    num_microbatches: int = 1
    reduces_every: bool = True
    shares_memory: bool = False
    offloads: bool = False


def moments(
    units: Sequence[UnitTerms], stretches: Sequence[Stretch], buffers: int, pace: Pace
) -> list[Moment]:
    """What a rank holds in every stretch of a step's last microbatch, and at rest after it.

    Args:
        units: The terms of all units, the root last.
        stretches: One microbatch.
        buffers: Bytes of the module's buffers.
        pace: How many units are in memory at once.
    """
    by_name = {unit.name: unit for unit in units}
    resting = _resting(units, Medium.DEVICE)
    resting["buffers"] = buffers
    host, disk = (_resting(units, medium) for medium in (Medium.HOST, Medium.DISK))
    needs = [stretch for stretch in stretches if stretch.unit is not None]
    passing = iter(_gradients(units, stretches, pace))
    adds = pace.num_microbatches > 1 and pace.reduces_every
    found, place = [], -1
    for stretch in stretches:
        place += stretch.unit is not None
        kinds = {
            **resting,
            "gathered": max(
                sum(by_name[name].whole for name in names)
                for names in _whole_sets(needs, place, stretch, list(by_name), pace)
            ),
        }
        coming = {str(need.unit) for need in needs[max(place, 0) : place + 1 + pace.prefetch]}
        coming |= {""} if place <= 0 else set()
        staging = staged_in_pass(
            [by_name[name] for name in coming], units, adds_gradients=adds and stretch.is_backward
        )
        phase = "backward" if stretch.is_backward else "forward"
        instants = next(passing)
        most = {kind: max(getattr(one, kind) for one in instants) for kind in Instant._fields}
        kinds |= max(instants, key=sum)._asdict()
        beside = {**host, "staging": staging}
        found.append(Moment(stretch.unit or "", phase, kinds, beside, disk, most))
    still = {**dict.fromkeys(KINDS, 0), **resting, **next(passing)[-1]._asdict()}
    if pace.offloads:
        found.append(Moment("", "step", still, {**host, "staging": staged_in_step(units)}, disk))
    found.append(Moment("", "rest", still, {**host, "staging": 0}, disk))
    return found


def without_units(units: Sequence[UnitTerms], pace: Pace) -> list[Moment]:
    """What is known of a model that is a number of parameters; ``units`` is one with all of it."""
    device, host, disk = (_resting(units, medium) for medium in Medium)
    still = {**dict.fromkeys(KINDS, 0), **device}
    kept = 0
    if pace.num_microbatches > 1 and not pace.reduces_every:
        kept = sum(bundle.partial for unit in units for bundle in unit.bundles)
    return [
        Moment("", "backward", {**still, "unreduced": kept}, host, disk),
        Moment("", "rest", still, host, disk),
    ]


def _resting(units: Sequence[UnitTerms], medium: Medium) -> Kinds:
    """What all units hold between steps in one medium."""
    return {kind: sum(unit.resting[medium][kind] for unit in units) for kind in RESTING}


def _gradients(
    units: Sequence[UnitTerms], stretches: Sequence[Stretch], pace: Pace
) -> Iterator[list[Instant]]:
    """What is held of gradients in every stretch of the last microbatch, and after it."""
    reductions = Reductions(units, _turns(units, stretches), shares_memory=pace.shares_memory)
    events = [event for stretch in stretches for event in stretch.events]
    ways = [pace.reduces_every] * (pace.num_microbatches - 1)
    # The step before leaves gradients, which live until the next backward, and buffers.
    for sends in (*ways, True):
        _go_backward(reductions, events, sends=sends)
    reductions.step()
    for sends in ways:
        _go_backward(reductions, events, sends=sends)
    has_begun = False
    for number, stretch in enumerate(stretches, start=1):
        reductions.look()
        if stretch.is_backward and not has_begun:
            reductions.begin(sends=True)
            has_begun = True
        for event in stretch.events:
            reductions.take(event)
        reductions.note(stretch.activations)
        if number == len(stretches):
            reductions.finish()
        yield reductions.look()
    reductions.step()
    reductions.note(0)
    yield reductions.look()


def _go_backward(reductions: Reductions, events: Sequence[Event], *, sends: bool) -> None:
    reductions.begin(sends=sends)
    for event in events:
        reductions.take(event)
    reductions.finish()


def _turns(units: Sequence[UnitTerms], stretches: Sequence[Stretch]) -> list[UnitTerms]:
    """The units that run, in the order in which they are reduced."""
    by_name = {unit.name: unit for unit in units}
    ran = dict.fromkeys(s.unit for s in stretches if s.unit is not None and not s.is_backward)
    return [*(by_name[name] for name in reversed(ran)), by_name[""]]


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
