"""A module whose parameters are gathered, released and reduced together.

**Calls.** Torch has no event for the backward of a module. It begins with the first gradient of the
call's outputs, and has ended when all of its inputs have their gradients.

**Weights** are shown while their module runs; at any other time every use is noticed. What autograd
records then computes with the weights, and all other code sees whole **masters**, in a new buffer.
So weights of less precision than the masters exist only within forwards and backward passes.

Weights whose home is replicated (stages 1 and 2) are never released: ``reshard`` leaves them as
they are, and every optimizer step refreshes them. Masters are shown over weights that are released
or whole, and leave those as they are. ``docs/architecture.md`` lists the transitions.

**Gradients** of a unit go the same way in each backward pass::

    expect -> take, take, ... -> reduce -> finish -> install
    expect -> take, take, ... -> keep_own                       (within ``no_sync``)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.comm import SyncPoint
from lightning_zero.engine.hooks import on_grads, on_leaf_grads, with_grad
from lightning_zero.parameters import FlatParameters
from lightning_zero.tensors import Work, internals, runs_outside, span, tensors_in

Call = tuple[int, int]
"""One call of a unit's forward: the unit's index, and a number. No object: a graph holds it."""

_numbers = itertools.count()


class Calls:
    """The calls of a unit's forward, each from its beginning to the end of its backward.

    Args:
        unit: The unit's index.

    Attributes:
        running: The calls whose forward is running, the innermost last.
        awaited: The calls whose inputs' gradients will mark the end of their backward.
        in_backward: The calls whose backward has begun and not ended.
        have_run: Whether this rank used the unit's weights in this step, by a call or otherwise.
        have_graph: Whether a call of this step can get gradients.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self.running: list[Call] = []
        self.awaited: set[Call] = set()
        self.in_backward: set[Call] = set()
        self.have_run = self.have_graph = False

    def begin(self, arguments: Any, ended: Callable[[Call, Any], None]) -> None:
        """Begin a forward, and hook the gradients of the inputs among its ``arguments``.

        ``ended`` is called when these have come, with the call and them, or with ``None`` if all
        inputs are leaves. A leaf may have its gradient before the rest of the call's backward is
        done, so this alone is not the end.
        """
        self.have_run = True
        call = self._unit, next(_numbers)
        self.running.append(call)
        # An object passed from module to module may hold tensors of others, such as the keys and
        # values that a Transformers decoder caches, whose gradients come much later. Tensors inside
        # objects therefore count only if there are no other ones.
        given = tensors_in(arguments, within_objects=False) if arguments else []
        inputs = [tensor for tensor in given if tensor.requires_grad]
        if not inputs and arguments:
            inputs = with_grad(arguments)
        if not inputs or any(map(internals.is_func_wrapper, inputs)):
            return
        self.awaited.add(call)
        inner = [tensor for tensor in inputs if not tensor.is_leaf]
        if inner:
            on_grads(inner, functools.partial(ended, call), "all")
        else:
            # Torch's multi-grad hook does not support leaves in `torch.autograd.grad`.
            on_leaf_grads(inputs, functools.partial(ended, call, None))

    def end(self, outputs: Sequence[Tensor], began: Callable[[Call, Any], None]) -> bool:
        """End the innermost forward; return whether its ``outputs`` can get gradients.

        ``began`` is called with the call at the first of these, in each backward pass.
        """
        call = self.running.pop()
        if any(map(internals.is_func_wrapper, outputs)):
            self.have_graph = True
            return True  # a transform of `torch.func` has backward passes of its own
        tracked = [t for t in outputs if t.requires_grad and t.grad_fn is not None]
        if not tracked:
            return False
        self.have_graph = True
        # A hook on a view is lost when the view is changed in place; one on its base stays.
        for tensor in tuple(tracked):
            base = tensor._base
            if base is not None and base.requires_grad:
                tracked.append(base)
        on_grads(tracked, functools.partial(began, call), "any")
        return True

    def end_pass(self) -> None:
        """End a backward pass: no earlier call is awaited any more."""
        self.awaited, self.in_backward = set(), set()


