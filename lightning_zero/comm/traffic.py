"""A ledger of what this rank has sent: elements, bytes and collectives, by unit and verb.

It also counts the seconds that steps with offload and their files took.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from time import perf_counter
from typing import NamedTuple


class Sent(NamedTuple):
    """The totals of several collectives."""

    elements: int = 0
    bytes: int = 0
    collectives: int = 0

    def plus(self, other: Sent) -> Sent:
        """Return the sum of both."""
        return Sent(*map(operator.add, self, other))


Traffic = Mapping[tuple[str, str], Sent]
"""What was sent, by unit and verb: ``"gather"`` (weights) or ``"reduce"`` (gradients) between
ranks, ``"up"`` or ``"down"`` between a device and its host, ``"read"`` or ``"write"`` between
memory and files."""


class StepTimes(NamedTuple):
    """Times of training steps with offload, each from the end of the previous optimizer step.

    Attributes:
        seconds: Total seconds.
        stepping: Seconds in the optimizer's steps unit by unit; steps on the device do not count.
        waiting: Seconds of ``stepping`` in which the optimizer waited for files.
        bytes_read: Bytes read from files in these steps.
        bytes_written: Bytes written to files.
    """

    seconds: float = 0.0
    stepping: float = 0.0
    waiting: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0

    def plus(self, other: StepTimes) -> StepTimes:
        """Return the sum of both."""
        return StepTimes(*map(operator.add, self, other))

    def describe(self) -> str:
        """Return the shares of the time, and the speed of files, in one line."""
        stepping, waiting = (_ratio(part, self.seconds) for part in (self.stepping, self.waiting))
        nbytes = self.bytes_read + self.bytes_written
        speed = _ratio(nbytes, self.stepping) / 1e9
        files = f", {waiting:.0%} waiting for files (read and written at {speed:.2f} GB/s)"
        return (
            f"{stepping:.0%} of the time was spent in optimizer steps on the host"
            f"{files if nbytes else ''}."
        )


Counts = Counter[tuple[str, str, int, int]]
"""Number of collectives, by unit, verb, elements and the size of an element in bytes."""


class Ledger:
    """Counts of what is sent in each optimizer step, and the time of steps with offload.

    Elements are the least that any algorithm must send: a rank's share ``(N - 1) / N`` of a buffer
    over ``N`` ranks, padding included.

    Attributes:
        last_times: The times of the last optimizer step; zeros for the first, of unknown start.
        total_times: The sum over all steps but the first.
        most_staged: The most bytes of host memory that a step took to stage data for files.
    """

    def __init__(self) -> None:
        # Only counts of collectives: totals are computed on demand.
        self._last, self._now = Counts(), Counts()
        self._spent: dict[str, float] = {}
        self.most_staged = 0
        self._end_of_last: float | None = None
        self.last_times = self.total_times = StepTimes()

    def spend(self, doing: str, seconds: float) -> None:
        """Count seconds of this step under a name in :class:`StepTimes`."""
        self._spent[doing] = self._spent.get(doing, 0.0) + seconds

    def stage(self, nbytes: int) -> None:
        """Note the host memory that a step takes to stage data from and to files."""
        self.most_staged = max(self.most_staged, nbytes)

    def note(self, unit: str, verb: str, elements: int, itemsize: int) -> None:
        """Count one collective."""
        self._now[unit, verb, elements, itemsize] += 1

    def end_step(self) -> None:
        """End the count of a step and begin the next."""
        self._last, self._now = self._now, Counts()
        begin, self._end_of_last = self._end_of_last, perf_counter()
        spent, self._spent = self._spent, {}
        if begin is not None and spent:
            self.last_times = StepTimes(
                self._end_of_last - begin,
                **spent,
                bytes_read=sum_of(self.last_step, "read").bytes,
                bytes_written=sum_of(self.last_step, "write").bytes,
            )
            self.total_times = self.total_times.plus(self.last_times)

    @property
    def last_step(self) -> Traffic:
        """The traffic between the ends of the last two optimizer steps."""
        sums: dict[tuple[str, str], Sent] = {}
        for (unit, verb, elements, itemsize), count in self._last.items():
            sent = Sent(count * elements, count * elements * itemsize, count)
            sums[unit, verb] = sums.get((unit, verb), Sent()).plus(sent)
        return sums


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def sum_of(traffic: Traffic, verb: str | None = None) -> Sent:
    """Return the sum over all units, of one verb if given."""
    total = Sent()
    for (_, kind), sent in traffic.items():
        if verb in (None, kind):
            total = total.plus(sent)
    return total
