"""The notes that ranks leave for each other in the process group's store."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist

OVER = "over"
"""The note under ``end`` of a host that exits after a run that went well."""

_SECONDS_BETWEEN_LOOKS = 0.02

_stores: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Report:
    """The place of a rank that has not gone on for long, or has left.

    Attributes:
        name: The collective that it waits for; empty if it has left.
        channel: As in `CollectiveId`.
        number: As in `CollectiveId`.
        step: Optimizer steps that it has ended.
        caller: The line of the user's code that led to the wait; empty for a rank that waits
            nowhere, whose device may wait for the collective.
        wait: A number that changes when the rank goes on.
        look: A number that grows with every look.
        seconds: For how long it had waited when its thread looked.
        begun: How many collectives of each channel it has begun.
        queued: The number and name of its last collective without a tag, if there was one.
    """

    name: str
    channel: str
    number: int
    step: int
    caller: str = ""
    wait: int = 0
    look: int = 0
    seconds: float = 0.0
    begun: dict[str, int] = field(default_factory=dict)
    queued: Sequence[Any] = (0, "")

    def __str__(self) -> str:
        if not self.name:
            return f"has left the run after step {self.step}"
        if not self.caller:
            return f"is in step {self.step}, after {self.name}"
        return f"waits in step {self.step} for {self.name} (called at {self.caller})"


class Reports:
    """The notes of all ranks, of two kinds: each rank's place, and the end of the run.

    Args:
        store: The store.
        prefix: The beginning of the keys, the same on every rank.
        rank: This process's number.
        world_size: Number of ranks.
    """

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._end = store, f"{prefix}/end"
        self._places = [f"{prefix}/place/{rank}" for rank in range(world_size)]

    def put(self, report: Report | None) -> None:
        """Replace this rank's report; ``None`` withdraws it."""
        # Never deleted: a rank that has seen the key would wait for it.
        note = "" if report is None else json.dumps(asdict(report))
        self._store.set(self._places[self.rank], note)

    def get(self) -> dict[int, Report]:
        """Return the reports of all ranks that have one, by rank."""
        keys = self._places
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        several = self._store.multi_get(keys) if keys and self._store.has_extended_api() else None
        notes = zip(keys, several or map(self._store.get, keys), strict=True)
        found = {self._places.index(key): note.decode() for key, note in notes}
        return {rank: Report(**json.loads(note)) for rank, note in found.items() if note}

    def publish(self, end: str) -> str:
        """End the run on all ranks with an error, unless it has ended; return how it ends."""
        return str(self._store.compare_set(self._end, "", end).decode())

    @property
    def end(self) -> str:
        """The error that ends the run, :data:`OVER`, or ``""``; usually one request."""
        return self._store.get(self._end).decode() if self._store.check([self._end]) else ""

    def wait_until_left(self, seconds: float) -> None:
        """Wait at most ``seconds`` until all ranks have left, which ask for nothing more."""
        deadline = monotonic() + seconds
        while monotonic() < deadline:
            reports = self.get()
            if len(reports) == self.world_size and not any(one.name for one in reports.values()):
                return
            sleep(_SECONDS_BETWEEN_LOOKS)


def own_store() -> Any:
    """Return a separate connection to the store: one blocked by a wait serves no other request."""
    world = dist.group.WORLD
    if world not in _stores:
        # Private, as torch has no public access to the store that it was started with.
        store = dist.distributed_c10d._get_default_store()
        _stores[world] = store.clone() if hasattr(store, "clone") else store
    return _stores[world]
