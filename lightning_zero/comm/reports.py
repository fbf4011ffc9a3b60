"""What the ranks let each other know in the process group's store, which needs no collective."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

ROLL_SECONDS = 1.0
"""How long a rank has to answer that it is there: several looks of its watchdog."""

_SECONDS_BETWEEN_LOOKS = 0.02


@dataclass(frozen=True)
class Whereabouts:
    """A waiting rank's report to the others.

    Attributes:
        place: The collective it waits for; empty if it has left.
        channel: As in `CollectiveId`.
        number: As in `CollectiveId`.
        step: Optimizer steps that it has ended.
        caller: Where the user's code called what waits.
        wait: A number that changes when the rank goes on.
        look: A number that grows with every look.
        begun: How many collectives of each channel it has begun.
    """

    place: str
    channel: str
    number: int
    step: int
    caller: str
    wait: int
    look: int
    begun: dict[str, int] = field(repr=False)

    @property
    def is_foreign(self) -> bool:
        """Return whether the collective is not one of the engine's."""
        return not self.number

    def __str__(self) -> str:
        if not self.place:
            return f"has ended its training after step {self.step}"
        where = f" (called at {self.caller})" if self.caller else ""
        return f"waits in step {self.step} for {self.place}{where}"


class Reports:
    """The ranks' reports in the process group's store.

    Args:
        store: A connection of its own.
        prefix: The beginning of its keys, the same on every rank.
        rank: This process's number.
        world_size: Number of ranks.

    Attributes:
        verdict: The error that ends the run, as far as this rank knows.
    """

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.verdict = ""
        self._store, self._prefix = store, prefix
        self._has_answered = False

    def put(self, here: Whereabouts | None) -> None:
        """Replace this rank's report; ``None`` takes it back."""
        # Never deleted: a rank that has seen the key would wait for it.
        report = "" if here is None else json.dumps(asdict(here))
        self._store.set(self._key(self.rank), report)

    def get(self) -> dict[int, Whereabouts]:
        """Return every rank's report; empty if one has none."""
        keys = [self._key(rank) for rank in range(self.world_size)]
        if not self._store.check(keys):
            return {}
        several = self._store.multi_get(keys) if self._store.has_extended_api() else None
        values = several or [self._store.get(key) for key in keys]
        if not all(values):
            return {}
        return {rank: Whereabouts(**json.loads(value)) for rank, value in enumerate(values)}

    # -- the end of a run ------------------------------------------------------------------------

    def publish(self, verdict: str) -> str:
        """End the run of all ranks with an error, or with an earlier one; return it."""
        self.verdict = self._store.compare_set(self._key("verdict"), "", verdict).decode()
        self._alarm("verdict")
        self._store.set(self._key(f"read/{self.rank}"), "")
        return self.verdict

    def look(self, here: Callable[[], str]) -> str:
        """Return the verdict, if there is one, and answer the roll with ``here``: one request."""
        if not self.verdict and self._has("alarm"):
            if not self._has_answered:
                self.answer(here())
            if self._has("verdict"):
                self.verdict = self._store.get(self._key("verdict")).decode()
                self._store.set(self._key(f"read/{self.rank}"), "")
        return self.verdict

    def answer(self, here: str) -> None:
        """Answer the roll, which may be called later."""
        self._has_answered = True
        self._store.set(self._key(f"answer/{self.rank}"), here)

    def call_roll(self, here: Callable[[], str]) -> dict[int, str]:
        """Return where the ranks are that answer; there may be a verdict before all have."""
        self._alarm("roll")
        deadline = time.monotonic() + ROLL_SECONDS
        while time.monotonic() < deadline and not self.look(here):
            ranks = [rank for rank in range(self.world_size) if self._has(f"answer/{rank}")]
            if len(ranks) == self.world_size:
                break
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return {rank: self._store.get(self._key(f"answer/{rank}")).decode() for rank in ranks}

    def wait_for_readers(self, seconds: float) -> None:
        """Wait until all ranks that are left have read the verdict, for so long at most.

        For the rank that keeps the store.
        """
        ranks = [rank for rank in range(self.world_size) if rank != self.rank]
        if self._store.get(self._key("alarm")) == b"roll":
            ranks = [rank for rank in ranks if self._has(f"answer/{rank}")]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(self._has(f"read/{rank}") for rank in ranks):
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _alarm(self, reason: str) -> None:
        """Make all ranks look, for the first reason that there was."""
        self._store.compare_set(self._key("alarm"), "", reason)

    def _has(self, name: str) -> bool:
        return bool(self._store.check([self._key(name)]))

    def _key(self, name: int | str) -> str:
        return f"{self._prefix}/{name}"
