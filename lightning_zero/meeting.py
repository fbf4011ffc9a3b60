"""The moments of a step at which all ranks must be: small decisions that they take together.

A meeting carries flags of which each becomes its maximum over the ranks. All meetings are messages
of one size on a channel of their own, so a rank that comes to another meeting than the others is
not read as if it had come to theirs: each message begins with what the rank came for, and with a
sum over the collectives that it has begun, as numbers and as their complements. Where a number and
its complement no longer match, the ranks differ.
"""

from __future__ import annotations

import zlib
from enum import Enum
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.groups import give_up_devices, group_for
from lightning_zero.span import unseen
from lightning_zero.watch import Watch, parted


class Subject(Enum):
    """What a meeting is for."""

    SETUP = "the setup of shared memory"
    BEGIN = "the begin of a backward pass"
    END = "the end of a backward pass"
    STEP = "an optimizer's step"
    STEPPED = "the end of an optimizer's step"
    EDIT = "a change of weights"
    REFRESH = "bringing weights up to date"
    FORWARD = "the end of a forward without gradients"
    BATCH = "the next batch of training data"
    CLOSE = "the end of the training"
    GRADIENT = "the gathering of a gradient"


_NUMBERS = {subject: number for number, subject in enumerate(Subject)}
_HEADER = 5


class Meetings:
    """The ranks' channel for decisions.

    Args:
        rank: This process's number.
        world_size: Number of ranks; one rank meets nobody.
        watch: Told of every meeting.
    """

    def __init__(self, rank: int, world_size: int, watch: Watch) -> None:
        self.rank, self.world_size = rank, world_size
        self.watch = watch
        self._capacity = 64
        self._course = 0

    @property
    def group(self) -> Any:
        """Their channel. Not kept: a group that is referred to outlives its destruction."""
        return group_for("meetings", of_hosts=True)

    def reserve(self, num_flags: int) -> None:
        """Make room for so many flags; all ranks must ask for the same."""
        self._capacity = max(self._capacity, num_flags)

    def note(self, event: str) -> None:
        """Count an event that all ranks must have had, in this order, at the next meeting."""
        self._course = zlib.crc32(event.encode(), self._course)

    @property
    def has_notes(self) -> bool:
        """Whether events were counted of which nothing but the order is known."""
        return self._course != 0

    def call(self, subject: Subject, flags: Tensor | None = None) -> Called:
        """Come to a meeting; waiting replaces ``flags`` (``[n]``, uint8) by their maximum."""
        return Called(self, subject, flags)

    def _header(self, subject: Subject) -> Tensor:
        numbers = torch.tensor([_NUMBERS[subject], *self._course.to_bytes(4, "big")], device="cpu")
        return torch.cat([numbers, 255 - numbers]).to(torch.uint8)


class Called:
    """A meeting on its way."""

    def __init__(self, meetings: Meetings, subject: Subject, flags: Tensor | None) -> None:
        self._meetings = meetings
        self._subject = subject
        self._flags = flags
        self._work: Any = None
        if meetings.world_size == 1:
            return
        num_flags = 0 if flags is None else flags.numel()
        assert num_flags <= meetings._capacity, "more flags than were reserved"
        self._message = torch.zeros(
            2 * _HEADER + meetings._capacity, dtype=torch.uint8, device="cpu"
        )
        self._message[: 2 * _HEADER] = meetings._header(subject)
        if flags is not None:
            self._message[2 * _HEADER : 2 * _HEADER + num_flags] = flags
        self._meeting = meetings.watch.begin(subject.value)
        with unseen():
            self._work = dist.all_reduce(
                self._message, dist.ReduceOp.MAX, group=meetings.group, async_op=True
            )

    def wait(self) -> None:
        """Return when all have come.

        Raises:
            RuntimeError: They have come for different things.
        """
        if self._work is None:
            return
        self._meetings.watch.wait(self._meeting, [self._work])
        self._work = None
        header = self._message[: 2 * _HEADER]
        if not torch.equal(header[:_HEADER], 255 - header[_HEADER:]):
            self._part()
        if self._flags is not None:
            start = 2 * _HEADER
            self._flags.copy_(self._message[start : start + self._flags.numel()])

    def _part(self) -> NoReturn:
        """Say where every rank is; all are here, if for different things."""
        watch = self._meetings.watch
        places: list[Any] = [None] * self._meetings.world_size
        here = watch.describe(self._subject.value)
        dist.all_gather_object(places, here, group=self._meetings.group)
        verdict = parted(places)
        if self._meetings.has_notes:
            # Collectives of which nothing but the order is known may have met the wrong ones, or
            # wait on a device for ones that never come: no more can be built on them.
            watch.verdict = verdict
            give_up_devices()
        raise RuntimeError(verdict)
