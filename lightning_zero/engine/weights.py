"""The whole weights of a unit, and the states that they go through.

::

                unshard              wait              idle
      RESTING ──────────> IN_FLIGHT ──────> WHOLE ──────────────> GUARDED
         ^                 │  ^              │ ^                   │  │
         │                 │  └── refresh ───┤ └────── wait ───────┘  │
         └──── reshard ────┴─────────────────┴────────────────────────┘

      RESTING, WHOLE or GUARDED ── begin_gathered ──> GATHERED ── end_gathered ──> RESTING or WHOLE
      RESTING or GUARDED, between steps ── open ──> OPEN ── close ──> RESTING or GUARDED

Weights whose home is replicated (stages 1 and 2) never rest: ``reshard`` and ``idle`` leave them
WHOLE, and every optimizer step refreshes them. Between steps they are GUARDED if they are copies of
more precise masters. **Pinned** weights stay WHOLE until the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from torch import Tensor

from lightning_zero.comm import SyncPoint
from lightning_zero.parameters import Buffer, FlatParameters, guards
from lightning_zero.tensors import Work, internals, span


class State(Enum):
    """The state of a unit's whole weights, and what its parameters show."""

    RESTING = "resting"
    """Released; the parameters are placeholders that send every use to their owner."""
    IN_FLIGHT = "in flight"
    """Allocated and being filled; the parameters as in RESTING."""
    WHOLE = "whole"
    """Readable; the parameters are views of the weights."""
    GUARDED = "guarded"
    """Readable and kept for a later need; the parameters send every use to their owner."""
    GATHERED = "gathered"
    """The parameters are views of whole masters, for reading or for editing."""
    OPEN = "open"
    """The same for code between steps; what each rank changes in its own part is kept."""


