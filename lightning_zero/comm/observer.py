"""Where this rank is: the collective that it waits for, and the user's line that led there."""

from __future__ import annotations

import sys
import time
import traceback
from time import monotonic
from types import FrameType
from typing import Any

from lightning_zero.comm.collective_log import CollectiveLog
from lightning_zero.comm.reports import Whereabouts
from lightning_zero.tensors import uncollected


class Observer:
    """This rank's place, as seen from another thread.

    Args:
        collectives: The log of this rank.
    """

    def __init__(self, collectives: CollectiveLog) -> None:
        self._log = collectives
        self._looks = 0
        self._foreign: tuple[tuple[int, int, int], int, float] | None = None

    def look(self) -> Whereabouts | None:
        """Return where this rank waits, or ``None`` if it does not."""
        self._looks += 1
        frame = _frame_of(self._log.thread)
        is_foreign = frame and frame.f_code.co_filename.endswith("distributed_c10d.py")
        function = frame.f_code.co_name if frame is not None and is_foreign else ""
        waiting = self._log.waiting
        if waiting is not None:
            collective, number, since = waiting
            return self.at(*collective, wait=number, since=since, function=function)
        if frame is None or not is_foreign or self._log.is_busy:
            self._foreign = None
            return None
        # A thread that sends and receives in a loop is in the same place at every look, but has
        # used CPU time in between.
        where = (id(frame), frame.f_lasti, _milliseconds_used(self._log.thread))
        if self._foreign is None or self._foreign[0] != where:
            self._foreign = (where, -self._looks, monotonic())
        _, wait, since = self._foreign
        return self.at(f"torch.distributed.{function}", wait=wait, since=since)

    def describe(self) -> str:
        """Return a description of where this rank is now."""
        if here := self.look():
            return str(here)
        after = f", after {self._log.course.event}" if self._log.course.event else ""
        return f"is in step {self._log.step} at {self._caller}{after}"

    def at(
        self,
        place: str,
        channel: str = "",
        number: int = 0,
        *,
        wait: int = 0,
        since: float = 0.0,
        function: str = "",
    ) -> Whereabouts:
        """Return this rank's report from ``place``, which is empty for a rank that leaves."""
        step, begun, looks = self._log.step, dict(self._log.begun), self._looks
        caller = self._caller if place else ""
        seconds = monotonic() - since
        return Whereabouts(
            place, channel, number, step, caller, wait, looks, begun, seconds, function
        )

    @property
    def _caller(self) -> str:
        return _caller(_frame_of(self._log.thread))

    def fate(self, rank: int, error: BaseException) -> str:
        """Return the verdict for the failure of ``rank`` with ``error``."""
        lines = list(traceback.walk_tb(error.__traceback__))
        users = [(frame, line) for frame, line in lines if not _is_library(frame)] or lines[-1:]
        where = "".join(f" at {f.f_code.co_filename}:{line}" for f, line in users[-1:])
        text = next(iter(str(error).splitlines()), "")
        what = f"{type(error).__name__}{text and ': '}{text}"
        return (
            f"Rank {rank} failed in step {self._log.step}{where}: {what}\n"
            "The other ranks, which were waiting for it, stop too."
        )


def _milliseconds_used(thread: int) -> int:
    """Return the CPU time of a thread of this process, 0 where the system does not report it."""
    return 0 if _clock_of is None else int(1000 * _read_clock(_clock_of(thread)))


# Bound here, as users patch clocks.
_clock_of: Any = getattr(time, "pthread_getcpuclockid", None)
_read_clock: Any = getattr(time, "clock_gettime", None)


def _caller(frame: FrameType | None) -> str:
    """Return the innermost line outside of torch, Lightning and this package."""
    while frame is not None:
        if not _is_library(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_library(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_CALLERS


_NOT_CALLERS = {
    "torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric",
    "lightning_zero", "contextlib", "threading", "functools",
}  # fmt: skip


def _frame_of(thread: int) -> FrameType | None:
    """Return the frame in which a thread is."""
    # Before 3.12.2, Python may collect garbage within this call, whose finalizers then wait for the
    # interpreter's lock while a thread that ends waits for the list of threads, with that lock
    # (CPython 106883).
    with uncollected():
        return sys._current_frames().get(thread)
