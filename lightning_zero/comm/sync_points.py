"""The points of a step that all ranks reach together.

A sync point returns the maximum of each of its flags over the ranks. All sync points are messages
of one size on a group of their own, so that ranks at different sync points notice it: each message
begins with a checksum of the sync point and of what this rank has done in order since the last one,
and with its complement. Where the maximum of a number and that of its complement no longer match,
the ranks differ::

    rank 0   gather a, gather b | sync point BEGIN    checksums differ: both ranks raise an error
    rank 1   gather a           | sync point BEGIN    that names what each of them has done
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from enum import Enum
from itertools import zip_longest
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from lightning_zero.comm.collective_log import CollectiveLog
from lightning_zero.comm.process_groups import give_up_devices, group_for
from lightning_zero.comm.watchdog import GRADIENT, TOUCH, diverged
from lightning_zero.tensors import unseen


class SyncPoint(Enum):
    """A point at which all ranks wait for each other; its value names it in errors."""

    SETUP = "the setup of shared memory"
    BEGIN = "the start of a backward pass"
    END = "the end of a backward pass"
    STEP = "an optimizer step"
    STEPPED = "the end of an optimizer step"
    EDIT = "a change to the weights"
    REFRESH = "the refresh of weights"
    FORWARD = "the end of a forward pass without gradients"
    BATCH = "the next batch of training data"
    CLOSE = "the end of training"
    TOUCH = TOUCH
    GRADIENT = GRADIENT
    STATES = "the whole states of an optimizer"
    VALUE = "the whole value in a state dict"
    COMPARE = "the comparison of models, settings and optimizers"


_CHECKSUM = 4
_NOTICES = 2
_HEADER = 2 * _CHECKSUM + _NOTICES


def with_complements(numbers: bytes) -> bytes:
    """Return flags whose maxima over the ranks have this form again only if all ranks agree."""
    return numbers + bytes([255 - number for number in numbers])


class Channel:
    """The way of this rank's messages at sync points.

    Args:
        world_size: Number of all ranks; a single one does not wait.
        log: The collectives that this rank has begun.
        describe: Describes this rank, at a place, in the error of ranks that differ.

    Attributes:
        capacity: Flags that a sync point has room for.
        notices: Flags of this rank that every sync point carries besides its own.
        noticed: Their maxima over the ranks, at the last sync point that was waited for.
    """

    def __init__(self, world_size: int, log: CollectiveLog, describe: Callable[[str], Any]) -> None:
        self.world_size, self.log, self.describe = world_size, log, describe
        self.capacity = 64
        self.notices = bytearray(_NOTICES)
        self.noticed = bytes(_NOTICES) if world_size > 1 else self.notices

    @property
    def group(self) -> Any:
        """The group of messages. Not kept: one that is referenced outlives its destruction."""
        return group_for("sync points", of_hosts=True)

    def reserve(self, num_flags: int) -> None:
        """Make room for ``num_flags`` flags; all ranks must ask for the same number."""
        self.capacity = max(self.capacity, num_flags)

    def refuse(self, places: list[tuple[str, list[str]]]) -> NoReturn:
        """Raise an error with every rank's place; all are here, though after different events."""
        where = [place for place, _ in places]
        for events in zip_longest(*(events for _, events in places), fillvalue="nothing more"):
            if len(set(events)) > 1:
                where = [f"{w}, after {e}" for w, e in zip(where, events, strict=True)]
                break
        verdict = diverged(dict(enumerate(where)))
        if self.log.untagged is not None:
            # They may have met the wrong ones, or wait on a device for ones that never come: their
            # groups cannot be used again.
            self.log.verdict = verdict
            give_up_devices()
        raise RuntimeError(verdict)


class PendingSync:
    """A sync point that this rank has come to, and may still have to wait for.

    Args:
        channel: How its message reaches the other ranks; a single one does not wait.
        sync_point: The sync point.
        flags: Flags whose maxima over the ranks :meth:`wait` returns.
        about: What it is about, which must be the same on all ranks.
    """

    def __init__(
        self, channel: Channel, sync_point: SyncPoint, flags: bytes, about: str = ""
    ) -> None:
        self._channel = channel
        self._name = f"{sync_point.value} {about}" if about else sync_point.value
        self._flags = flags
        self._work: Any = None
        if channel.world_size == 1:
            return
        log = channel.log
        self._events, log.events = log.events, []
        met = "\n".join([*self._events, self._name, str(len(flags))])
        checksum = zlib.crc32(met.encode()).to_bytes(_CHECKSUM, "big")
        message = with_complements(checksum) + channel.notices + flags
        padded = bytearray(message.ljust(_HEADER + channel.capacity, b"\0"))
        self._message = torch.frombuffer(padded, dtype=torch.uint8)
        self._collective = log.begin(self._name, sync_point.value)
        with log.explained(), unseen():
            self._work = dist.all_reduce(
                self._message, dist.ReduceOp.MAX, group=channel.group, async_op=True
            )

    def wait(self) -> bytes:
        """Return the maximum of each flag over the ranks, once all have come.

        Raises:
            RuntimeError: The ranks have come to different sync points.
        """
        work, self._work = self._work, None
        if work is not None:
            channel = self._channel
            channel.log.wait(self._collective, [work])
            maxima = bytes(self._message[: _HEADER + len(self._flags)].tolist())
            if maxima[: 2 * _CHECKSUM] != with_complements(maxima[:_CHECKSUM]):
                channel.refuse(self.exchange((channel.describe(self._name), self._events)))
            channel.noticed, self._flags = maxima[2 * _CHECKSUM : _HEADER], maxima[_HEADER:]
        return self._flags

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's ``value``; a collective, after all have waited."""
        values: list[Any] = [None] * self._channel.world_size
        with self._channel.log.at(self._name):
            dist.all_gather_object(values, value, group=self._channel.group)
        return values
