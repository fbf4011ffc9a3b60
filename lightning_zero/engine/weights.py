"""The whole weights of a unit: whether they are in memory, and what the parameters show.

Weights are shown while their module runs; at any other time every use is noticed. What autograd
records then computes with the weights, and all other code sees whole **masters**, in a new buffer.
So weights of less precision than the masters exist only within forwards and backward passes.

Weights whose home is replicated (stages 1 and 2) are never released: ``reshard`` leaves them as
they are, and every optimizer step refreshes them. Weights that are released can show a guard or
masters, those in flight a guard, and whole ones all three. ``docs/architecture.md`` lists the
transitions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor

from lightning_zero.comm import Communicator, SyncPoint
from lightning_zero.parameters import FlatParameters
from lightning_zero.tensors import Work, internals, runs_outside, span


class Residency(Enum):
    """The presence of a unit's whole weights in memory."""

    RELEASED = "released"
    """Only shards are in memory."""
    IN_FLIGHT = "in flight"
    """They are allocated and being filled."""
    WHOLE = "whole"
    """They can be read."""


class Shows(Enum):
    """The content that the parameters of a unit show."""

    GUARD = "guard"
    """Nothing: they send every use to their owner, and are placeholders if nothing is whole."""
    WEIGHTS = "weights"
    """The whole weights; in the root, those that are not cast from masters."""
    MASTERS = "masters"
    """Whole masters: to code outside of forwards, which may change them, or within `gathered`."""


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
        stays_shown: Whether the weights are shown throughout the step: those of the root that are
            not cast, and all of a unit that is compiled together with the code around it.
        is_gathered: Whether `gathered` shows the masters.
        reshards: Whether they are released after use.
        is_cast: Whether some have less precision than their masters.
        needs_ranks: Whether the masters are gathered from other ranks to be shown.
    """

    def __init__(self, label: str, flats: Sequence[FlatParameters], first_tag: int) -> None:
        self.label = label
        self.residency, self.shows = Residency.WHOLE, Shows.GUARD
        self.is_pinned = self.stays_shown = self.is_gathered = False
        self.reshards = any(flat.plan.reshards for flat in flats)
        self.is_cast = any(flat.plan.is_cast for flat in flats)
        self.needs_ranks = self.reshards or self.is_cast
        self._flats = flats
        self._first_tag = first_tag
        self._works: list[Work] = []

    @property
    def rests(self) -> bool:
        """Return whether a use of the parameters needs a gather."""
        return self.residency is Residency.RELEASED and self.shows is Shows.GUARD

    # -- in memory -------------------------------------------------------------------------------

    @span("unshard")
    def unshard(self, *, only_stepped: bool = False) -> None:
        """Start to make the weights whole, anew if they are: all, or those that are stepped."""
        self._works = []
        for tag, flat in enumerate(self._flats, self._first_tag):
            if not only_stepped or flat.may_be_stepped:
                flat.weight.allocate()
                out = flat.weight.tensor
                self._works.append(flat.store.gather_weights(out, unit=self.label, tag=tag))
        self.residency = Residency.IN_FLIGHT

    def wait(self) -> None:
        """Wait until the weights are whole, if they are in flight."""
        if self.residency is Residency.IN_FLIGHT:
            self._end_unshard()
            if self.stays_shown:
                self.show(in_step=True)

    @span("wait")
    def _end_unshard(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()
        for flat in self._flats:
            flat.point_at_weights()
        self.residency, self.shows = Residency.WHOLE, Shows.GUARD

    def refresh(self, *, only_stepped: bool = False) -> None:
        """Start to bring what is whole up to date with masters: all, or those that are stepped.

        Raises:
            RuntimeError: Masters were changed while they were shown, and are stepped as well.
        """
        has_shown_masters = self.shows is Shows.MASTERS
        if has_shown_masters:
            if self.changed:
                raise RuntimeError(
                    f"Weights of {self.label!r} were changed, and then stepped by an optimizer,"
                    " within one `gathered(...)`. Change them before or after."
                )
            self.hide_masters()
        elif self.residency is Residency.IN_FLIGHT:
            self._end_unshard()
        if self.shows is Shows.WEIGHTS:
            self.guard()
        if self.residency is not Residency.RELEASED:
            self.unshard(only_stepped=only_stepped)
        if has_shown_masters:
            self.show_masters(as_gathered=True)

    def gather_again(self) -> None:
        """Gather for ranks that ask for it, whether the weights are whole here or not."""
        was_shown = self.shows is Shows.WEIGHTS
        self._store_edits()
        self.unshard()
        self._end_unshard()
        if was_shown:
            self.show()

    def pin_if_viewed(self, tensor: Tensor) -> None:
        """Keep the weights whole until the end of the step if ``tensor`` is a view of them."""
        if internals.has_storage(tensor):
            storage = tensor.untyped_storage()._cdata
            own = [flat.weight.tensor.untyped_storage()._cdata for flat in self._flats]
            self.is_pinned |= storage in own

    def reshard(self) -> None:
        """Release whole weights, unless they are replicated, pinned, held by code, or masters."""
        if self.residency is Residency.RELEASED or self.is_pinned or not self.reshards:
            return
        if self.shows is Shows.MASTERS:
            return
        for flat in self._flats:
            if flat.edits.handed_out and flat.edits.is_held:
                self.is_pinned = True
                self.guard()
                return
        self._release(may_be_shared=not torch.is_grad_enabled())

    @span("reshard")
    def _release(self, *, may_be_shared: bool) -> None:
        if self.residency is Residency.IN_FLIGHT:
            self._end_unshard()
        self._store_edits()
        for flat in self._flats:
            flat.release(may_be_shared=may_be_shared)
        self.residency, self.shows = Residency.RELEASED, Shows.GUARD

    def end_step(self) -> None:
        """Release or guard whole weights at the end of a step."""
        # Others may refer to what was whole for longer than its module ran.
        may_be_shared = self.is_pinned or self.stays_shown
        self.is_pinned = self.stays_shown = False
        for flat in self._flats:
            flat.edits.in_step = False
        if self.residency is Residency.RELEASED:
            return
        if self.reshards and self.shows is not Shows.MASTERS:
            self._release(may_be_shared=may_be_shared)
        else:
            self._store_edits()
            if self.shows is Shows.WEIGHTS:
                self.guard()

    def _store_edits(self, flats: Sequence[FlatParameters] | None = None) -> None:
        if self.residency is Residency.WHOLE:
            store_edits(self._flats if flats is None else flats)

    def abandon(self) -> None:
        """End a step that an exception ended, without its edits, which others may not have made."""
        for flat in self._flats:
            flat.is_recorded = False
        if self.residency is Residency.IN_FLIGHT:
            # The ranks waited for may be gone, and their parts with them.
            with contextlib.suppress(RuntimeError):
                for work in self._works:
                    work.wait()
            self._works = []
        if self.residency is not Residency.RELEASED and self.shows is not Shows.MASTERS:
            self._end_unshard()
        self.end_step()

    def retire(self) -> None:
        """Free the weights after the parameters were pointed elsewhere."""
        for flat in self._flats:
            flat.retire()
        self.residency = Residency.RELEASED

    # -- shown while the module runs -------------------------------------------------------------

    def show(self, *, in_step: bool = False) -> None:
        """Make the parameters readable at the weights, which must be whole or in flight.

        With ``in_step``, those that are not cast, throughout a step.
        """
        self.stays_shown |= in_step
        if self.residency is Residency.IN_FLIGHT:
            self._end_unshard()
        if self.shows is Shows.GUARD:
            self.shows = Shows.WEIGHTS
            for flat in self._flats:
                if not (in_step and flat.plan.is_cast):
                    flat.show()
                    flat.edits.in_step |= in_step

    def guard(self) -> None:
        """Send every use of the parameters to their owner until the weights are next shown."""
        for flat in self._flats:
            flat.guard()
        self.shows = Shows.GUARD

    def require_no_pending(self, flats: Sequence[FlatParameters] | None = None) -> None:
        """Raise if a forward would not see changes that a backward pass must not have seen."""
        pending = [flat for flat in flats or self._flats if flat.pending is not None]
        if pending and not internals.in_backward():
            raise RuntimeError(
                f"Parameters of {self.label!r} were changed between a forward pass and its backward"
                " pass, and the module is called again before that. In mixed precision its weights"
                " are cast once for both. Change them after `backward()`, or gather weights in full"
                " precision with ZeROStrategy(cast_weights='none')."
            )

    # -- masters ---------------------------------------------------------------------------------

    @property
    def shown_masters(self) -> list[FlatParameters]:
        """The groups whose masters are shown."""
        return [flat for flat in self._flats if flat.masters is not None]

    @property
    def are_masters_held(self) -> bool:
        """Return whether code or a graph has views of the masters that are shown."""
        return any(flat.masters is not None and flat.masters.are_held for flat in self._flats)

    @property
    def changed(self) -> list[str]:
        """The names of parameters that were changed while `gathered` shows them."""
        return [
            flat.layout.slots[index].name
            for flat in self._flats
            if flat.masters is not None
            for index in flat.masters.changed
        ]

    @runs_outside
    def show_masters(self, *, as_gathered: bool = False, in_step: bool = False) -> None:
        """Show whole masters in place of what is guarded until :meth:`hide_masters`.

        With ``as_gathered`` they are for `gathered`, in place of all: rank 0's changes are stored,
        or none. Otherwise what each rank changes in its own part can be stored, and ``in_step``
        the parameters stay guarded.
        """
        if self.residency is Residency.IN_FLIGHT:
            self._end_unshard()
        is_whole = self.residency is Residency.WHOLE
        shown = [flat for flat in self._flats if as_gathered or flat.is_guarded]
        self._store_edits(shown)
        started = [
            (flat, *flat.gather_masters(self.label, tag, are_whole=is_whole))
            for tag, flat in enumerate(self._flats, self._first_tag)
            if flat in shown
        ]
        for flat, whole, work in started:
            work.wait()
            flat.show_masters(whole, stay_guarded=in_step, are_whole=is_whole)
        self.shows, self.is_gathered = Shows.MASTERS, as_gathered

    @runs_outside
    def hide_masters(self, stored: Sequence[FlatParameters] = ()) -> None:
        """Guard the parameters again; changes that are not stored are lost.

        Whole weights that are cast from ``stored`` changes are gathered anew.
        """
        is_whole = self.residency is Residency.WHOLE
        for tag, flat in enumerate(self._flats, self._first_tag):
            if flat.masters is not None:
                if is_whole and flat in stored and flat.plan.is_cast:
                    out = flat.weight.tensor
                    flat.store.gather_weights(out, unit=self.label, tag=tag).wait()
                flat.hide_masters(are_whole=is_whole)
        self.shows, self.is_gathered = Shows.GUARD, False
        if self.stays_shown and is_whole:
            self.show(in_step=True)

    @runs_outside
    def store_gathered(self) -> None:
        """Make rank 0's gathered values the masters of all ranks; within write access."""
        for flat in self._flats:
            values = flat.gathered_values()
            flat.store.comm.broadcast(values.tensor)
            flat.take_over(values)


