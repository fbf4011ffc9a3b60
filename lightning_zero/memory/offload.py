"""Bytes in host memory on their way between the device, host memory and files.

The engine does not offload yet, so this is arithmetic. Its assumptions are the leanest with which
all parts of the pipeline overlap:

* **weights** that rest outside the device come unit by unit, for the unit in use and those that are
  prefetched. What rests in pinned memory in the dtype of forward is sent as it is; what is cast
  passes through a buffer of a shard, and what rests in files through another;
* **gradients** leave the device as a unit's reduction ends: two shards of them, one that is reduced
  and one that is sent. From the second microbatch on both pass through buffers, and are added;
* **the step** goes unit by unit on the host, where masters and states in pinned memory stay in
  place. Those in files are in memory for three units: one is read, one stepped, one written;
* **stepped weights** that rest on the device, and have another dtype than the masters, go up
  through buffers of two units: one is cast, one is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_zero.memory.snapshots import Segment
from lightning_zero.memory.terms import UnitTerms

_IN_STEP = 3
_IN_FLIGHT = 2


def staged_in_pass(
    units: Sequence[UnitTerms], segments: Sequence[Segment], prefetch: int, *, adds_gradients: bool
) -> list[int]:
    """Return the bytes in each segment of forward and backward."""
    by_name = {unit.name: unit for unit in units}
    needs = [segment.unit for segment in segments if segment.unit is not None]
    sent = sum(sorted(unit.flushed for unit in units)[-_IN_FLIGHT:]) if adds_gradients else 0
    staged, place = [], -1
    for segment in segments:
        place += segment.unit is not None
        coming = {"", *needs[: 1 + prefetch]} if place <= 0 else set(needs[place:][: 1 + prefetch])
        fetched = sum(by_name[name].fetched for name in coming)
        staged.append(fetched + segment.is_backward * sent)
    return staged


def staged_in_step(units: Sequence[UnitTerms]) -> int:
    """Return the bytes in the optimizer's step, which goes through the units in order."""
    stepped = _most_of_neighbours([unit.stepped for unit in units], _IN_STEP)
    return stepped + _most_of_neighbours([unit.sent_up for unit in units], _IN_FLIGHT)


def _most_of_neighbours(counts: Sequence[int], width: int) -> int:
    return max(sum(counts[start : start + width]) for start in range(len(counts)))
