"""Windows for reduce buffers: this rank's, reused once peers have read them, and the peers'."""

from __future__ import annotations

from lightning_zero.comm.collective_log import CollectiveLog
from lightning_zero.comm.mesh import Axis
from lightning_zero.comm.one_host.window import Address, Window


class ReduceWindows:
    """Windows for the reductions along one axis, all of the largest capacity requested so far.

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
        """Bytes of the free windows that this rank has used."""
        return sum(window.touched_bytes for window in self.free)

    def take(self, nbytes: int) -> Window:
        """Return a window that no peer still reads."""
        # The largest size seen for all windows: untouched pages cost nothing.
        self._capacity = max(self._capacity, nbytes)
        for window in self.free:
            is_as_large = window.address.capacity == self._capacity
            if is_as_large and window.is_read_by_all(self._axis.rank):
                self.free.remove(window)
                return window
        # Never wait for a reader here: it may itself be waiting for this rank.
        return Window.create(self._capacity, self._axis.size)

    def of_peer(self, address: Address) -> Window:
        """Return a peer's window, mapped on first use."""
        if address not in self._peers:
            with self._log.explained():
                self._peers[address] = Window.open(address, self._axis.size)
        return self._peers[address]

    def drop_outgrown(self) -> None:
        """Drop windows, own and peers', that have become too small."""
        self.free = [w for w in self.free if w.address.capacity == self._capacity]
        self._peers = {
            address: window
            for address, window in self._peers.items()
            if address.capacity == self._capacity
        }

    def clear(self) -> None:
        """Drop all windows, own and peers'."""
        self.free, self._peers = [], {}
