"""Bytes of a rank through a step: under the engine, under DDP, and of a number of parameters.

With offload from a CPU to files, masters, states and sharded weights are memory-mapped: they count
as files, whatever the page cache keeps of them.

With offload from another device, some bytes are in transit between it and its host:

* **weights** that rest outside the device are copied unit by unit into their place in the whole
  weights. Those from files come by a ring of pinned memory, which is kept;
* **gradients** leave the device when a unit's reduction ends. Shards of the last two units stay
  until they have been sent, besides that being reduced. From the second microbatch on, what rests
  on the host comes up to be added;
* **the step** runs unit by unit on the host, in place. If masters and states are in files, it runs
  in staging memory on the host, which exists only during that step;
* **activations** may be kept on the host until their backward, as the dry run has found.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import nn

from lightning_zero.comm import DryCommunicator
from lightning_zero.memory.cluster import Timeline
from lightning_zero.memory.replay import replay
from lightning_zero.memory.snapshots import Segments, Snapshot
from lightning_zero.memory.terms import KINDS, RESTING, Kinds, UnitTerms
from lightning_zero.memory.trace import Event, Kind
from lightning_zero.plan import Medium, Settings


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
    timeline: Timeline | None,
) -> list[Snapshot]:
    """Return what a rank holds in a step's last microbatch under the engine, and at rest after it.

    Events, module and settings are as in :func:`replay`; ``units`` are the terms of all units, the
    root last. ``stepped`` are the device bytes that the optimizer's step needs in addition to those
    at rest, ``staged`` the bytes of host memory in which it stages states from files.
    ``timeline`` records what the rank does; ``comm`` reports its messages to it.
    """
    timeline = timeline or Timeline()
    timeline.optimizer_bytes = _optimizer_bytes(units)
    timeline.axes = {name: one.axis for name, one in comm.transports.items()}
    still = {**dict.fromkeys(KINDS, 0), **_resting(units, Medium.DEVICE), "buffers": buffers}
    host, disk = (_resting(units, medium) for medium in (Medium.HOST, Medium.DISK))
    transports = [*comm.dry.values()]
    ring = max(unit.ring for unit in units)

    def held() -> Kinds:
        return {
            **still,
            "gathered": sum(one.passing["gathered"].nbytes for one in transports)
            + (comm.transport.gathered if settings.stage == 3 else 0),
            "gradients": sum(one.reduced for one in transports),
            "unreduced": sum(one.passing["unreduced"].nbytes + one.partials for one in transports),
            "activations": sum(one.temporary.nbytes for one in transports),
        }

    run = functools.partial(replay, events, module, settings, comm)
    segments = run(num_microbatches=num_microbatches, held=held, timeline=timeline)
    found = [
        segment.snapshot({**host, "staging": ring + segment.away}, disk) for segment in segments
    ]
    rest = held()
    if stepped or staged:
        kinds = {**rest, "gathered": rest["gathered"] + stepped}
        found.append(Snapshot("", "step", kinds, {**host, "staging": ring + staged}, disk))
    return [*found, Snapshot("", "rest", rest, {**host, "staging": ring}, disk)]


def replicated_step(
    events: Sequence[Event], sizes: Sequence[int], resting: Kinds, *, adds_gradients: bool
) -> list[Snapshot]:
    """Return what a rank holds under DDP; ``sizes`` are the bytes of each parameter, by number."""
    # In addition to gradients, DDP keeps buckets of the same size, which it sends.
    held = {**resting, "unreduced": resting["gradients"], "activations": 0}
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
