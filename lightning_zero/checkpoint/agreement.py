"""An error on one rank ends on all ranks, with the rank's own words, and not in a hang."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_zero.comm import Comm

_KINDS: tuple[type[Exception], ...] = (
    FileNotFoundError,
    PermissionError,
    OSError,
    KeyError,
    TypeError,
    ValueError,
    RuntimeError,
)


class Outcome:
    """Whether something went well on this rank."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run code unless an earlier attempt failed (``is_good``); keep its error for later."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error

    @property
    def is_good(self) -> bool:
        """Whether nothing failed so far."""
        return self.error is None

    def agree(self, comm: Comm, doing: str) -> None:
        """Raise on every rank if any rank failed at ``doing``; all ranks call it.

        Raises:
            Exception: Of the kind that the first failing rank met, with its number and message.
        """
        kind = next((k for k in _KINDS if isinstance(self.error, k)), RuntimeError)
        found = comm.gather_objects(
            None if self.error is None else (_KINDS.index(kind), _words(self.error))
        )
        failed = {rank: what for rank, what in enumerate(found) if what is not None}
        if not failed:
            return
        reasons: dict[str, list[int]] = {}
        for rank, (_, words) in failed.items():
            reasons.setdefault(words, []).append(rank)
        told = "; ".join(f"{_ranks(ranks, comm)}{words}" for words, ranks in reasons.items())
        index, _ = next(iter(failed.values()))
        raise _KINDS[index](f"{doing} failed: {told}") from self.error


def _ranks(ranks: list[int], comm: Comm) -> str:
    if comm.world_size == 1 or len(ranks) == comm.world_size:
        return ""
    return f"on rank {', '.join(map(str, ranks))}: "


def _words(error: Exception) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text or type(error).__name__
