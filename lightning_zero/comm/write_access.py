"""The right to change masters that peers may be reading."""

from __future__ import annotations

from collections.abc import Callable

from lightning_zero.comm.sync_points import SyncPoint


class WriteAccess:
    """The right of every rank to change its own masters, which peers may read; a collective.

    When it begins, all ranks have read the old values; when it ends, all may read the new ones.
    Where ranks cannot read each other's memory, it does not wait::

        with comm.write_access(SyncPoint.EDIT):
            master.copy_(...)

    It also ends after an exception, as the other ranks wait for that.

    Args:
        fence: Waits until every rank is at a sync point, where ranks read each other's memory.
        before: The sync point at which it begins.
        after: The sync point at which it ends.
        note: Called at each begin and end.
    """

    def __init__(
        self,
        fence: Callable[[SyncPoint], None],
        before: SyncPoint,
        after: SyncPoint,
        note: Callable[[], None],
    ) -> None:
        self._fence = fence
        self._before, self._after = before, after
        self._note = note

    def begin(self) -> None:
        """Wait until every rank has read what it needs of the others' masters."""
        self._note()
        self._fence(self._before)

    def end(self) -> None:
        """Wait until every rank has changed its masters."""
        self._note()
        self._fence(self._after)

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()
