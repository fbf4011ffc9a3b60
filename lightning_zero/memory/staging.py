"""What lies in host memory on its way between the device, host memory and files.

Nothing of this runs yet; these are the assumptions, all of them as lean as a pipeline can be whose
parts overlap:

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

from collections.abc import Iterable, Sequence

from lightning_zero.memory.terms import UnitTerms

_IN_STEP = 3
_IN_FLIGHT = 2


def staged_in_pass(
    fetched: Iterable[UnitTerms], units: Sequence[UnitTerms], *, adds_gradients: bool
) -> int:
    """Bytes in a stretch of forward or backward.

    Args:
        fetched: The units whose weights are on their way to the device.
        units: All units.
        adds_gradients: Whether reduced gradients are added to earlier ones.
    """
    gradients = sorted(unit.flushed for unit in units)[-_IN_FLIGHT:] if adds_gradients else []
    return sum(unit.fetched for unit in fetched) + sum(gradients)


def staged_in_step(units: Sequence[UnitTerms]) -> int:
    """Bytes in the optimizer's step, which goes through the units in order."""
    stepped = _most_of_neighbours([unit.stepped for unit in units], _IN_STEP)
    return stepped + _most_of_neighbours([unit.sent_up for unit in units], _IN_FLIGHT)


def _most_of_neighbours(counts: Sequence[int], width: int) -> int:
    return max(sum(counts[start : start + width]) for start in range(len(counts)))
