"""Where this rank is: the collective that it waits for, and the user's line that led there."""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from time import monotonic
from types import FrameType
from typing import Any

import torch.distributed as dist

from lightning_zero.comm.collective_log import CollectiveId, CollectiveLog
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
        self._still: tuple[Any, int, float] | None = None

    def look(self) -> Whereabouts | None:
        """Return where this rank waits or may be blocked, or ``None`` if it is nowhere such."""
        self._looks += 1
        frame = _frame_of(self._log.thread)
        is_foreign = frame and frame.f_code.co_filename.endswith("distributed_c10d.py")
        function = frame.f_code.co_name if frame is not None and is_foreign else ""
        waiting = self._log.waiting
        if waiting is not None:
            collective, number, since = waiting
            return self.at(*collective, wait=number, since=since, function=function)
        if frame is None or self._log.is_busy:
            self._still = None
            return None
        if is_foreign:
            # A thread that sends and receives in a loop is in the same place at every look, but has
            # used CPU time in between.
            where = (id(frame), frame.f_lasti, _milliseconds_used(self._log.thread))
            here = self._since(where, CollectiveId(f"torch.distributed.{function}", "", 0))
            group = frame.f_locals.get("group")
            is_of_all = function in _OF_ALL and group in (None, dist.group.WORLD)
            return dataclasses.replace(here, is_of_all=is_of_all)
        if self._log.untagged is None:
            return None
        begun = (self._log.course.last, sum(dict(self._log.begun).values()))
        here = self._since(begun, self._log.untagged)
        return dataclasses.replace(here, is_blocked=True)

    def _since(self, where: Any, collective: CollectiveId) -> Whereabouts:
        """Return a report from a collective, in which this rank has been since it is ``where``."""
        if self._still is None or self._still[0] != where:
            self._still = (where, -self._looks, monotonic())
        _, wait, since = self._still
        return self.at(*collective, wait=wait, since=since)

    def describe(self) -> str:
        """Return a description of where this rank is now."""
        return str(self.look() or f"is in step {self._log.step} at {self._caller}")

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
            place, channel, number, step, caller, wait, looks, begun, seconds, function,
            self._log.course.last,
        )  # fmt: skip

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


_OF_ALL = {
    "barrier", "monitored_barrier", "broadcast", "all_reduce", "reduce", "all_gather", "gather",
    "scatter", "reduce_scatter", "all_gather_into_tensor", "all_gather_single", "all_to_all",
    "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single", "all_gather_object",
    "broadcast_object_list", "gather_object", "scatter_object_list",
}  # fmt: skip
"""The functions of torch.distributed that every rank of a group calls."""


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