# -- weights ---------------------------------------------------------------------------------------


class Residency(IntEnum):
    """How far a unit's whole weights are from being read. All but the last guard the parameters."""

    RELEASED = 0
    """Only shards are in memory, and the parameters are placeholders."""
    IN_FLIGHT = 1
    """They are allocated and being filled."""
    WHOLE = 2
    """They are in memory."""
    SHOWN = 3
    """The parameters show them; in the root, those that are not cast from masters."""


class Weights:
    """The whole weights of one unit.

    Facts from the plans are kept in attributes: they are read for each unit in each pass, where a
    call would cost as much as the answer.

    Args:
        first_tag: The tag of the first group's messages; those of the next groups count on.

    Attributes:
        residency: Whether the weights are in memory, and shown.
        has_masters: Whether whole masters are shown over them: to code outside of forwards, which
            may change them, or within `gathered`.
        is_pinned: Whether the weights stay whole until the end of the step.
        stays_shown: Whether the weights are shown throughout the step: those of the root that are
            not cast, and all of a unit that is compiled together with the code around it.
        reshards: Whether they are released after use.
        is_cast: Whether some have less precision than their masters.
        needs_ranks: Whether the masters are gathered from other ranks to be shown.
    """

    def __init__(self, label: str, flats: Sequence[FlatParameters], first_tag: int) -> None:
        self.label = label
        self.reshards = any(flat.plan.reshards for flat in flats)
        self.residency = Residency.RELEASED if self.reshards else Residency.WHOLE
        self.has_masters = self.is_pinned = self.stays_shown = False
        self.is_cast = any(flat.plan.is_cast for flat in flats)
        self.needs_ranks = self.reshards or self.is_cast
        self._flats = flats
        self._first_tag = first_tag
        self._works: list[Work] = []

    @property
    def rests(self) -> bool:
        """Return whether a use of the parameters needs a gather."""
        return self.residency is Residency.RELEASED and not self.has_masters

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
        self.residency = Residency.WHOLE

    def refresh(self, *, only_stepped: bool = False) -> None:
        """Start to bring what is whole up to date with masters: all, or those that are stepped.

        Raises:
            RuntimeError: Masters were changed while they were shown, and are stepped as well.
        """
        had_masters = self.has_masters
        if had_masters:
            if self.changed:
                raise RuntimeError(
                    f"Weights of {self.label!r} were changed, and then stepped by an optimizer,"
                    " within one `gathered(...)`. Change them before or after."
                )
            self.hide_masters()
        elif self.residency is Residency.IN_FLIGHT:
            self._end_unshard()
        if self.residency is Residency.SHOWN:
            self.guard()
        if self.residency is not Residency.RELEASED:
            self.unshard(only_stepped=only_stepped)
        if had_masters:
            self.show_masters(as_gathered=True)

    def pin_if_viewed(self, tensor: Tensor) -> None:
        """Keep the weights whole until the end of the step if ``tensor`` is a view of them."""
        if internals.has_storage(tensor):
            storage = tensor.untyped_storage()._cdata
            for flat in self._flats:
                self.is_pinned |= flat.weight.tensor.untyped_storage()._cdata == storage

    def reshard(self) -> None:
        """Release whole weights, unless they are replicated, pinned, held by code, or masters."""
        is_kept = self.is_pinned or self.has_masters or not self.reshards
        if is_kept or self.residency is Residency.RELEASED:
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
        store_edits(self._flats)
        for flat in self._flats:
            flat.release(may_be_shared=may_be_shared)
        self.residency = Residency.RELEASED

    def end_step(self) -> None:
        """Release or guard whole weights at the end of a step."""
        # Others may refer to what was whole for longer than its module ran.
        may_be_shared = self.is_pinned or self.stays_shown
        self.is_pinned = self.stays_shown = False
        for flat in self._flats:
            flat.edits.in_step = False
        if self.residency is Residency.RELEASED:
            return
        if self.reshards and not self.has_masters:
            self._release(may_be_shared=may_be_shared)
        elif self.residency >= Residency.WHOLE:
            store_edits(self._flats)
            self.guard()

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
        if self.residency is not Residency.RELEASED and not self.has_masters:
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
        if self.residency is Residency.WHOLE:
            self.residency = Residency.SHOWN
            for flat in self._flats:
                if flat.masters is None and not (in_step and flat.plan.is_cast):
                    flat.guard(guarded=False)
                    flat.edits.in_step |= in_step

    def guard(self) -> None:
        """Send every use of the parameters to their owner until the weights are next shown."""
        if self.residency is Residency.SHOWN:
            self.residency = Residency.WHOLE
            for flat in self._flats:
                if flat.masters is None:
                    flat.guard()

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
    def changed(self) -> list[str]:
        """The names of parameters that were changed while `gathered` shows them."""
        shown = [(flat, flat.masters) for flat in self._flats if flat.masters is not None]
        return [flat.layout.slots[i].name for flat, masters in shown for i in masters.changed]

    @runs_outside
    def show_masters(self, *, as_gathered: bool = False, in_step: bool = False) -> None:
        """Show whole masters in place of what is guarded until :meth:`hide_masters`.

        With ``as_gathered`` they are for `gathered`, in place of all: rank 0's changes are stored,
        or none. Otherwise what each rank changes in its own part can be stored, and ``in_step``
        the parameters stay guarded.
        """
        if self.residency is Residency.IN_FLIGHT:
            self._end_unshard()
        is_whole = self.residency >= Residency.WHOLE
        shown = [flat for flat in self._flats if as_gathered or flat.is_guarded]
        if is_whole:
            store_edits(shown)
        started = [
            (flat, *flat.gather_masters(self.label, tag, are_whole=is_whole))
            for tag, flat in enumerate(self._flats, self._first_tag)
            if flat in shown
        ]
        for flat, whole, work in started:
            work.wait()
            flat.show_masters(whole, stay_guarded=in_step, are_whole=is_whole)
        self.has_masters = True

    @runs_outside
    def hide_masters(self, stored: Sequence[FlatParameters] = ()) -> None:
        """Show what was shown before; changes that are not stored are lost.

        Whole weights that are cast from ``stored`` changes are gathered anew.
        """
        is_whole, was_shown = self.residency >= Residency.WHOLE, self.residency is Residency.SHOWN
        for tag, flat in enumerate(self._flats, self._first_tag):
            if flat.masters is not None:
                if is_whole and flat in stored and flat.plan.is_cast:
                    out = flat.weight.tensor
                    flat.store.gather_weights(out, unit=self.label, tag=tag).wait()
                flat.hide_masters(are_whole=is_whole)
        self.has_masters = False
        if is_whole and (was_shown or self.stays_shown):
            self.residency = Residency.WHOLE
            self.show(in_step=self.stays_shown)

    @runs_outside
    def store_gathered(self) -> None:
        """Make rank 0's gathered values the masters of all ranks; within write access."""
        for flat in self._flats:
            values = flat.gathered_values()
            flat.store.comm.broadcast(values.tensor)
            flat.changed_master().copy_(flat.store.own(values.tensor))


