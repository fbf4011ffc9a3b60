"""What this rank has sent: elements, bytes and collectives, by unit and verb."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Sent(NamedTuple):
    """A sum of collectives."""

    elements: int = 0
    bytes: int = 0
    collectives: int = 0

    def plus(self, other: Sent, sign: int = 1) -> Sent:
        """The sum of both, or with ``sign=-1`` the difference."""
        return Sent(
            self.elements + sign * other.elements,
            self.bytes + sign * other.bytes,
            self.collectives + sign * other.collectives,
        )


Traffic = Mapping[tuple[str, str], Sent]
"""What was sent for each unit, by the verb ``"gather"`` (weights) or ``"reduce"`` (gradients)."""


class Ledger:
    """Counts what is sent, in all and per optimizer step.

    Elements are those that any algorithm must send at least: a rank's share ``(N - 1) / N`` of a
    buffer over ``N`` ranks, padding included.

    Attributes:
        total: Everything since the start.
        last_step: What was sent between the ends of the last two optimizer steps.
    """

    def __init__(self) -> None:
        self.total: dict[tuple[str, str], Sent] = {}
        self.last_step: Traffic = {}
        self._before: dict[tuple[str, str], Sent] = {}

    def note(self, unit: str, verb: str, elements: int, itemsize: int) -> None:
        """Enter one collective."""
        sent = Sent(elements, elements * itemsize, 1)
        self.total[unit, verb] = self.total.get((unit, verb), Sent()).plus(sent)

    def end_step(self) -> None:
        """Close the account of a step and open the next."""
        changes = {
            key: sent.plus(self._before.get(key, Sent()), -1) for key, sent in self.total.items()
        }
        self.last_step = {key: sent for key, sent in changes.items() if sent.collectives}
        self._before = dict(self.total)


def sum_of(traffic: Traffic, verb: str | None = None) -> Sent:
    """All units together; of one verb if it is given."""
    total = Sent()
    for (_, kind), sent in traffic.items():
        if verb in (None, kind):
            total = total.plus(sent)
    return total
