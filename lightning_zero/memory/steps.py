"""Bytes of a rank through a step: under the engine, under DDP, and of a number of parameters.

With offload from a CPU to files, masters, states and sharded weights are memory-mapped: they count
as files, whatever the page cache keeps of them.

With offload from another device, some bytes are in transit between it and its host:

* **weights** that rest outside the device are copied unit by unit into their place in the whole
  weights. Those from files, and those that are cast each time, come by a ring of pinned memory,
  which is kept;
* **gradients** leave the device when a unit's reduction ends. They take two shards, one being
  reduced and one being sent, and copies of the part of a sent shard that stays. From the second
  microbatch on, they arrive in two buffers on the host, from which they are added;
* **the step** runs unit by unit on the host, in place. If masters and states are in files, it runs
  in staging memory on the host, which exists only during that step;
* **activations** may be kept on the host until their backward, as the dry run has found.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from torch import nn

from lightning_zero.comm import DryCommunicator
from lightning_zero.memory.cluster import Timeline
from lightning_zero.memory.replay import replay
from lightning_zero.memory.snapshots import Segments, Snapshot
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
    num_microbatches: int,
    adds_gradients: bool,
    timeline: Timeline | None,
) -> list[Snapshot]:
    """Return what a rank holds in a step's last microbatch under the engine, and at rest after it.

    Events, module and settings are as in :func:`replay`; ``units`` are the terms of all units, the
    root last. ``stepped`` are the device bytes that the optimizer's step needs in addition to those
    at rest, ``staged`` the bytes of host memory in which it stages states from files.
    ``adds_gradients`` if reduced gradients are added to those of earlier microbatches. ``timeline``
    records what the rank does; it must be the one that ``comm`` reports its messages to.
    """
    timeline = timeline or Timeline()
    timeline.optimizer_bytes = _optimizer_bytes(units)
    timeline.axes = {name: one.axis for name, one in comm.transports.items()}
    still = {**dict.fromkeys(KINDS, 0), **_resting(units, Medium.DEVICE), "buffers": buffers}
    host, disk = (_resting(units, medium) for medium in (Medium.HOST, Medium.DISK))
    transport, passing = comm.transport, comm.transport.passing
    kept_share = {unit.name or "root": unit.kept_share for unit in units}
    sent_share = {unit.name or "root": unit.sent_share for unit in units}
    ring = max(unit.ring for unit in units)

    def held() -> Kinds:
        # Offloaded gradients are reduced into the shards that they are sent from: counted once.
        sent = _share_of(sent_share, transport.last_reduced)
        in_flight = transport.targets
        targets = sum(in_flight.values()) - _share_of(sent_share, in_flight)
        return {
            **still,
            "gathered": passing["gathered"].nbytes
            + (transport.gathered if settings.stage == 3 else 0),
            "gradients": _share_of(kept_share, transport.reduced) + sent,
            "unreduced": passing["unreduced"].nbytes + transport.partials + targets,
        }

    run = functools.partial(replay, events, module, settings, comm)
    segments = run(num_microbatches=num_microbatches, held=held, timeline=timeline)
    added = sum(sorted(unit.flushed for unit in units)[-_IN_FLIGHT:]) if adds_gradients else 0
    found = []
    for segment in segments:
        staging = ring + segment.is_backward * added + segment.away
        found.append(segment.snapshot({**host, "staging": staging}, disk))
    rest = held()
    if stepped or staged:
        kinds = {**rest, "gathered": rest["gathered"] + stepped}
        found.append(Snapshot("", "step", kinds, {**host, "staging": ring + staged}, disk))
    return [*found, Snapshot("", "rest", rest, {**host, "staging": ring}, disk)]


def _share_of(shares: Mapping[str, float], nbytes: Mapping[str, int]) -> int:
    """Return the sum over units of each unit's share of its bytes."""
    return sum(round(shares[unit] * count) for unit, count in nbytes.items())


def replicated_step(
    events: Sequence[Event], sizes: Sequence[int], resting: Kinds, *, adds_gradients: bool
) -> list[Snapshot]:
    """Return what a rank holds under DDP; ``sizes`` are the bytes of each parameter, by number."""
    # In addition to gradients, DDP keeps buckets of the same size, which it sends.
    held = {**resting, "unreduced": resting["gradients"]}
    segments = Segments(lambda: held)
    for event in events:
        segments.follow(event)
        if adds_gradients:
            continue
        if event.kind is Kind.LOSS:
            # The Trainer has just dropped the gradients of the previous step.
            held["gradients"] = 0
        elif event.kind is Kind.GRAD:
            held["gradients"] += sizes[event.parameter]
    segments.note()
    return [*(segment.snapshot() for segment in segments.found), Snapshot("", "rest", held)]


def without_units(units: Sequence[UnitTerms], *, is_kept: bool) -> list[Snapshot]:
    """Return what is known of a bare number of parameters, all in one unit.

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
    """Return the bytes that a step moves: gradients once, masters (as large) and states twice."""
    every = [kinds for unit in units for kinds in unit.resting.values()]
    return sum(3 * kinds["gradients"] + 2 * kinds["states"] for kinds in every)


def _resting(units: Sequence[UnitTerms], medium: Medium) -> Kinds:
    """Return the bytes of all units between steps in one medium, by kind."""
    return {kind: sum(unit.resting[medium][kind] for unit in units) for kind in RESTING}
