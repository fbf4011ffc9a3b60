"""Agreement on errors: an error on one rank is raised on all, with its message, and none hangs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_zero.comm.control import Control

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
    """The success or failure of an operation on this rank."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run a block of code; the first error of all blocks is kept for :meth:`agree`."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error

    def agree(self, control: Control, doing: str) -> None:
        """Raise on every rank if any rank failed at ``doing``; a collective.

        Raises:
            Exception: Of the first failing rank's kind, with all failing ranks and their messages.
        """
        kind = next((k for k in _KINDS if isinstance(self.error, k)), RuntimeError)
        found = control.gather_objects(
            None if self.error is None else (_KINDS.index(kind), _message(self.error))
        )
        failed = {rank: what for rank, what in enumerate(found) if what is not None}
        if not failed:
            return
        ranks_of: dict[str, list[int]] = {}
        for rank, (_, message) in failed.items():
            ranks_of.setdefault(message, []).append(rank)
        reasons = "; ".join(f"{_ranks(ranks, control)}{text}" for text, ranks in ranks_of.items())
        index, _ = next(iter(failed.values()))
        raise _KINDS[index](f"{doing} failed: {reasons}") from self.error


@contextmanager
def agreed(control: Control, doing: str) -> Iterator[None]:
    """Enter a context that all ranks leave with an error if any does; a collective at its end."""
    outcome = Outcome()
    with outcome.attempt():
        yield
    outcome.agree(control, doing)


def _ranks(ranks: list[int], control: Control) -> str:
    if control.world_size == 1 or len(ranks) == control.world_size:
        return ""
    return f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: "


def _message(error: Exception) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text or type(error).__name__