def store_edits(flats: Sequence[FlatParameters]) -> None:
    """Copy users' changes of whole weights to the masters, on all ranks."""
    edited = [flat for flat in flats if flat.masters is None and flat.may_be_edited]
    if edited:
        with edited[0].store.comm.write_access(SyncPoint.EDIT):
            for flat in edited:
                flat.store_edits()


_MOST = 2
"""Units whose masters code sees at a time; more only while one operation uses them all."""


class ShownMasters:
    """The units whose whole masters are shown.

    Those that code touches outside of forwards are shown until it touches others. All ranks must
    touch the same units, in the same order, except where whole weights have their masters' values
    (stages 1 and 2 without mixed precision). Those within `gathered` are shown to the end of the
    context, whatever runs in it.

    Attributes:
        is_within_step: Tells whether code that runs now is part of a step.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.is_within_step: Callable[[], bool] = lambda: False
        # The least recently touched one first.
        self._touched: list[Weights] = []

    def touch(self, needed: Sequence[Weights], used: Sequence[Weights]) -> None:
        """Show the ``needed`` among units that are ``used`` together; hide the least recent ones.

        Raises:
            RuntimeError: A gather needs every rank, and other ranks touch other units or none.
        """
        new = [unit for unit in needed if unit.shows is not Shows.MASTERS]
        if new:
            others = [unit for unit in self._touched if unit not in used]
            most = max(_MOST - len(new), 0)
            self._hide(others[: max(len(self._touched) - most, 0)], new, must=False)
            for unit in new:
                unit.show_masters(in_step=self.is_within_step())
        touched = [unit for unit in used if unit in self._touched or unit in new]
        self._touched = [unit for unit in self._touched if unit not in touched] + touched

    @runs_outside
    def hide(self, units: Sequence[Weights] | None = None) -> None:
        """Hide ``units``, or all that code has touched, and keep changes; a collective."""
        hidden = [unit for unit in self._touched if units is None or unit in units]
        if hidden:
            self._hide(hidden)

    def _hide(
        self, units: Sequence[Weights], new: Sequence[Weights] = (), *, must: bool = True
    ) -> None:
        """Hide touched units, unless views of them are alive on any rank and they need not be.

        All ranks agree on that, on what was changed, and that ``new`` ones come.
        """
        flags = {
            unit: [
                not must and unit.are_masters_held,
                *(flat.are_masters_changed for flat in unit.shown_masters),
            ]
            for unit in units
        }
        together = [unit for unit in units if unit.needs_ranks]
        if together or any(unit.needs_ranks for unit in new):
            own = bytes(flag for unit in together for flag in flags[unit])
            what = ", ".join(unit.label for unit in new or units)
            agreed = iter(self._comm.control.call(SyncPoint.TOUCH, own, about=what).wait())
            for unit in together:
                flags[unit] = [next(agreed) > 0 for _ in flags[unit]]
        hidden = [unit for unit in units if not flags[unit][0]]
        changed = [
            (unit, flat)
            for unit in hidden
            for flat, flag in zip(unit.shown_masters, flags[unit][1:], strict=True)
            if flag
        ]
        if of_ranks := [flat for unit, flat in changed if unit.needs_ranks]:
            with self._comm.write_access(SyncPoint.EDIT):
                for flat in of_ranks:
                    flat.store_masters()
        if alone := [flat for unit, flat in changed if not unit.needs_ranks]:
            # No peer reads them between steps.
            self._comm.note_change()
            for flat in alone:
                flat.store_masters()
        for unit in hidden:
            unit.hide_masters(of_ranks)
            self._touched.remove(unit)
            if not self.is_within_step():
                unit.reshard()

    def abandon(self) -> None:
        """Hide what code has touched, without its changes, after an exception."""
        touched, self._touched = self._touched, []
        for unit in touched:
            unit.hide_masters()
