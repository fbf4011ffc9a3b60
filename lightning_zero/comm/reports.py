"""Notes between ranks in the process group's store, which needs no collective."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist

from lightning_zero.comm.collective_log import Milestone

ROLL_SECONDS = 1.0
"""How long a rank has to answer the roll: several looks of its watchdog."""

_SECONDS_BETWEEN_LOOKS = 0.02

_stores: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class Board:
    """Named notes in a store: one of each rank, or one for all.

    Args:
        store: The store.
        prefix: The beginning of the keys, the same on every rank.
        rank: This process's number.
        world_size: Number of ranks.
    """

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._prefix = store, prefix

    def put(self, name: str, note: str = "") -> None:
        """Leave this rank's note, replacing an earlier one."""
        # Never deleted: a rank that has seen the key would wait for it.
        self._store.set(self._key(name, self.rank), note)

    def get(self, name: str) -> list[str] | None:
        """Return the ranks' notes, in rank order; ``None`` until all are there."""
        keys = [self._key(name, rank) for rank in range(self.world_size)]
        if not self._store.check(keys):
            return None
        several = self._store.multi_get(keys) if self._store.has_extended_api() else None
        return [note.decode() for note in several or map(self._store.get, keys)]

    def get_some(self, name: str) -> dict[int, str]:
        """Return the notes that are there, by rank, with separate requests for each."""
        keys = {rank: self._key(name, rank) for rank in range(self.world_size)}
        there = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: self._store.get(key).decode() for rank, key in there.items()}

    def decide(self, name: str, note: str = "") -> str:
        """Leave a note for all unless there is one already; return the one that is there."""
        return str(self._store.compare_set(self._key(name), "", note or " ").decode().strip())

    def is_decided(self, name: str) -> bool:
        """Return whether there is a note for all."""
        return bool(self._store.check([self._key(name)]))

    def wait(self, seconds: float, is_over: Callable[[], object]) -> bool:
        """Poll until ``is_over`` is true, for at most ``seconds``; return whether it is."""
        deadline = monotonic() + seconds
        while not is_over():
            if monotonic() > deadline:
                return False
            sleep(_SECONDS_BETWEEN_LOOKS)
        return True

    def _key(self, *names: object) -> str:
        return "/".join(map(str, (self._prefix, *names)))


def own_store(*, alone: bool) -> Any:
    """Return a separate connection to the store: one blocked by a wait serves no other request."""
    if alone:
        return dist.HashStore()
    world = dist.group.WORLD
    if world not in _stores:
        # Private, as torch has no public access to the store that it was started with.
        store = dist.distributed_c10d._get_default_store()
        _stores[world] = store.clone() if hasattr(store, "clone") else store
    return _stores[world]


@dataclass(frozen=True)
class Whereabouts:
    """The report of a rank that has not gone on for long.

    Attributes:
        place: The collective that it waits for; empty if it has left.
        channel: As in `CollectiveId`.
        number: As in `CollectiveId`.
        step: Optimizer steps that it has ended.
        caller: The line of the user's code that led to the wait.
        wait: A number that changes when the rank goes on.
        look: A number that grows with every look.
        begun: How many collectives of each channel it has begun.
        seconds: For how long it had waited when it looked.
        function: The function of torch.distributed it is in, if the collective calls several.
        course: How far it has come on its course.
        is_blocked: Whether it waits nowhere that is known: it computes, or its device waits for the
            collective, the last one that it has begun without a tag.
        is_of_all: Whether other code's collective, in which it waits, is one of all ranks.
    """

    place: str
    channel: str
    number: int
    step: int
    caller: str
    wait: int
    look: int
    begun: dict[str, int] = field(repr=False)
    seconds: float = 0.0
    function: str = ""
    course: Milestone = field(default=Milestone())
    is_blocked: bool = False
    is_of_all: bool = False

    def __str__(self) -> str:
        if not self.place:
            return f"finished training after step {self.step}"
        if self.is_blocked:
            return f"is in step {self.step} at {self.caller}, after {self.place}"
        where = f" (called at {self.caller})" if self.caller else ""
        what = f", in {self.function}" if self.function else ""
        return f"waits in step {self.step} for {self.place}{what}{where}"


class Reports:
    """A watchdog's notes for the others: where its rank waits, and that the run ends.

    Args:
        board: The ranks' notes.

    Attributes:
        verdict: The error that ends the run, as far as this rank knows.
        is_over: Whether the process that hosts the store is about to exit.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self.verdict = ""
        self.is_over = False
        self._has_answered = False

    def put(self, here: Whereabouts | None) -> None:
        """Replace this rank's report; ``None`` withdraws it."""
        self.board.put("waits", "" if here is None else json.dumps(asdict(here)))

    def get(self) -> dict[int, Whereabouts]:
        """Return every rank's report; empty unless all have one."""
        notes = self.board.get("waits") or [""]
        fields = [json.loads(note) for note in notes] if all(notes) else []
        return {
            rank: Whereabouts(**{**each, "course": Milestone(*each["course"])})
            for rank, each in enumerate(fields)
        }

    def publish(self, verdict: str) -> str:
        """End the run on all ranks with ``verdict``, or with an earlier one; return which."""
        self.verdict = self.board.decide("verdict", verdict)
        self.board.decide("alarm", "verdict")
        self.board.put("read")
        return self.verdict

    def look(self, here: Callable[[], str]) -> str:
        """Return the verdict, if any, and answer a roll call with ``here``; usually one request."""
        if not self.verdict and self.board.is_decided("alarm"):
            if not self._has_answered:
                self.answer(here())
            if self.board.is_decided("verdict"):
                self.publish("")
            self.is_over = self.board.is_decided("over")
        return self.verdict

    def answer(self, here: str) -> None:
        """Answer the roll call, also before there is one."""
        self._has_answered = True
        self.board.put("answer", here)

    def call_roll(self, here: Callable[[], str]) -> dict[int, str]:
        """Return the places of the ranks that answer; there may be a verdict before all have."""
        self.board.decide("alarm", "roll")
        self.board.wait(ROLL_SECONDS, lambda: self.look(here) or self.board.get("answer"))
        return self.board.get_some("answer")

    def close(self, seconds: float) -> None:
        """Wait at most ``seconds`` until no rank needs the notes, for the rank that hosts them.

        Ranks that still watch are told that the notes end.
        """
        self.board.decide("over")
        self.board.decide("alarm", "over")
        self.board.wait(seconds, lambda: self.board.get("left"))

    def wait_for_readers(self, seconds: float) -> None:
        """Wait at most ``seconds`` until all remaining ranks have read the verdict.

        For the rank that hosts the store.
        """
        if self.board.decide("alarm") == "roll":
            left = set(self.board.get_some("answer"))
            self.board.wait(seconds, lambda: left <= set(self.board.get_some("read")))
        else:
            self.board.wait(seconds, lambda: self.board.get("read"))
