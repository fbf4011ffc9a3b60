"""The backward half of a step: its weights, its gradients, and its end.

All ranks reduce gradients in one order, whatever each of them computes. A rank waits for a unit's
reduction before it starts that of the next, so that whole gradients of at most two units are in
memory. Waiting is safe only if every rank reduces the same units in the same order: two ranks that
reduced what is ready, one expert here and another there, would wait for each other forever. So each
backward pass has **turns**, the same on all ranks:

1. The order is the reverse of that in which rank 0 first ran the units. Units that it did not run
   come after these, and the root last.
2. A unit has a turn if it wants gradients and any rank ran it in this step.
3. When a unit's turn comes, a rank reduces it if its gradients are all there, if its backward is
   over, or if this rank never ran it (it sends zeros). Otherwise the turn waits.
4. At the end of the backward pass, the remaining turns are taken. Then units are reduced again for
   which a gradient came after their turn on any rank.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zero.comm import PendingSync, SyncPoint
from lightning_zero.engine.rank_check import ChangeCheck, require_equal_gradients
from lightning_zero.engine.schedule import Prefetcher
from lightning_zero.engine.sharded_model import ShardedModel
from lightning_zero.engine.unit import Call, Events, Unit, on_grads, too_late, weakly
from lightning_zero.engine.weights import Residency
from lightning_zero.tensors import internals, outside, runs_outside


class ReductionOrder:
    """The reductions of a backward pass, in one order on all ranks."""

    def __init__(self, sharded: ShardedModel) -> None:
        self._units = units = sharded.units
        self._flats = sharded.flats
        self._control = sharded.comm.control
        num_parameters = sum(len(unit.parameters) for unit in units)
        self._control.reserve(len(units) + max(num_parameters, ChangeCheck.NUM_FLAGS))
        self._change_check = ChangeCheck(sharded)
        self._order: list[Unit] | None = None
        self._left: list[Unit] | None = None
        # At most one reduction and, behind it, one sum over the copies.
        self._under_way: list[Unit] = []
        self._has_copies = sharded.comm.mesh.replicate.size > 1
        self._work: PendingSync | None = None

    def begin(self, forward_order: Iterable[int]) -> None:
        """Begin a backward pass, and start to exchange which units each rank ran.

        Rank 0's first ``forward_order`` sets the order of reductions.
        """
        if self._order is None:
            ran = [index for index in dict.fromkeys(forward_order) if index < len(self._units) - 1]
            agreed = self._control.broadcast_object(ran)
            rest = [unit.index for unit in self._units[:-1] if unit.index not in agreed]
            # The root runs from beginning to end.
            self._order = [self._units[index] for index in (*reversed(agreed), *reversed(rest), -1)]
        self._left = None
        have_run = [unit.calls.have_run for unit in self._units]
        have_run[-1] = True
        flags = [*self._change_check.flags(), *have_run]
        self._work = self._control.call(SyncPoint.BEGIN, bytes(flags))
        if self._change_check.has_frozen:
            self._turns_left()  # now: this rank may have no gradients that would ask for it

    def advance(self) -> None:
        """Start the reductions whose turn has come."""
        left = self._left if self._left is not None else self._turns_left()
        while left and (left[0].are_complete or self._is_over(left[0])):
            self._reduce(left.pop(0))

    def _is_over(self, unit: Unit) -> bool:
        """Return whether no further gradient of ``unit`` is expected, though some are missing."""
        return unit is not self._units[-1] and (unit.calls.have_passed or not unit.calls.have_run)

    def _turns_left(self) -> list[Unit]:
        if self._left is None:
            assert self._order is not None
            assert self._work is not None
            maxima = self._work.wait()
            has_turn = maxima[ChangeCheck.NUM_FLAGS :]
            self._change_check.compare(maxima[: ChangeCheck.NUM_FLAGS])
            self._left = [
                unit for unit in self._order if has_turn[unit.index] and True in unit.wants
            ]
        return self._left

    def _reduce(self, unit: Unit) -> None:
        # One reduction overlaps with the next unit's backward, as does one sum over the copies; two
        # would only hold memory.
        if self._under_way:
            self._under_way[-1].finish()
            if self._has_copies and len(self._under_way) > 1:
                for flat in self._under_way[0].flat_parameters:
                    flat.gradients.wait_for_copies()
        self._under_way = [*self._under_way[-1:], unit]
        unit.reduce()

    def finish(self) -> None:
        """Take the remaining turns and show the gradients to the optimizer.

        A parameter that no rank used gets no gradient, as in a plain loop.
        """
        left = self._turns_left()
        while left:
            self._reduce(left.pop(0))
        flags = bytearray(len(self._units))
        for unit in self._units:
            for flat in unit.flat_parameters:
                flags[unit.index] |= flat.gradients.is_pending
                flags += bytes(flat.gradients.has_grads)
        agreed = list(map(bool, self._control.call(SyncPoint.END, bytes(flags)).wait()))
        for unit in self._units:
            if agreed[unit.index]:
                self._reduce(unit)
        for unit in self._under_way[-1:]:
            unit.finish()
            # Behind all others: a host that waits for offloaded gradients waits once.
            for flat in reversed(unit.flat_parameters):
                flat.gradients.wait()
        self._under_way = []
        held = iter(agreed[len(self._units) :])
        for flat in self._flats:
            flat.gradients.install(list(itertools.islice(held, len(flat.parameters))))

    def abandon(self) -> None:
        """Drop a backward pass that an exception ended."""
        # Not waited for: the others may be gone, or be waiting for this rank.
        self._under_way, self._left, self._work = [], None, None


# -- the events ------------------------------------------------------------------------------------


class Phase(Enum):
    """A rank's place in a step."""

    IDLE = "idle"
    """Between steps: ranks may run different code."""
    FORWARD = "forward"
    """Within a step, before its backward pass or between two passes."""
    AWAITS_BACKWARD = "awaits backward"
    """The forward has ended and left a graph; the root's weights stay whole."""
    BACKWARD = "backward"
    """Autograd is running."""


