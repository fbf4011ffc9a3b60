"""Windows for reduce buffers: this rank's, reused when peers have read them, and the peers'."""

from __future__ import annotations

from lightning_zero.comm.collective_log import CollectiveLog
from lightning_zero.comm.mesh import Axis
from lightning_zero.comm.window import Address, Window


class ReduceWindows:
    """The windows of one axis' reductions; all have one capacity, the largest asked for so far.

    Attributes:
        free: This rank's windows whose reduction is over; a peer may still read them.
    """

    def __init__(self, axis: Axis, log: CollectiveLog) -> None:
        self.free: list[Window] = []
        self._axis, self._log = axis, log
        self._peers: dict[Address, Window] = {}
        self._capacity = 0

    @property
    def touched_bytes(self) -> int:
        """Bytes that this rank has covered in the free ones."""
        return sum(window.touched_bytes for window in self.free)

    def take(self, nbytes: int) -> Window:
        """Return a window that no peer reads any more."""
        # One size for all, the largest seen: pages that nobody touches cost nothing.
        self._capacity = max(self._capacity, nbytes)
        for window in self.free:
            is_as_large = window.address.capacity == self._capacity
            if is_as_large and window.is_read_by_all(self._axis.rank):
                self.free.remove(window)
                return window
        # Never wait for a reader here: it may be a rank that itself waits for us.
        return Window.create(self._capacity, self._axis.size)

    def of_peer(self, address: Address) -> Window:
        """Return a peer's window, which is mapped once."""
        if address not in self._peers:
            with self._log.explained():
                self._peers[address] = Window.open(address, self._axis.size)
        return self._peers[address]

    def drop_outgrown(self) -> None:
        """Free the windows, the peers' too, that a larger unit outgrew."""
        self.free = [w for w in self.free if w.address.capacity == self._capacity]
        self._peers = {
            address: window
            for address, window in self._peers.items()
            if address.capacity == self._capacity
        }

    def clear(self) -> None:
        """Let go of all windows, the peers' too."""
        self.free, self._peers = [], {}
