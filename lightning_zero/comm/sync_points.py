"""The points of a step that all ranks reach together."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from lightning_zero.comm.divergence import GRADIENT, TOUCH, diverged
from lightning_zero.comm.process_groups import give_up_devices
from lightning_zero.comm.sync_windows import Word
from lightning_zero.tensors import unseen

if TYPE_CHECKING:
    from lightning_zero.comm.control import Control


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
    COMPARE = "the comparison of models, settings and optimizers"


_NUMBERS = {sync_point: number for number, sync_point in enumerate(SyncPoint)}
_HEADER = 5


def with_complements(numbers: bytes) -> bytes:
    """Return flags whose maxima over the ranks have this form again only if all ranks agree."""
    return numbers + bytes([255 - number for number in numbers])


class PendingSync:
    """A sync point that this rank has come to, and may still have to wait for.

    Args:
        control: The ranks; a single one does not wait.
        sync_point: The sync point.
        flags: Flags whose maxima over the ranks :meth:`wait` returns.
        about: What it is about, which must be the same on all ranks.
    """

    def __init__(
        self, control: Control, sync_point: SyncPoint, flags: bytes, about: str = ""
    ) -> None:
        self._control = control
        self._place = f"{sync_point.value} {about}" if about else sync_point.value
        self._maxima = flags
        self._work: _Message | Word | None = None
        if control.world_size == 1:
            return
        course = zlib.crc32(f"{len(flags)} {about}".encode(), control.course).to_bytes(4, "big")
        word = with_complements(bytes([_NUMBERS[sync_point], *course])) + flags
        windows = control.sync_windows
        message = _Message(word, control) if windows is None else None
        self._collective = control.log.begin(self._place, sync_point.value)
        if message is not None:
            message.send()
            self._work = message
        elif windows is not None:
            if windows.last is not None:
                control.log.wait(self._collective, [windows.last])
            self._work = windows.publish(word)

    def wait(self) -> bytes:
        """Return the maximum of each flag over the ranks, once all have come.

        Raises:
            RuntimeError: The ranks have come to different sync points.
        """
        work, self._work = self._work, None
        if work is not None:
            self._control.log.wait(self._collective, [work])
            maxima = work.maxima
            header, self._maxima = maxima[: 2 * _HEADER], maxima[2 * _HEADER :]
            if header != with_complements(header[:_HEADER]):
                self._refuse()
        return self._maxima

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's ``value``; a collective, after all have waited."""
        values: list[Any] = [None] * self._control.world_size
        with self._control.log.at(self._place):
            dist.all_gather_object(values, value, group=self._control.sync_group)
        return values

    def _refuse(self) -> NoReturn:
        """Raise an error with every rank's place; all are here, though at different sync points."""
        control = self._control
        verdict = diverged(self.exchange(control.watchdog.describe(self._place)))
        if control.has_notes:
            # Collectives that only the order tells apart may have met the wrong ones, or wait on a
            # device for ones that never come: their groups cannot be used again.
            control.log.verdict = verdict
            give_up_devices()
        raise RuntimeError(verdict)


class _Message:
    """A word sent as a message, padded to the longest."""

    def __init__(self, word: bytes, control: Control) -> None:
        padded = bytearray(word.ljust(2 * _HEADER + control.capacity, b"\0"))
        self._tensor = torch.frombuffer(padded, dtype=torch.uint8)
        self._control, self._size = control, len(word)
        self._work: Any = None

    def send(self) -> None:
        """Send it to all other ranks."""
        try:
            with unseen():
                self._work = dist.all_reduce(
                    self._tensor,
                    dist.ReduceOp.MAX,
                    group=self._control.sync_group,
                    async_op=True,
                )
        except RuntimeError as error:
            self._control.log.explain(error)
            raise

    def wait(self) -> None:
        """Wait until the words of all ranks have come."""
        self._work.wait()

    @property
    def maxima(self) -> bytes:
        """The maximum of each byte over the ranks, once it has been waited for."""
        return bytes(self._tensor[: self._size].tolist())


class Exclusive:
    """Exclusive access to masters that peers read, for ranks to change their own; a collective.

    When it begins, all ranks have read the old values; when it ends, all may read the new ones.
    Where ranks cannot read each other's memory, it does not wait::

        with comm.exclusive(SyncPoint.EDIT):
            master.copy_(...)

    It also ends after an exception, as the other ranks wait for that.

    Args:
        control: The ranks; ``None`` where no rank reads another's memory.
        before: The sync point at which it begins.
        after: The sync point at which it ends.
        note: Called at each begin and end.
    """

    def __init__(
        self,
        control: Control | None,
        before: SyncPoint,
        after: SyncPoint,
        note: Callable[[], None],
    ) -> None:
        self._control = control
        self._before, self._after = before, after
        self._note = note

    def begin(self) -> None:
        """Wait until every rank has read what it needs of the others' masters."""
        self._note()
        if self._control is not None:
            self._control.call(self._before).wait()

    def end(self) -> None:
        """Wait until every rank has changed its masters."""
        self._note()
        if self._control is not None:
            self._control.call(self._after).wait()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()