class Phases(Protocol):
    """The step that a backward pass belongs to, a ``Step``, as far as the pass uses it."""

    phase: Phase
    is_closed: bool

    def begin_backward(self) -> None:
        """Note that autograd has started."""

    def end_backward(self) -> bool:
        """Note that autograd has ended; return whether the step ends with it."""

    def close(self) -> None:
        """End the step, if one is under way that no graph needs any more."""


class Backward:
    """Handles the events of backward passes: unshards, reduces and reshards.

    Attributes:
        events: The handlers of a call's backward events, safe for graphs to hold.
        syncs: Whether this microbatch's gradients are to be sent: ``False`` within ``no_sync``.
    """

    def __init__(self, sharded: ShardedModel, step: Phases, prefetcher: Prefetcher) -> None:
        self._sharded = sharded
        self._units = sharded.units
        self._step = step
        self._prefetcher = prefetcher
        self._order = ReductionOrder(sharded)
        self.syncs = True
        # Whether gradients have been compared within tensor-parallel groups, once.
        self._is_compared = sharded.comm.mesh.tensor is None
        self._always_reduces = any(flat.plan.reduces_every_microbatch for flat in sharded.flats)
        # The end of the current pass; autograd holds it, and drops it after an exception.
        self._pass: Callable[[], object] = lambda: None
        # Whether it has gradients of parameters, and reduces them.
        self._takes = self._reduces = False
        self.events = Events(
            began=weakly(self._on_outputs_grad),
            ended=weakly(self._on_inputs_grad),
            leaves_done=weakly(self._on_leaf_inputs_grad),
        )
        self._on_step_grad = weakly(self._on_held_grad)

    # -- begin -----------------------------------------------------------------------------------

    def unshard_before(self, outputs: Sequence[Tensor]) -> None:
        """Unshard the root and pinned units when a backward pass from a step's ``outputs`` begins.

        No other event announces their backward. The first pass finds them whole, but a second one
        over the same graph comes after the step has ended.
        """
        if any(map(internals.is_func_wrapper, outputs)):
            return
        pinned = [unit.index for unit in self._units if unit.weights.is_pinned]
        held = [len(self._units) - 1, *pinned]
        on_grads(outputs, functools.partial(self._on_step_grad, held), "any")

    def _on_held_grad(self, indices: Iterable[int], _: Tensor) -> None:
        """Begin the pass and unshard units, if not done; cheap, as each child causes this event."""
        if self._pass() is not None:
            for index in indices:
                if self._units[index].weights.residency is not Residency.WHOLE:
                    break
            else:
                return
        self._unshard_again(indices)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _unshard_again(self, indices: Iterable[int]) -> None:
        self.begin()
        weights = [self._units[index].weights for index in indices]
        for each in weights:
            if each.rests:
                each.unshard()
        for each in weights:
            each.wait()

    def begin(self) -> None:
        """Begin a backward pass, unless one is running."""
        if self._pass() is not None:
            return
        if self._step.is_closed:
            raise too_late()
        if self._prefetcher.is_joined:
            raise RuntimeError(
                "A backward pass began within `lightning_zero.join`, where ranks may run different"
                " units. Gradients can be averaged only if all ranks run the same units. Call"
                " `backward()` outside of the context."
            )
        self._sharded.shown.hide()
        self._step.begin_backward()
        self._prefetcher.last_backward = None
        self._takes = self._reduces = False
        for unit in self._units:
            unit.are_complete = False
        finish = functools.partial(self._finish)
        self._pass = weakref.ref(finish)
        internals.queue_callback(finish)

    def _begin_gradients(self) -> None:
        """Begin to take gradients, at the first one: a pass of `autograd.grad` has none."""
        self.begin()
        self._takes = True
        self._reduces = self.syncs or self._always_reduces
        with internals.as_plain_tensors():
            for unit in self._units:
                unit.expect(sends=self._reduces)
        if self._reduces:
            self._order.begin(self._prefetcher.units_in_forward())

    # -- units -----------------------------------------------------------------------------------

    def _on_outputs_grad(self, call: Call, _: Any) -> None:
        """Make a unit whole for its backward."""
        unit = self._units[call[0]]
        self.begin()
        unit.calls.in_backward.add(call)
        self._prefetcher.need(unit, is_backward=True)
        if torch.is_grad_enabled():
            # create_graph: the graph of this backward saves the weights, and no event announces
            # the backward of that graph.
            unit.weights.is_pinned = True

    def _on_inputs_grad(self, call: Call, _: Any = None) -> None:
        """Reshard a unit after its backward."""
        unit = self._units[call[0]]
        if call in unit.calls.running:
            return  # its forward is still running, and computes gradients of its own inputs
        unit.calls.end_backward(call)
        if self._reduces and not unit.are_complete:
            self._order.advance()
        # A unit called on its own output begins the backward of one call before another's ends.
        if not unit.calls.in_backward:
            unit.weights.reshard()
        if self._step.phase is Phase.BACKWARD:
            self._prefetcher.prefetch()

    def _on_leaf_inputs_grad(self, call: Call) -> None:
        """End the backward of a call whose inputs are leaves, if the unit's gradients are there."""
        unit = self._units[call[0]]
        unit.calls.end_backward(call, is_certain=False)
        if unit.are_complete and not unit.calls.awaited:
            self._on_inputs_grad(call)

    def on_grad(self, unit: Unit, index: int, _: Tensor) -> None:
        """Take a parameter's gradient; the last one of a unit may start its reduction."""
        with internals.as_plain_tensors():
            if not unit.parameters[index].requires_grad:
                return  # frozen since its forward: torch calls the hook without a gradient
        if not self._takes or self._pass() is None:
            is_outside = self._step.phase is Phase.IDLE
            if is_outside and unit.weights.needs_ranks and not unit.weights.is_gathered:
                raise RuntimeError(
                    "A backward pass goes through values that code between steps computed from the"
                    f" weights of {unit.label!r}, which are no longer in memory. Compute the values"
                    " in `training_step`, or compute them and call `backward()` within one"
                    " `with lightning_zero.gathered(module):` on all ranks."
                )
            self._begin_gradients()
        if not unit.take(index):
            return
        if self._reduces:
            if internals.function_modes() or internals.dispatch_modes():
                with outside():
                    self._order.advance()
            else:
                self._order.advance()
        # A frozen weight may still be needed for gradients of earlier modules.
        is_done = False not in unit.wants and not unit.calls.awaited
        if is_done and unit is not self._units[-1]:
            unit.weights.reshard()

    # -- end -------------------------------------------------------------------------------------

    @runs_outside
    def _finish(self) -> None:
        """End a backward pass: reduce late gradients, wait, and reshard what is still whole."""
        if self._reduces:
            self._order.finish()
            if not self._is_compared and self.syncs:
                self._is_compared = True
                require_equal_gradients(self._sharded.pieces, self._sharded.comm)
        elif self._takes:
            for flat in self._sharded.flats:
                flat.gradients.keep_own()
        self._pass = lambda: None
        ends_step = self._step.end_backward()
        for transport in self._sharded.comm.transports.values():
            transport.release_scratch()
        self._sharded.comm.host_copies.release_sources()
        for unit in self._units:
            unit.calls.end_pass()
        for flat in self._sharded.flats:
            flat.is_recorded = False
        self._sharded.store_pending()
        if ends_step:
            self._step.close()
            return
        for unit in self._units[:-1]:
            unit.weights.reshard()

    def abandon(self) -> None:
        """Drop a backward pass that an exception ended."""
        self._pass = lambda: None
        self._takes = self._reduces = False
        self._order.abandon()