class Weights:
    """The whole weights of one unit.

    Facts from the plans are kept in attributes: they are read for each unit in each pass, where a
    call would cost as much as the answer.

    Args:
        first_tag: The tag of the first group's messages; those of the next groups count on.

    Attributes:
        state: Where the weights are.
        is_pinned: Whether they stay whole until the end of the step.
        gives_back: Whether they are released after use.
        are_copies: Whether some are copies of more precise masters.
        must_open: Whether code between steps sees the masters only after :meth:`open`.
    """

    def __init__(self, label: str, flats: Sequence[FlatParameters], first_tag: int) -> None:
        self.label = label
        self.state = State.WHOLE
        self.is_pinned = False
        self.gives_back = any(flat.plan.gives_weights_back for flat in flats)
        self.are_copies = any(flat.plan.are_copies for flat in flats)
        self.must_open = self.gives_back or self.are_copies
        self._flats = flats
        self._first_tag = first_tag
        self._works: list[Work] = []
        self._gathered: list[Buffer] = []
        # Whether the weights are released, or guarded, while whole masters are shown.
        self._rest_beneath = self._guard_beneath = False

    @property
    def are_whole(self) -> bool:
        """Return whether the weights' own buffer is filled and readable."""
        return self.state is not State.IN_FLIGHT and not self.are_released

    @property
    def are_released(self) -> bool:
        """Return whether the weights' own buffer is empty."""
        return self.state is State.RESTING or self._rest_beneath

    @span("unshard")
    def unshard(self, *, only_stepped: bool = False) -> None:
        """Start to make the weights whole, anew if they are: all, or those that are stepped."""
        self._rest_beneath = False
        self._works = []
        for tag, flat in enumerate(self._flats, self._first_tag):
            if not only_stepped or flat.may_be_stepped:
                self._works.append(flat.gather(self.label, tag))
        self.state = State.IN_FLIGHT

    def refresh(self, *, only_stepped: bool = False) -> None:
        """Start to bring whole weights up to date with masters: all, or those that are stepped."""
        if self._rest_beneath:
            return
        if self.state is not State.GUARDED:
            self.wait()
            self.guard()
        self.unshard(only_stepped=only_stepped)

    def wait(self) -> None:
        """Make the weights readable; they must be whole or in flight."""
        if self.state is State.IN_FLIGHT:
            self._arrive()
        elif self.state is State.GUARDED:
            self.state = State.WHOLE
            for flat in self._flats:
                flat.show_whole(is_new=False)
        assert self.state is not State.RESTING, f"{self.label} is awaited but was not unsharded"

    @span("wait")
    def _arrive(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        for flat in self._flats:
            flat.show_whole()
        self.state = State.WHOLE

    def wait_if_in_flight(self) -> None:
        """Finish a gather that was started."""
        if self.state is State.IN_FLIGHT:
            self._arrive()

    def gather_again(self) -> None:
        """Gather for ranks that ask for it, whether the weights are whole here or not."""
        was_guarded = self.state is State.GUARDED
        self.keep_edits()
        self.unshard()
        self._arrive()
        if was_guarded:
            self.idle()

    def idle(self) -> None:
        """Keep whole weights for a later need, guarded so that all other uses are noticed."""
        if self.gives_back and not self.is_pinned:
            self._hide()

    def hide_copies(self) -> None:
        """Guard copies, so that every use between steps is noticed and sees the masters."""
        if self.state is State.WHOLE:
            self.keep_edits()
            self._hide()

    def _hide(self) -> None:
        self.guard()
        self.state = State.GUARDED

    def guard(self) -> None:
        """Send every use of the parameters to their owner until the weights are next awaited."""
        for flat in self._flats:
            flat.classes.guard()

    def pin_if_viewed(self, tensor: Tensor) -> None:
        """Keep the weights whole until the end of the step if ``tensor`` is a view of them."""
        if not (self.gives_back and internals.has_storage(tensor)):
            return
        storage = tensor.untyped_storage()._cdata
        for flat in self._flats:
            if flat.weight.tensor.untyped_storage()._cdata == storage:
                if flat.own():  # moved: view the same place in the new memory
                    place = tensor.storage_offset(), tensor.size(), tensor.stride()
                    tensor.set_(flat.weight.tensor.untyped_storage(), *place)
                guards.track(tensor, flat.parameters)
                self.is_pinned = True
                return

    def reshard(self, *, until_backward: bool = False) -> None:
        """Release whole weights, if their home is sharded and nothing pins them.

        ``until_backward`` if they are needed again in this step, for which a part may be kept.
        """
        if self.state is State.RESTING or self.is_pinned or not self.gives_back:
            return
        if self._rest_beneath:
            return
        self.wait_if_in_flight()
        self.keep_edits()
        for flat in self._flats if until_backward else ():
            if flat.store.keeps_weights:
                flat.store.keep(flat.weight.tensor)
        self._release()

    @span("reshard")
    def _release(self) -> None:
        for flat in self._flats:
            flat.show_resting()
            flat.weight.release()
        self.state = State.RESTING

    def keep_edits(self) -> None:
        """Copy users' changes of whole weights to the masters, on all ranks."""
        if self.is_edited:
            with self._flats[0].store.comm.exclusive(SyncPoint.EDIT):
                self.store_edits()

    @property
    def is_edited(self) -> bool:
        """Return whether whole weights have changes by users that the masters lack."""
        if self.state is not State.WHOLE and not self.are_whole:
            return False
        return bool([flat for flat in self._flats if flat.edits.unsaved])

    def store_edits(self) -> None:
        """Copy this rank's part of users' changes to the masters; within exclusive access."""
        for flat in self._flats:
            flat.keep_edits()

    @property
    def can_open(self) -> bool:
        """Return whether :meth:`open` would show masters that are not shown now."""
        return self.must_open and self.state is not State.OPEN and not self.is_gathered

    def open(self) -> None:
        """Show whole masters to code between steps, which may change them, until :meth:`close`."""
        tagged = enumerate(self._flats, self._first_tag)
        works = [flat.open(self.label, tag) for tag, flat in tagged]
        for flat, work in zip(self._flats, works, strict=True):
            work.wait()
            flat.show_open()
        self.state = State.OPEN

    def close(self) -> None:
        """Hide the masters again; changes that are not stored are lost."""
        for flat in self._flats:
            flat.close()
        self.state = State.RESTING if self.gives_back else State.GUARDED

    @property
    def is_gathered(self) -> bool:
        """Return whether whole masters are held now."""
        return bool(self._gathered)

    def begin_gathered(self) -> None:
        """Show whole parameters in the master's precision until :meth:`end_gathered`."""
        is_guarded = self.state in (State.GUARDED, State.IN_FLIGHT)
        self._guard_beneath = is_guarded and self.are_copies and not self.gives_back
        self.wait_if_in_flight()
        self.keep_edits()
        self._rest_beneath = self.state is State.RESTING
        self._gathered = [
            flat.begin_gathered(is_whole=not self._rest_beneath) for flat in self._flats
        ]
        self.state = State.GATHERED

    @property
    def changed(self) -> list[str]:
        """The names of parameters that were changed since they were last shown."""
        return [flat.layout.slots[i].name for flat in self._flats for i in flat.edits.changed]

    def store_gathered(self) -> None:
        """Make rank 0's gathered values the masters of all ranks; within exclusive access."""
        for flat, whole in zip(self._flats, self._gathered, strict=True):
            flat.edits.bring_back()
            flat.store.comm.broadcast(whole.tensor)
            flat.take_over(whole)

    def end_gathered(self) -> None:
        """Show the weights again, or their placeholders at rest."""
        self._gathered = []
        self.wait_if_in_flight()
        self.state = State.RESTING if self.are_released else State.WHOLE
        self._rest_beneath = False
        for flat in self._flats:
            if self.state is State.WHOLE:
                flat.show_whole()
            else:
                flat.show_resting()
        if self._guard_beneath:
            self._guard_beneath = False
            self._hide()

    def abandon(self) -> None:
        """Finish or drop what is in flight, and unpin the weights."""
        self.is_pinned = False
        try:
            self.wait_if_in_flight()
        except RuntimeError:
            # The ranks waited for are gone, and their parts with them.
            self._works = []
            for flat in self._flats:
                flat.show_whole()
            self.state = State.WHOLE

    def retire(self) -> None:
        """Free the weights after the parameters were pointed elsewhere."""
        for flat in self._flats:
            flat.retire()
        self.state = State.RESTING