def store_edits(flats: Sequence[FlatParameters]) -> None:
    """Copy users' changes of whole weights to the masters, on all ranks."""
    edited = [flat for flat in flats if flat.masters is None and flat.may_be_edited]
    if edited:
        with edited[0].store.comm.write_access(SyncPoint.EDIT):
            for flat in edited:
                flat.store_edits()


# -- units -----------------------------------------------------------------------------------------

_MAX_GROUPS = 16
"""The most groups of parameters that a unit can have, and so the tags reserved for each unit."""


class Unit:
    """One module, with the weights and gradients of its parameters and the calls of its forward.

    Attributes:
        name: The module's qualified name; the root's is ``""``.
        module: The module whose forward the unit serves.
        flat_parameters: Its parameters, by dtype and trainability.
        index: Its number; the root's is the last.
        label: The name to show.
        parameters: Its parameters; callers refer to one by its index here.
        weights: Its whole weights.
        calls: The calls of its forward.
        is_inlined: Whether it was compiled into a larger graph, which needs its weights whole when
            a step begins.
        wants: For each parameter, whether it wants a gradient in this backward pass.
        announced: For each parameter, whether autograd has announced a gradient in this pass.
        are_complete: Whether all announced gradients have come in this backward pass, or those of
            all that want one if the unit ran without a graph: checkpointing may run it again.
    """

    def __init__(
        self, name: str, module: nn.Module, flats: Sequence[FlatParameters], index: int
    ) -> None:
        self.name = name
        self.module = module
        self.flat_parameters = list(flats)
        self.index = index
        self.label = name or "root"
        self.parameters = [parameter for flat in flats for parameter in flat.parameters]
        self._first_tag = _MAX_GROUPS * index + 1
        self.weights = Weights(self.label, self.flat_parameters, self._first_tag)
        self.calls = Calls(index)
        self.is_inlined = False
        self.wants: list[bool] = []
        self.announced: Sequence[bool] = []
        self.are_complete = True
        self._places = [(f.gradients, place) for f in flats for place in range(len(f.pieces))]
        self._missing: set[int] = set()
        self._finishes: list[Callable[..., None]] = []

    @property
    def numel(self) -> int:
        """Number of elements of the parameters."""
        slots = [slot for flat in self.flat_parameters for slot in flat.layout.slots]
        return sum(slot.numel for slot in slots)

    @property
    def will_reshard(self) -> bool:
        """Return whether the end of the unit's backward is to come, and will release weights."""
        weights = self.weights
        is_there = weights.residency is not Residency.RELEASED and bool(self.calls.awaited)
        return is_there and weights.reshards and not weights.is_pinned

    def inline(self) -> bool:
        """Return whether a compiled graph may contain the unit: its weights are whole beforehand.

        Torch's compiler traces this, and replays its side effects whenever the graph runs.
        """
        weights = self.weights
        if weights.residency is not Residency.SHOWN or weights.has_masters or weights.is_cast:
            return False
        self.is_inlined = True
        self.calls.have_run = True
        return True

    # -- gradients -------------------------------------------------------------------------------

    def expect(self, announced: Sequence[bool], *, sends: bool) -> None:
        """Begin to take the gradients of a backward pass, which averages them if it ``sends``."""
        self.announced, self.wants, rest = announced, [], iter(announced)
        for flat in self.flat_parameters:
            own = list(itertools.islice(rest, len(flat.parameters)))
            flat.gradients.expect(own, sends=sends)
            self.wants += flat.gradients.wants
        runs_again = self.calls.have_run and not self.calls.have_graph and True not in announced
        awaited = self.wants if runs_again else announced
        self._missing = set(itertools.compress(itertools.count(), awaited))
        self.are_complete = not self._missing

    def take(self, index: int) -> bool:
        """Take the gradient that autograd just finished; return whether it was the last one."""
        gradients, place = self._places[index]
        gradients.take(place, self.parameters[index])
        self._missing.discard(index)
        self.are_complete = not self._missing
        return self.are_complete

    @span("reduce")
    def reduce(self) -> None:
        """Start to average the arrived gradients over the ranks."""
        if self._finishes:
            self.finish()
        for tag, flat in enumerate(self.flat_parameters, self._first_tag):
            if True in flat.gradients.wants:
                self._finishes.append(flat.gradients.reduce(self.label, tag))

    @span("finish_reduce")
    def finish(self) -> None:
        """Finish the reductions that were started."""
        finishes, self._finishes = self._finishes, []
        for finish in finishes:
            finish()

    def abandon(self) -> None:
        """Drop what is under way, including weights and gradients in flight."""
        self.calls.running = []
        self.calls.end_pass()
        self.weights.abandon()
        finishes, self._finishes = self._finishes, []
        # The ranks waited for may be gone, and their gradients with them.
        with contextlib.suppress(RuntimeError):
            for finish in finishes:
                finish(is_wanted=False)
        for flat in self.flat_parameters:
            flat.gradients.abandon()
