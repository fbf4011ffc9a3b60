"""Whether all ranks gathered the same weights, where only the order of gathers tells them apart."""

from __future__ import annotations

from lightning_zero.comm import Comm
from lightning_zero.meeting import Called, Subject


class Comparison:
    """What each rank gathered in a forward without gradients, compared behind the next one.

    A backward pass has meetings of its own, at which the same comes to light.

    Args:
        comm: The ranks.
        is_due: Whether there is anything to compare.
    """

    def __init__(self, comm: Comm, *, is_due: bool) -> None:
        self._comm = comm
        self._is_due = is_due and comm.gathers_in_order
        self._called: Called | None = None

    def start(self) -> None:
        """Tell the others what this rank gathered since the last meeting."""
        if self._is_due:
            self.wait()
            self._called = self._comm.meetings.call(Subject.FORWARD)

    def wait(self) -> None:
        """End the comparison under way, if there is one.

        Raises:
            RuntimeError: The ranks gathered different weights.
        """
        called, self._called = self._called, None
        if called is not None:
            called.wait()

    def abandon(self) -> None:
        """Forget the comparison under way: an exception has ended the step."""
        self._called = None
