"""The points of a step that all ranks reach together.

A sync point returns the maximum of each of its flags over the ranks. All sync points are messages
of one size on a group of their own, so that ranks at different sync points notice it: each
message begins with a checksum of the events that this rank has met, the sync point among them, and
with its complement. Where the maximum of a number and that of its complement no longer match, the
ranks differ. Where all ranks share a host, the same bytes go through memory.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from lightning_zero.comm.collective_log import CollectiveId, CollectiveLog, Course
from lightning_zero.comm.process_groups import give_up_devices, group_for
from lightning_zero.comm.verdicts import GRADIENT, TOUCH, diverged
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


_HEADER = 4


def with_complements(numbers: bytes) -> bytes:
    """Return flags whose maxima over the ranks have this form again only if all ranks agree."""
    return numbers + bytes([255 - number for number in numbers])


class Word(Protocol):
    """This rank's word at a sync point, on its way to the others."""

    @property
    def maxima(self) -> bytes:
        """The maximum of each byte over the ranks, once it has been waited for."""

    def wait(self) -> None:
        """Wait until the words of all ranks have come."""


class SharedWords(Protocol):
    """Memory of all ranks that carries words in place of messages."""

    @property
    def most_flags(self) -> int:
        """Flags for which a word has room."""

    @property
    def last(self) -> Word | None:
        """This rank's last word, which must have been waited for before the next."""

    def publish(self, word: bytes) -> Word:
        """Show the others ``word``, which has the same length on all ranks."""


class Channel:
    """The way of this rank's words at sync points.

    Args:
        world_size: Number of all ranks; a single one does not wait.
        log: The collectives that this rank has begun.
        describe: Describes this rank, at a place, in the error of ranks that differ.

    Attributes:
        capacity: Flags that a sync point has room for.
        memory: What the words go through instead of messages, if anything.
    """

    def __init__(self, world_size: int, log: CollectiveLog, describe: Callable[[str], Any]) -> None:
        self.world_size, self.log, self.describe = world_size, log, describe
        self.capacity = 64
        self.memory: SharedWords | None = None

    @property
    def group(self) -> Any:
        """The group of messages. Not kept: one that is referenced outlives its destruction."""
        return group_for("sync points", of_hosts=True)

    def reserve(self, num_flags: int) -> None:
        """Make room for ``num_flags`` flags; all ranks must ask for the same number."""
        self.capacity = max(self.capacity, num_flags)
        if self.memory is not None and self.capacity > self.memory.most_flags:
            self.memory = None

    def begin(self, word: bytes, place: str, channel: str) -> tuple[CollectiveId, Word]:
        """Send this rank's ``word``, and log it."""
        if self.memory is None:
            message = _Message(word, self)
            collective = self.log.begin(place, channel)
            message.send()
            return collective, message
        collective = self.log.begin(place, channel)
        if self.memory.last is not None:
            self.log.wait(collective, [self.memory.last])
        return collective, self.memory.publish(word)

    def refuse(self, places: list[Any]) -> NoReturn:
        """Raise an error with every rank's place; all are here, though at different sync points."""
        verdict = diverged(dict(enumerate(places)))
        if self.log.untagged is not None:
            # They may have met the wrong ones, or wait on a device for ones that never come: their
            # groups cannot be used again.
            self.log.verdict = verdict
            give_up_devices()
        self.log.course = Course(self.log.course.last.era + 1)  # all are here, and may go on
        raise RuntimeError(verdict)


class PendingSync:
    """A sync point that this rank has come to, and may still have to wait for.

    Args:
        channel: How its word reaches the other ranks; a single one does not wait.
        sync_point: The sync point.
        flags: Flags whose maxima over the ranks :meth:`wait` returns.
        about: What it is about, which must be the same on all ranks.
    """

    def __init__(
        self, channel: Channel, sync_point: SyncPoint, flags: bytes, about: str = ""
    ) -> None:
        self._channel = channel
        self._place = f"{sync_point.value} {about}" if about else sync_point.value
        self._maxima = flags
        self._word: Word | None = None
        if channel.world_size > 1:
            channel.log.course.note(f"{self._place} {len(flags)}")
            header = with_complements(channel.log.course.last.checksum.to_bytes(_HEADER, "big"))
            self._collective, self._word = channel.begin(
                header + flags, self._place, sync_point.value
            )

    def wait(self) -> bytes:
        """Return the maximum of each flag over the ranks, once all have come.

        Raises:
            RuntimeError: The ranks have come to different sync points.
        """
        word, self._word = self._word, None
        if word is not None:
            self._channel.log.wait(self._collective, [word])
            maxima = word.maxima
            header, self._maxima = maxima[: 2 * _HEADER], maxima[2 * _HEADER :]
            if header != with_complements(header[:_HEADER]):
                self._channel.refuse(self.exchange(self._channel.describe(self._place)))
        return self._maxima

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's ``value``; a collective, after all have waited."""
        values: list[Any] = [None] * self._channel.world_size
        with self._channel.log.at(self._place):
            dist.all_gather_object(values, value, group=self._channel.group)
        return values


class _Message:
    """A word sent as a message, padded to the longest."""

    def __init__(self, word: bytes, channel: Channel) -> None:
        padded = bytearray(word.ljust(2 * _HEADER + channel.capacity, b"\0"))
        self._tensor = torch.frombuffer(padded, dtype=torch.uint8)
        self._channel, self._size = channel, len(word)
        self._work: Any = None

    def send(self) -> None:
        """Send it to all other ranks."""
        try:
            with unseen():
                self._work = dist.all_reduce(
                    self._tensor,
                    dist.ReduceOp.MAX,
                    group=self._channel.group,
                    async_op=True,
                )
        except RuntimeError as error:
            self._channel.log.explain(error)
            raise

    def wait(self) -> None:
        """Wait until the words of all ranks have come."""
        self._work.wait()

    @property
    def maxima(self) -> bytes:
        """The maximum of each byte over the ranks, once it has been waited for."""
        return bytes(self._tensor[: self._size].tolist())
