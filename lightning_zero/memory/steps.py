"""Bytes of a rank through a step: under the engine, under DDP, and of a number of parameters.

With offload from a CPU to files, masters, states and sharded weights are mapped: they count as
files, whatever the system keeps of them in its page cache.

With offload from another device some bytes are on their way between it and its host:

* **weights** that rest outside the device come unit by unit, into their place in the whole. Those
  that have another dtype than the masters are cast there, out of a shard of the masters, one after
  the other;
* **gradients** leave the device as a unit's reduction ends: two shards of them, one that is reduced
  and one that is sent, and copies of what stays of a shard that is sent. From the second microbatch
  on two buffers on the host take them, which are added there;
* **the step** goes unit by unit on the host, in place;
* **activations** may wait there for their backward, as the dry run has found.

From files it is stepped in staging memory on the host, which is there in that step only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from lightning_zero.comm import DryCommunicator
from lightning_zero.memory.cluster import Timeline
from lightning_zero.memory.replay import replay
from lightning_zero.memory.snapshots import Segment, Segments, Snapshot
from lightning_zero.memory.terms import KINDS, RESTING, Kinds, UnitTerms
from lightning_zero.memory.trace import Event, Kind
from lightning_zero.plan import Medium, Settings

_IN_FLIGHT = 2


def sharded_step(
    events: Sequence[Event],
    module: nn.Module,
    settings: Settings,
    comm: DryCommunicator,
    units: Sequence[UnitTerms],
    *,
    buffers: int,
    stepped: int,
    staged: int,
    is_early: bool,
    num_microbatches: int,
    adds_gradients: bool,
    timeline: Timeline | None,
) -> list[Snapshot]:
    """Return what a rank holds in a step's last microbatch under the engine, and at rest after it.

    Events, module and settings are as in :func:`replay`; ``units`` are the terms of all, the root
    last; ``stepped`` is what the optimizer's step needs of weights and states beside those at rest,
    ``staged`` the host memory in which it has states on their way between files, if ``is_early``
    from the end of a unit's backward on.
    ``adds_gradients`` if reduced gradients are added to those of earlier microbatches. What the
    rank does goes to ``timeline``, if it is that to which ``comm`` tells its messages.
    """
    timeline = timeline or Timeline()
    timeline.optimizer_bytes = _optimizer_bytes(units)
    timeline.axes = {name: one.axis for name, one in comm.transports.items()}
    still = {**dict.fromkeys(KINDS, 0), **_resting(units, Medium.DEVICE), "buffers": buffers}
    host, disk = (_resting(units, medium) for medium in (Medium.HOST, Medium.DISK))
    transport, passing = comm.transport, comm.transport.passing
    kept_share = {unit.name or "root": unit.kept_share for unit in units}
    sent_share = {unit.name or "root": unit.sent_share for unit in units}
    cast = max(unit.cast for unit in units)

    def held(cast: int = cast) -> Kinds:
        # What is offloaded is reduced into a shard that is free anyway, and is sent from there.
        sent = _share_of(sent_share, transport.last_reduced)
        in_flight = transport.targets
        targets = sum(in_flight.values()) - _share_of(sent_share, in_flight)
        return {
            **still,
            "gathered": passing["gathered"].nbytes
            + (transport.gathered + cast if settings.stage == 3 else 0),
            "gradients": _share_of(kept_share, transport.reduced) + sent,
            "unreduced": passing["unreduced"].nbytes + transport.partials + targets,
        }

    run = functools.partial(replay, events, module, settings, comm)
    segments = run(num_microbatches=num_microbatches, held=held, timeline=timeline)
    added = sum(sorted(unit.flushed for unit in units)[-_IN_FLIGHT:]) if adds_gradients else 0
    found = []
    for segment, is_stepping in zip(segments, _are_stepping(segments), strict=True):
        staging = segment.is_backward * added + (staged if is_early and is_stepping else 0)
        found.append(segment.snapshot({**host, "staging": staging + segment.away}, disk))
    rest = held(cast=0)
    if stepped or staged:
        kinds = {**rest, "gathered": rest["gathered"] + stepped}
        found.append(Snapshot("", "step", kinds, {**host, "staging": staged}, disk))
    return [*found, Snapshot("", "rest", rest, {**host, "staging": 0}, disk)]


def _share_of(shares: Mapping[str, float], nbytes: Mapping[str, int]) -> int:
    """Return the bytes of all units, of each its share."""
    return sum(round(shares[unit] * count) for unit, count in nbytes.items())


def _are_stepping(segments: Sequence[Segment]) -> Iterator[bool]:
    """Yield for each segment whether a unit may be stepped in it, as another has gone backward."""
    gone_backward = set[str]()
    for segment in segments:
        if segment.is_backward and segment.unit is not None:
            gone_backward.add(segment.unit)
        yield segment.is_backward and len(gone_backward) > 1


def replicated_step(
    events: Sequence[Event], sizes: Sequence[int], resting: Kinds, *, adds_gradients: bool
) -> list[Snapshot]:
    """Return what a rank holds under DDP; ``sizes`` are the bytes of each parameter, by number."""
    # Beside the gradients DDP keeps buckets of the same size, which it sends.
    held = {**resting, "unreduced": resting["gradients"]}
    segments = Segments(lambda: held)
    for event in events:
        segments.follow(event)
        if adds_gradients:
            continue
        if event.kind is Kind.LOSS:
            # The Trainer has just dropped the gradients of the step before.
            held["gradients"] = 0
        elif event.kind is Kind.GRAD:
            held["gradients"] += sizes[event.parameter]
    segments.note()
    return [*(segment.snapshot() for segment in segments.found), Snapshot("", "rest", held)]


def without_units(units: Sequence[UnitTerms], *, is_kept: bool) -> list[Snapshot]:
    """Return what is known of a model that is a number of parameters, all in one unit.

    Whole gradients are kept between microbatches if ``is_kept``.
    """
    device, host, disk = (_resting(units, medium) for medium in Medium)
    still = {**dict.fromkeys(KINDS, 0), **device}
    kept = sum(unit.partial for unit in units) if is_kept else 0
    return [
        Snapshot("", "backward", {**still, "unreduced": kept}, host, disk),
        Snapshot("", "rest", still, host, disk),
    ]


def _optimizer_bytes(units: Sequence[UnitTerms]) -> int:
    """Return what a step reads and writes: gradients once, as large masters and states twice."""
    every = [kinds for unit in units for kinds in unit.resting.values()]
    return sum(3 * kinds["gradients"] + 2 * kinds["states"] for kinds in every)


def _resting(units: Sequence[UnitTerms], medium: Medium) -> Kinds:
    """Return what all units hold between steps in one medium."""
    return {kind: sum(unit.resting[medium][kind] for unit in units) for kind in RESTING}
