"""The whole weights of a unit: whether they are in memory, and what the parameters show.

::

    RELEASED ── unshard ──> IN_FLIGHT ── wait ──> WHOLE ── reshard ──> RELEASED
                                ^                   │
                                └───── refresh ─────┘

    GUARD ── wait ──> WEIGHTS ── idle, hide_copies, refresh, reshard ──> GUARD
    GUARD or WEIGHTS ── show_masters ──> MASTERS ── hide_masters ──> GUARD

Weights are shown only while they are whole; while in flight, they are guarded. While masters are
shown, forward and backward compute with them, and the weights stay where they are.

Weights whose home is replicated (stages 1 and 2) are never released: ``reshard`` and ``idle`` leave
them as they are, and every optimizer step refreshes them. Between steps they are guarded if they
are copies of more precise masters. **Pinned** weights stay whole until the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from torch import Tensor

from lightning_zero.comm import SyncPoint
from lightning_zero.parameters import FlatParameters, guards
from lightning_zero.tensors import Work, internals, runs_outside, span


class Residency(Enum):
    """Whether the whole weights of a unit are in memory."""

    RELEASED = "released"
    """Only shards are."""
    IN_FLIGHT = "in flight"
    """They are allocated and being filled."""
    WHOLE = "whole"
    """They are, and can be read."""


class Shows(Enum):
    """What the parameters of a unit show."""

    GUARD = "guard"
    """Nothing: they send every use to their owner, and are placeholders if nothing is whole."""
    WEIGHTS = "weights"
    """The whole weights."""
    MASTERS = "masters"
    """Whole masters: to code between steps, which may change them, or within `gathered`."""


class Weights:
    """The whole weights of one unit.

    Facts from the plans are kept in attributes: they are read for each unit in each pass, where a
    call would cost as much as the answer.

    Args:
        first_tag: The tag of the first group's messages; those of the next groups count on.

    Attributes:
        residency: Whether the weights are in memory.
        shows: What the parameters show.
        is_pinned: Whether the weights stay whole until the end of the step.
        gives_back: Whether they are released after use.
        are_copies: Whether some are copies of more precise masters.
        hides_masters: Whether code between steps sees the masters only after :meth:`show_masters`.
    """

    def __init__(self, label: str, flats: Sequence[FlatParameters], first_tag: int) -> None:
        self.label = label
        self.residency, self.shows = Residency.WHOLE, Shows.WEIGHTS
        self.is_pinned = False
        self.gives_back = any(flat.plan.gives_weights_back for flat in flats)
        self.are_copies = any(flat.plan.are_copies for flat in flats)
        self.hides_masters = self.gives_back or self.are_copies
        self._flats = flats
        self._first_tag = first_tag
        self._works: list[Work] = []

    @property
    def rest(self) -> bool:
        """Return whether a use of the parameters needs a gather."""
        return self.residency is Residency.RELEASED and self.shows is Shows.GUARD

    @span("unshard")
    def unshard(self, *, only_stepped: bool = False) -> None:
        """Start to make the weights whole, anew if they are: all, or those that are stepped."""
        self._works = []
        for tag, flat in enumerate(self._flats, self._first_tag):
            if not only_stepped or flat.may_be_stepped:
                self._works.append(flat.gather(self.label, tag))
        self.residency = Residency.IN_FLIGHT

    def refresh(self, *, only_stepped: bool = False) -> None:
        """Start to bring whole weights up to date with masters: all, or those that are stepped."""
        if self.shows is Shows.MASTERS:
            self._refresh_masters(only_stepped=only_stepped)
            return
        if self.residency is Residency.IN_FLIGHT:
            self._end_unshard()
        if self.shows is Shows.WEIGHTS:
            self.guard()
        self.unshard(only_stepped=only_stepped)

    def wait(self) -> None:
        """Make the parameters readable; whatever they show must be whole or in flight."""
        if self.residency is Residency.IN_FLIGHT:
            self._end_unshard()
        elif self.shows is Shows.GUARD:
            assert not self.rest, f"{self.label} is awaited but was not unsharded"
            self.shows = Shows.WEIGHTS
            for flat in self._flats:
                flat.show_whole(is_new=False)

    @span("wait")
    def _end_unshard(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        for flat in self._flats:
            flat.show_whole()
        self.residency, self.shows = Residency.WHOLE, Shows.WEIGHTS

    def wait_if_in_flight(self) -> None:
        """Finish a gather that was started."""
        if self.residency is Residency.IN_FLIGHT:
            self._end_unshard()

    def gather_again(self) -> None:
        """Gather for ranks that ask for it, whether the weights are whole here or not."""
        was_guarded = self.shows is Shows.GUARD and not self.rest
        self.keep_edits()
        self.unshard()
        self._end_unshard()
        if was_guarded:
            self.idle()

    def idle(self) -> None:
        """Keep whole weights for a later need, guarded so that all other uses are noticed."""
        if self.gives_back and not self.is_pinned and self.shows is Shows.WEIGHTS:
            self.guard()

    def hide_copies(self) -> None:
        """Guard copies, so that every use between steps is noticed and sees the masters."""
        if self.shows is Shows.WEIGHTS:
            self.keep_edits()
            self.guard()

    def guard(self) -> None:
        """Send every use of the parameters to their owner until the weights are next awaited."""
        for flat in self._flats:
            flat.classes.guard()
        self.shows = Shows.GUARD

    def pin_if_viewed(self, tensor: Tensor) -> None:
        """Keep the weights whole until the end of the step if ``tensor`` is a view of them."""
        if not (self.gives_back and internals.has_storage(tensor)):
            return
        storage = tensor.untyped_storage()._cdata
        for flat in self._flats:
            if flat.weight.tensor.untyped_storage()._cdata == storage:
                guards.track(tensor, flat.parameters)
                self.is_pinned = True
                return

    def reshard(self) -> None:
        """Release whole weights, if their home is sharded and nothing pins them."""
        if self.residency is Residency.RELEASED or self.is_pinned or not self.gives_back:
            return
        if self.shows is Shows.MASTERS:
            return
        self.wait_if_in_flight()
        self.keep_edits()
        self._release()

    @span("reshard")
    def _release(self) -> None:
        for flat in self._flats:
            flat.show_resting()
            flat.weight.release()
        self.residency, self.shows = Residency.RELEASED, Shows.GUARD

    def keep_edits(self) -> None:
        """Copy users' changes of whole weights to the masters, on all ranks."""
        if self.is_edited:
            with self._flats[0].store.comm.write_access(SyncPoint.EDIT):
                self.store_edits()

    @property
    def is_edited(self) -> bool:
        """Return whether what is whole has changes by users that the masters lack."""
        if self.residency is not Residency.WHOLE and self.shows is not Shows.MASTERS:
            return False
        return bool([flat for flat in self._flats if flat.edits.unsaved])

    @property
    def are_in_graph(self) -> bool:
        """Return whether an autograd graph that lives has used what the parameters show."""
        return any(flat.are_in_graph for flat in self._flats)

    def store_edits(self) -> None:
        """Copy this rank's part of users' changes to the masters; within write access."""
        for flat in self._flats:
            flat.store_edits()

    @property
    def is_gathered(self) -> bool:
        """Return whether `gathered` shows the masters."""
        return any(flat.edits.are_gathered for flat in self._flats)

    @runs_outside
    def show_masters(self, *, as_gathered: bool = False) -> None:
        """Show whole masters until :meth:`hide_masters`.

        Code between steps may change them: what each rank changes in its own part can be stored.
        With ``as_gathered`` they are for `gathered`: rank 0's changes are stored, or none.
        """
        self.wait_if_in_flight()
        self.keep_edits()
        is_whole = self.residency is Residency.WHOLE
        started = [
            flat.gather_masters(self.label, tag, are_whole=is_whole, as_gathered=as_gathered)
            for tag, flat in enumerate(self._flats, self._first_tag)
        ]
        for flat, (whole, work) in zip(self._flats, started, strict=True):
            work.wait()
            flat.show_masters(whole, as_gathered=as_gathered)
        self.shows = Shows.MASTERS

    @runs_outside
    def hide_masters(self) -> None:
        """Guard the parameters again; changes that are not stored are lost."""
        for flat in self._flats:
            flat.hide_masters(are_whole=self.residency is Residency.WHOLE)
        self.shows = Shows.GUARD

    def _refresh_masters(self, *, only_stepped: bool) -> None:
        """Show the masters anew: they were stepped while they were shown."""
        as_gathered = self.is_gathered
        copies = [flat for flat in self._flats if flat.shows_copies]
        if [flat for flat in copies if flat.edits.changed]:
            raise RuntimeError(
                f"Weights of {self.label!r} were changed, and then stepped by an optimizer, within"
                " one `gathered(...)` or within the step itself. Change them before or after."
            )
        self.hide_masters()
        if self.residency is Residency.WHOLE:
            self.unshard(only_stepped=only_stepped)
        self.show_masters(as_gathered=as_gathered)

    @property
    def changed(self) -> list[str]:
        """The names of parameters that were changed since they were last shown."""
        return [flat.layout.slots[i].name for flat in self._flats for i in flat.edits.changed]

    @runs_outside
    def store_gathered(self) -> None:
        """Make rank 0's gathered values the masters of all ranks; within write access."""
        for flat in self._flats:
            flat.edits.bring_back()
            flat.store.comm.broadcast(flat.edits.buffer.tensor)
            flat.take_over(flat.edits.buffer)

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
            self.residency, self.shows = Residency.WHOLE, Shows.WEIGHTS

    def retire(self) -> None:
        """Free the weights after the parameters were pointed elsewhere."""
        for flat in self._flats:
            flat.retire()
        self.residency = Residency.RELEASED
