"""A ledger of what this rank has sent: elements, bytes and collectives, by unit and verb."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple


class Sent(NamedTuple):
    """A sum of collectives."""

    elements: int = 0
    bytes: int = 0
    collectives: int = 0

    def plus(self, other: Sent) -> Sent:
        """Return the sum of both."""
        return Sent(
            self.elements + other.elements,
            self.bytes + other.bytes,
            self.collectives + other.collectives,
        )


Traffic = Mapping[tuple[str, str], Sent]
"""What was sent for each unit, by verb: ``"gather"`` (weights) or ``"reduce"`` (gradients) between
ranks, ``"up"`` or ``"down"`` between a device and its host, ``"read"`` or ``"write"`` between
memory and files."""

Counts = dict[tuple[str, str, int, int], int]
"""How often each collective came: by unit, verb, elements and their size in bytes."""


class Ledger:
    """Counts what is sent, in all and per optimizer step.

    Elements are those that any algorithm must send at least: a rank's share ``(N - 1) / N`` of a
    buffer over ``N`` ranks, padding included.
    """

    def __init__(self) -> None:
        # How often each collective came; what all of them sent is added up for those who ask.
        self._before: Counts = {}
        self._last: Counts = {}
        self._now: Counts = {}

    def note(self, unit: str, verb: str, elements: int, itemsize: int) -> None:
        """Count one collective."""
        collective = unit, verb, elements, itemsize
        self._now[collective] = self._now.get(collective, 0) + 1

    def end_step(self) -> None:
        """End the count of a step and begin the next."""
        self._before = _joined(self._before, self._now)
        self._last, self._now = self._now, {}

    @property
    def total(self) -> Traffic:
        """Everything since the start."""
        return _sums(_joined(self._before, self._now))

    @property
    def elements(self) -> Counter[tuple[str, str]]:
        """Elements since the start, by unit and verb."""
        return Counter({key: sent.elements for key, sent in self.total.items()})

    @property
    def last_step(self) -> Traffic:
        """The traffic between the ends of the last two optimizer steps."""
        return _sums(self._last)


def _joined(some: Counts, more: Counts) -> Counts:
    return {key: some.get(key, 0) + more.get(key, 0) for key in {**some, **more}}


def _sums(counts: Counts) -> Traffic:
    sums: dict[tuple[str, str], Sent] = {}
    for (unit, verb, elements, itemsize), count in counts.items():
        sent = Sent(count * elements, count * elements * itemsize, count)
        sums[unit, verb] = sums.get((unit, verb), Sent()).plus(sent)
    return sums


def sum_of(traffic: Traffic, verb: str | None = None) -> Sent:
    """Return the sum over all units, of one verb if it is given."""
    total = Sent()
    for (_, kind), sent in traffic.items():
        if verb in (None, kind):
            total = total.plus(sent)
    return total
