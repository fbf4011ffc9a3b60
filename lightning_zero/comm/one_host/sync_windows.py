"""Sync points of ranks that share one host, by words in memory that all of them have mapped.

A message through a socket wakes three threads on its way from rank to rank, which costs more than
the work of a small model's step. Here a rank writes its word to its window, increments its count,
and polls until all other counts have caught up.

Each window has two places, used in turn. A rank waits for one sync point before it comes to the
next. So when it writes its word n + 2 over its word n, all ranks have counted n + 1, and had read
the words n before that: no word is overwritten before it has been read.

A rank reads a word once it has seen its count, so memory must be written and read in program
order, which x86 processors guarantee. Reading each other's masters and reduce buffers between two
sync points relies on the same guarantee.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
from math import inf
from time import monotonic, sleep
from typing import ClassVar

import torch
import torch.distributed as dist

from lightning_zero.comm.control import Control
from lightning_zero.comm.one_host.window import Address, Window, are_supported
from lightning_zero.comm.process_groups import time_limit

MOST_FLAGS = 2**16
"""Flags for which a word has room; untouched pages cost nothing."""

_ROOM = MOST_FLAGS + 64

_COUNT_BYTES = 64  # a cache line
_CAPACITY = _COUNT_BYTES + 2 * _ROOM
_SPIN_SECONDS = 1e-4
"""How long a rank polls without a pause: the others are usually as far as it is."""
_PAUSES = 5e-5, 1e-3
"""The shortest and the longest pause between two polls; each costs 20 us of CPU time."""
_PAUSE_SHARE = 0.25
"""A pause's share of the time waited so far."""
_SECONDS_BETWEEN_CHECKS = 0.02


class _Desk:
    """One rank's window, and a handle of its process."""

    def __init__(self, address: Address, window: Window) -> None:
        self._window = window  # keeps the memory mapped
        self._process = os.pidfd_open(address.process)
        start = window.view(_CAPACITY, torch.uint8).data_ptr()
        self.count = ctypes.c_int64.from_address(start)
        room = (ctypes.c_ubyte * (2 * _ROOM)).from_address(start + _COUNT_BYTES)
        self.words = memoryview(room).cast("B")

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            os.close(self._process)

    @property
    def has_ended(self) -> bool:
        """Return whether the rank's process has ended."""
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))


class Word:
    """This rank's word at one sync point, and the others' once they are there.

    Attributes:
        maxima: The maximum of each byte over the ranks, once it has been waited for.
    """

    def __init__(self, windows: SyncWindows, number: int, size: int) -> None:
        self._windows = windows
        self._number, self._size = number, size
        self.maxima = b""

    def wait(self) -> None:
        """Wait until all ranks have come to as many sync points as this one.

        Raises:
            RuntimeError: A rank or the run has ended, or the time limit has passed.
        """
        if self.maxima:
            return
        self._windows.await_all(self._number)
        words = self._windows.read(self._number, self._size)
        is_one = words.count(words[0]) == len(words)
        self.maxima = words[0] if is_one else bytes(map(max, *words))


class SyncWindows:
    """The words of all ranks at successive sync points.

    Args:
        control: All ranks, which have mapped each other's windows.
        desks: The windows, in rank order.

    Attributes:
        last: This rank's last word; it must have been waited for before the next.
    """

    most_flags: ClassVar[int] = MOST_FLAGS

    def __init__(self, control: Control, desks: list[_Desk]) -> None:
        self.last: Word | None = None
        self._log = control.log
        self._own = desks[control.rank]
        self._desks = desks
        limit = time_limit()
        self._seconds = inf if limit is None else limit.total_seconds()

    @classmethod
    def among(cls, control: Control) -> SyncWindows | None:
        """Map the windows of all ranks, if every rank can map every other's; a collective."""
        # Other processors may see each other's writes in another order.
        can = are_supported() and hasattr(os, "pidfd_open")
        can = can and platform.machine() in ("x86_64", "AMD64")
        own = Window.create(_CAPACITY, control.world_size) if can else None
        addresses = control.gather_objects(own and own.address)
        desks: list[_Desk] = []
        if own is not None and None not in addresses:
            with contextlib.suppress(OSError, RuntimeError):
                for rank, address in enumerate(addresses):
                    is_own = rank == control.rank
                    window = own if is_own else Window.open(address, control.world_size)
                    desks.append(_Desk(address, window))
        can_all = control.gather_objects(len(desks) == control.world_size)
        return cls(control, desks) if all(can_all) else None

    def publish(self, word: bytes) -> Word:
        """Show the others ``word``, which has the same length on all ranks."""
        number = self._own.count.value + 1
        start = _ROOM * (number % 2)
        self._own.words[start : start + len(word)] = word
        self._own.count.value = number  # after the word, which others read once they see this
        self.last = Word(self, number, len(word))
        return self.last

    def await_all(self, number: int) -> None:
        """Wait until all ranks have published ``number`` words; raise if one never will."""
        began = checked = monotonic()
        for desk in self._desks:
            while desk.count.value < number:
                now = monotonic()
                if now - began < _SPIN_SECONDS:
                    os.sched_yield()
                elif now - checked < _SECONDS_BETWEEN_CHECKS:
                    shortest, longest = _PAUSES
                    sleep(min(longest, max(shortest, _PAUSE_SHARE * (now - began))))
                else:
                    checked = now
                    self._check(number, now - began)

    def _check(self, number: int, seconds: float) -> None:
        """Raise what a broken connection would if there is no point in waiting any longer."""
        if self._log.verdict:
            raise RuntimeError(self._log.verdict)
        for rank, desk in enumerate(self._desks):
            if desk.count.value >= number:
                continue
            # It may have come, and gone on to its end, since its count was read.
            if desk.has_ended and desk.count.value < number:
                raise dist.DistError(f"the process of rank {rank} has exited")
            if seconds > self._seconds:
                raise dist.DistError(f"rank {rank} did not arrive within {self._seconds:.0f} s")

    def read(self, number: int, size: int) -> list[bytes]:
        """Return the ranks' words ``number``; all have published it, and none ``number + 2``."""
        start = _ROOM * (number % 2)
        return [bytes(desk.words[start : start + size]) for desk in self._desks]
