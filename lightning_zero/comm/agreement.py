"""Agreement on errors: an error on one rank is raised on all, with its message, and none hangs."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_zero.comm.control import Control
from lightning_zero.tensors import Scratch

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


def require_room(scratch: Scratch, nbytes: int, control: Control, what: str) -> None:
    """Raise on all ranks unless each disk has room for its ranks' ``nbytes``; a collective.

    Room found by an earlier call counts as taken, even if no file uses it yet. ``what`` names the
    need in the error.

    Raises:
        OSError: There is not enough room, or a folder cannot be written to.
    """
    doing = f"Creating files in offload_path={scratch.folder!r}"
    with agreed(control, doing):
        need = scratch.promise(nbytes)
    needs = [one for one in control.gather_objects(need) if one is not None]
    for disk in dict.fromkeys(one.disk for one in needs):
        ranks = [rank for rank, one in enumerate(needs) if one.disk == disk]
        free = min(needs[rank].free for rank in ranks)
        wanted = sum(needs[rank].nbytes for rank in ranks)
        if wanted > free:
            each = ", ".join(f"{needs[rank].nbytes:,} on rank {rank}" for rank in ranks)
            raise OSError(
                errno.ENOSPC,
                f"{doing} failed: {what} and other files not yet created need {wanted:,} bytes"
                f" ({each}), but {free:,} are free."
                " Free disk space, or set offload_path to a folder on a larger disk.",
            )


def _ranks(ranks: list[int], control: Control) -> str:
    if control.world_size == 1 or len(ranks) == control.world_size:
        return ""
    return f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: "


def _message(error: Exception) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text or type(error).__name__
