"""The gradients of a unit, on their way from autograd to the optimizer.

::

    expect -> take, take, ... -> reduce -> finish -> install
    expect -> take, take, ... -> keep_own                       (within ``no_sync``)
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

from lightning_zero.parameters import FlatParameters
from lightning_zero.tensors import span


class Gradients:
    """The gradients of one unit's parameters.

    Args:
        first_tag: As for ``Weights``.

    Attributes:
        parameters: The unit's parameters; callers refer to one by its index here.
        wants: For each parameter, whether it wants a gradient in this backward pass.
        are_all_wanted: Whether every parameter wants one.
        are_complete: Whether all that want a gradient got one in this backward pass.
    """

    def __init__(self, label: str, flats: Sequence[FlatParameters], first_tag: int) -> None:
        self.label = label
        self.parameters = [parameter for flat in flats for parameter in flat.parameters]
        self.wants: list[bool] = []
        self.are_complete, self.are_all_wanted = True, False
        self._groups = [flat.gradients for flat in flats]
        self._first_tag = first_tag
        self._places = [(g, place) for g in self._groups for place in range(len(g.pieces))]
        self._missing: set[int] = set()
        self._finishes: list[Callable[..., None]] = []

    def expect(self, *, sends: bool) -> None:
        """Begin to take the gradients of a backward pass, which averages them if it ``sends``."""
        self.wants = []
        for group in self._groups:
            group.expect(sends=sends)
            self.wants += group.wants
        self.are_all_wanted = bool(self.wants) and False not in self.wants
        self._missing = set(itertools.compress(itertools.count(), self.wants))
        self.are_complete = not self._missing

    def take(self, index: int) -> bool:
        """Take the gradient that autograd just finished; return whether all are there now."""
        group, place = self._places[index]
        group.take(place, self.parameters[index])
        self._missing.discard(index)
        self.are_complete = not self._missing
        return self.are_complete

    @property
    def are_pending(self) -> bool:
        """Return whether a gradient has arrived that is not reduced."""
        return True in [group.is_pending for group in self._groups]

    @span("reduce")
    def reduce(self) -> None:
        """Start to average the arrived gradients over the ranks."""
        if self._finishes:
            self.finish()
        for tag, group in enumerate(self._groups, self._first_tag):
            if True in group.wants:
                self._finishes.append(group.reduce(self.label, tag))

    @span("finish_reduce")
    def finish(self) -> None:
        """Finish the reductions that were started."""
        finishes, self._finishes = self._finishes, []
        for finish in finishes:
            finish()

    def wait_for_copies(self) -> None:
        """Wait until sums over the copies have arrived, if they are under way."""
        for group in self._groups:
            group.wait_for_copies()

    def wait(self) -> None:
        """Wait until averages whose reductions are finished have arrived, the last one first."""
        for group in reversed(self._groups):
            group.wait()

    @property
    def held(self) -> list[bool]:
        """For each parameter, whether it got a gradient or its piece keeps an earlier one."""
        held: list[bool] = []
        for group in self._groups:
            held += group.has_grads
        return held

    def install(self, held: Iterator[bool]) -> None:
        """Show optimizer and user the reduced gradients that any rank holds.

        ``held`` yields the flags of all units; this unit takes one for each of its parameters.
        """
        for group in self._groups:
            group.install(list(itertools.islice(held, len(group.pieces))))

    def keep_own(self) -> None:
        """Show this rank's own gradients after a backward pass that sends none."""
        for group in self._groups:
            group.keep_own()

    def abandon(self) -> None:
        """Drop all gradients not yet shown to the optimizer."""
        finishes, self._finishes = self._finishes, []
        # The ranks waited for may be gone, and their gradients with them.
        with contextlib.suppress(RuntimeError):
            for finish in finishes:
                finish(is_wanted=False)
        for group in self._groups:
            group.abandon()
