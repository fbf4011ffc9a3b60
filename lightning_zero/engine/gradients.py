"""The gradients of a unit, on their way from autograd to the optimizer.

::

    expect -> take, take, ... -> reduce -> finish -> install
    expect -> take, take, ... -> show_local                     (within ``no_sync``)
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from lightning_zero.parameters import FlatParameters, Reach
from lightning_zero.tensors import span


class Gradients:
    """The gradients of one unit's parameters.

    Args:
        first_tag: As for ``Weights``.

    Attributes:
        parameters: The unit's parameters; callers refer to one by its index here.
        wants: For each parameter, whether it wants a gradient in this backward pass.
        are_complete: Whether all that want a gradient got one in this backward pass.
    """

    def __init__(self, label: str, flats: Sequence[FlatParameters], first_tag: int) -> None:
        self.label = label
        self.parameters = [parameter for flat in flats for parameter in flat.parameters]
        self.wants: list[bool] = []
        self.are_complete = True
        self._flats = flats
        self._first_tag = first_tag
        self._places = [
            (flat.reducer, place, piece.gradient)
            for flat in flats
            for place, piece in enumerate(flat.pieces)
        ]
        self._num_missing = 0
        self._finishes: list[Callable[..., None]] = []

    def expect(self, reach: Reach) -> None:
        """Begin a backward pass whose gradients are averaged over ``reach``."""
        for flat in self._flats:
            flat.reducer.expect(reach)
        self.wants = [parameter.requires_grad for parameter in self.parameters]
        self._num_missing = sum(self.wants)
        self.are_complete = not self._num_missing

    @property
    def is_wanted(self) -> bool:
        """Return whether any parameter wants a gradient in this backward pass."""
        return True in self.wants

    @property
    def are_all_wanted(self) -> bool:
        """Return whether every parameter wants a gradient in this backward pass."""
        return bool(self.wants) and False not in self.wants

    def set_aside(self, index: int) -> None:
        """Claim a gradient that came before :meth:`expect`, or it would pass for the user's."""
        _, _, view = self._places[index]
        view.arrival = view.claim()

    def take(self, index: int) -> bool:
        """Take the gradient that autograd just finished; return whether all are there now."""
        reducer, place, view = self._places[index]
        grad = view.claim()
        if grad is None:  # an autograd function returned none: zeros, as under DDP
            grad = torch.zeros_like(self.parameters[index])
        self._num_missing -= not reducer.arrived[place]
        reducer.take(place, grad)
        self.are_complete = not self._num_missing
        return self.are_complete

    @property
    def are_pending(self) -> bool:
        """Return whether a gradient has arrived that is not reduced, or only within its copy."""
        return True in [
            flat.reducer.awaits_copies or True in flat.reducer.filled for flat in self._flats
        ]

    @span("reduce")
    def reduce(self) -> None:
        """Start to average the arrived gradients over the ranks."""
        self.finish()
        for tag, flat in enumerate(self._flats, self._first_tag):
            wants = True in [parameter.requires_grad for parameter in flat.parameters]
            if wants or flat.reducer.awaits_copies:
                self._finishes.append(flat.reducer.reduce(self.label, tag))

    def finish(self) -> None:
        """Finish the reductions that were started."""
        if self._finishes:
            self._finish()

    def wait_for_copies(self) -> None:
        """Wait until sums over the copies have arrived, if they are under way."""
        for flat in self._flats:
            flat.reducer.shard.wait_for_copies()

    def wait(self) -> None:
        """Wait until averages whose reductions are finished have arrived, the last one first."""
        for flat in reversed(self._flats):
            flat.reducer.shard.wait()

    @span("finish_reduce")
    def _finish(self) -> None:
        finishes, self._finishes = self._finishes, []
        for finish in finishes:
            finish()

    @property
    def held(self) -> list[bool]:
        """For each parameter, whether it got a gradient or its piece keeps an earlier one."""
        held: list[bool] = []
        for flat in self._flats:
            held += flat.reducer.has_grads
        return held

    def install(self, held: Iterator[bool]) -> None:
        """Show optimizer and user the reduced gradients that any rank holds.

        ``held`` yields the flags of all units; this unit takes one for each of its parameters.
        """
        for flat in self._flats:
            flat.reducer.install(list(itertools.islice(held, len(flat.parameters))))

    def show_local(self) -> None:
        """Show this rank's own gradients after a backward pass that sends none."""
        for flat in self._flats:
            flat.reducer.show_local()

    def abandon(self) -> None:
        """Drop all gradients not yet shown to the optimizer."""
        finishes, self._finishes = self._finishes, []
        # The ranks waited for may be gone, and their gradients with them.
        with contextlib.suppress(RuntimeError):
            for finish in finishes:
                finish(is_wanted=False)
        for flat in self._flats:
            flat.reducer.drop()
