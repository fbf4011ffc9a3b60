"""The step that all ranks go through together: calls of its modules, backward passes, and its end.

A step begins with a forward and ends with its backward pass, or at once if the outputs require no
gradient. A backward pass may also begin within a forward (manual optimization), or between steps:
again over a graph whose step has ended. When a step ends, all units are resharded.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.comm import Pending, SyncPoint
from lightning_zero.engine.hooks import hook_calls, on_grads, too_late, weakly, with_grad
from lightning_zero.engine.rank_check import require_equal_gradients
from lightning_zero.engine.reductions import ReductionOrder
from lightning_zero.engine.schedule import Prefetcher
from lightning_zero.engine.sharded_model import ShardedModel
from lightning_zero.engine.unit import Call, Residency, Unit, Weights
from lightning_zero.parameters import hook_last
from lightning_zero.plan import check_parameter
from lightning_zero.tensors import internals, runs_outside, tensors_in


class Step:
    """The life of a step: gathers what its forwards need, and releases what ends with it.

    Attributes:
        backward: Its backward passes.
        prefetcher: The gathers of its units.
        handles: The handles of all hooks.
        is_open: Whether a step is under way: code that runs now is part of it, on all ranks.
        is_inside: Whether a forward or the step's own context is running: a flag beside the depth,
            as torch's compiler would recompile for every depth that it reads.
        keeps_graph: Whether a backward pass with ``create_graph`` saved weights for a later one.
        is_interrupted: Whether an exception ended the last step on this rank, perhaps here only.
        is_closed: Whether the run has ended; the parameters may still rest.
        is_torn: Whether a load of values ended half-way, and not all were loaded since.
        order_check: The comparison of what the ranks gathered in the last forward without
            gradients. Waiting for it raises a ``RuntimeError`` if they gathered different weights.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded, self._root = sharded, sharded.root
        self.prefetcher = Prefetcher(sharded)
        self.backward = Backward(sharded, self, self.prefetcher)
        self.handles: list[Any] = []
        self.is_open = self.is_inside = self.keeps_graph = False
        self.is_interrupted = self.is_closed = self.is_torn = False
        self._depth = 0
        # Only the order of gathers may tell one unit's weights from another's. A backward pass has
        # sync points of its own, which find the same differences.
        in_order = sharded.comm.transport.gathers_in_order
        self._checks_order = sharded.reshards and in_order
        self.order_check: Pending = Pending()
        # Whether a call of the module itself has entered the step and must leave it.
        self._is_called = False
        sharded.compute = self._compute
        sharded.is_within_step = lambda: self.is_open
        self._hook_modules()
        self._hook_gradients()

    def _hook_modules(self) -> None:
        """Hook the modules of all units, and those that hold weights of the root."""
        inner, root, module = self._sharded.units[:-1], self._root, self._sharded.module
        for unit in inner:
            releases = unit.weights.reshards
            may_skip = None if releases else unit.inline
            self.handles += hook_calls(
                unit.module,
                functools.partial(self._before_unit, unit),
                functools.partial(self._after_unit, unit),
                (may_skip, may_skip),
                releases=releases,
                with_kwargs=True,
            )
        # Children too: a hook may call `self.net(x)`, and the root may hold some of its weights.
        # Children without parameters, such as metrics, need no hooks.
        hooked, releases = {id(unit.module) for unit in inner}, root.weights.reshards
        children = [child for child in module.children() if [*child.parameters()]]
        for child in (module, *(child for child in children if id(child) not in hooked)):
            is_root = child is module
            skips = (self._skips_enter, self._skips_leave) if is_root else (root.inline,) * 2
            self.handles += hook_calls(
                child, self._before_root, self._after_root, skips, releases=releases
            )
        # Weights of the root that are cast are shown only while a module that holds them runs.
        cast = {
            id(parameter): (flat, parameter, *classes)
            for flat in root.flat_parameters
            if flat.plan.is_cast
            for parameter, classes in zip(flat.parameters, flat.classes, strict=True)
        }
        for child in module.modules():
            held = [cast[id(p)] for p in child._parameters.values() if id(p) in cast]
            if held:
                before = functools.partial(self._before_holder, held)
                after = functools.partial(self._after_holder, held)
                self.handles += hook_calls(child, before, after)

    def _hook_gradients(self) -> None:
        """Hook the gradients of all parameters that have or may get one."""
        for unit in self._sharded.units:
            for index, parameter in enumerate(unit.parameters):
                if parameter.dtype.is_floating_point or parameter.dtype.is_complex:
                    on_grad = functools.partial(self.backward.on_grad, unit, index)
                    self.handles.append(hook_last(parameter, on_grad))

    # -- the forward -----------------------------------------------------------------------------

    def enter(self) -> bool:
        """Enter a forward, and begin a step unless one is under way; return whether it began."""
        if self.is_torn:
            self.require_whole()
        if self.backward.is_running and not internals.in_backward():
            # An exception ended the backward pass, for which autograd has no event.
            self.reset()
        self._depth += 1
        self.is_inside = True
        if begins := self._depth == 1 and not self.backward.is_running:
            self._begin()
        return begins

    def require_whole(self) -> None:
        """Raise a ``RuntimeError`` if the module's values are partly old and partly new."""
        if self.is_torn:
            raise RuntimeError(
                "A load of weights or optimizer states has failed half-way, so the module mixes old"
                " and new values. Load a checkpoint that is intact before you train, predict or"
                " save."
            )

    def _begin(self) -> None:
        self.is_interrupted = False
        self.order_check.wait()
        for name, parameter in self._sharded.replicated.items():
            check_parameter(name, parameter)  # it may not be trained from now on
        self._sharded.hide()
        self._sharded.store_pending()
        self.close()
        self.is_open = True
        units = self._sharded.units
        for unit in units:
            unit.calls.have_run, unit.calls.have_graph = unit is self._root, False
        self.prefetcher.begin_step(with_grad=torch.is_grad_enabled())
        self.prefetcher.unshard(self._root)
        self.prefetcher.prefetch()
        for unit in units[:-1]:
            weights = unit.weights
            # Those that are whole already, so that torch's compiler can inline their units.
            is_there = weights.residency >= Residency.WHOLE and not weights.needs_ranks
            if is_there or unit.is_inlined:
                weights.show(in_step=True)
        self._root.weights.show(in_step=True)

    def leave(self, outputs: Any, *, is_of_unit: bool = False) -> None:
        """Leave a forward, and await a backward from its ``outputs``; after the outermost, or end.

        Within others, a forward that ``is_of_unit`` has hooks of its own on them.
        """
        self._depth = max(self._depth - 1, 0)
        self.is_inside = self._depth > 0
        if self.is_inside or self.backward.is_running:
            # The user may keep the outputs until after the step, or even the run.
            if not is_of_unit and self._root.weights.reshards and not internals.in_backward():
                self.backward.may_follow(outputs)
        elif not self.backward.may_follow(outputs):
            self.close()
            if self._checks_order and not self.prefetcher.asks:
                self.order_check.wait()
                self.order_check = self._sharded.comm.control.call(SyncPoint.FORWARD)

    @property
    def sends(self) -> bool:
        """Return whether gradients of a forward or backward pass that runs now are to be sent."""
        return torch.is_grad_enabled() and self.backward.syncs

    def _compute(self, units: Sequence[Unit], *, computes: bool) -> bool:
        """Make units whole until the end of the step for a use outside of their forwards.

        Returns ``False``, so that the use sees masters, unless it ``computes`` with weights in a
        step, or is of a backward pass.
        """
        is_backward = self.backward.is_running
        if not self.is_open or not (computes or is_backward):
            return False
        for unit in units:
            self.prefetcher.unshard(unit)
        for unit in units:
            # A forward that is run again for a unit's backward calls no hooks; the unit is released
            # after its backward, like any other.
            if is_backward and computes and unit.calls.in_backward:
                unit.weights.show()
                continue
            unit.weights.is_pinned = unit.calls.have_run = True
            unit.weights.wait()
            if is_backward and not computes:
                for flat in unit.flat_parameters:
                    flat.edits.is_exposed = True
        return True

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End the step, if one is under way that no graph needs any more."""
        if self.is_open and not self.keeps_graph:
            self.is_open = self.is_inside or self.backward.is_running
            for unit in self._sharded.units:
                unit.weights.end_step()

    def reset(self) -> None:
        """Drop a step that an exception ended, so that the next one starts clean."""
        self._depth = 0
        self.is_open = self.is_inside = self.keeps_graph = self._is_called = False
        self.is_interrupted = True
        self.order_check = Pending()
        self.backward.abandon()
        self.prefetcher.abandon()
        self._sharded.abandon()
        self._sharded.comm.host_copies.abandon()
        for transport in self._sharded.comm.transports.values():
            transport.release_scratch()

    # -- calls of modules ------------------------------------------------------------------------

    def _before_root(self, module: nn.Module, args: Any) -> None:
        """Enter a call of the module, or of a child whose weights the root holds."""
        self.enter()
        self._is_called |= module is self._sharded.module

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        self._is_called &= module is not self._sharded.module
        self.leave(output)

    def _skips_enter(self) -> bool:
        """Return whether a compiled graph may skip `_before_root`: a step was entered."""
        return self.is_inside and self._root.inline()

    def _skips_leave(self) -> bool:
        """Return whether a compiled graph may skip `_after_root`: it skipped the entry too."""
        return not self._is_called and self._root.inline()

    def _before_holder(self, held: Sequence[Any], module: nn.Module, args: Any) -> None:
        """Show weights of the root that a module holds."""
        weights = self._root.weights
        if not self.is_open:
            return
        self.prefetcher.unshard(self._root)
        if weights.has_masters:
            return  # `gathered` shows them
        weights.wait()
        weights.require_no_pending([flat for flat, *_ in held])
        for _, parameter, _, readable in held:
            parameter.__class__ = readable

    def _after_holder(self, held: Sequence[Any], module: nn.Module, args: Any, output: Any) -> None:
        """Guard the weights that `_before_holder` has shown."""
        if not self._root.weights.has_masters:
            for _, parameter, guarded, _ in held:
                parameter.__class__ = guarded
        if torch.is_grad_enabled() and with_grad(output):
            for flat, *_ in held:
                flat.is_recorded = True

    def _before_unit(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Make a unit whole for its forward, and hook the end of its backward."""
        # A forward within a backward pass is a recomputation.
        is_recompute = internals.in_backward()
        if is_recompute:
            self.backward.begin()
        else:
            self.enter()
        is_tracked = torch.is_grad_enabled()
        arguments = [*args, *kwargs.values()] if is_tracked else ()
        unit.calls.begin(arguments, self.backward.ended)
        self.prefetcher.need(unit, is_backward=is_recompute)
        if unit.weights.is_cast:
            unit.weights.require_no_pending()
        if unit.weights.residency is not Residency.SHOWN:
            unit.weights.show()

    def _after_unit(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        """Reshard a unit, unless it is needed next, and hook the beginning of its backward."""
        outputs = tensors_in(output)
        tracked = outputs if torch.is_grad_enabled() else ()
        wants_grad = unit.calls.end(tracked, self.backward.began)
        if internals.in_backward():
            return
        weights = unit.weights
        if wants_grad and weights.is_cast:
            for flat in unit.flat_parameters:
                flat.is_recorded = True
        if weights.reshards:
            for tensor in outputs:
                # The module may have returned a view of its weights, which outlives the call.
                weights.pin_if_viewed(tensor)
            stays = wants_grad and not self._sharded.settings.reshard_after_forward
            if not (stays or self.prefetcher.comes_next(unit)):
                weights.reshard()
        is_shown = weights.residency is Residency.SHOWN and not weights.stays_shown
        if is_shown and weights.needs_ranks:
            weights.guard()
        self.leave(output, is_of_unit=True)


# -- backward passes -----------------------------------------------------------------------------


class Backward:
    """Handles the events of backward passes: unshards, reduces and reshards.

    Attributes:
        began: Makes a unit whole for the backward of a call; graphs may hold it.
        ended: Reshards a unit after the backward of a call; graphs may hold it.
        is_running: Whether a pass has begun and not ended; an exception may have ended it unseen.
        syncs: Whether this microbatch's gradients are to be sent: ``False`` within ``no_sync``.
    """

    def __init__(self, sharded: ShardedModel, step: Step, prefetcher: Prefetcher) -> None:
        self._sharded = sharded
        self._units = sharded.units
        self._parameters = [p for unit in sharded.units for p in unit.parameters]
        self._step = step
        self._prefetcher = prefetcher
        self._order = ReductionOrder(sharded)
        self.is_running, self.syncs = False, True
        # Whether gradients have been compared within tensor-parallel groups, once.
        self._is_compared = sharded.comm.mesh.tensor is None
        self._always_reduces = any(flat.plan.reduces_every_microbatch for flat in sharded.flats)
        # The end of the current pass; autograd holds it, and drops it after an exception.
        self._pass: Callable[[], object] = lambda: None
        # Whether it has gradients of parameters, and reduces them.
        self._takes = self._reduces = False
        self.began, self.ended = weakly(self._on_outputs_grad), weakly(self._on_inputs_grad)
        self._on_step_grad = weakly(self._on_held_grad)

    # -- begin -----------------------------------------------------------------------------------

    def may_follow(self, outputs: Any) -> bool:
        """Return whether a pass may begin from a step's ``outputs``; if so, hook its beginning.

        It then needs the root and pinned units, whose backward no other event announces. The first
        pass finds them whole, but a second one over the same graph comes after the step has ended.
        """
        tracked = with_grad(outputs) if torch.is_grad_enabled() else []
        if tracked and not any(map(internals.is_func_wrapper, tracked)):
            pinned = [unit.index for unit in self._units if unit.weights.is_pinned]
            held = [len(self._units) - 1, *pinned]
            on_grads(tracked, functools.partial(self._on_step_grad, held), "any")
        return bool(tracked)

    def _on_held_grad(self, indices: Iterable[int], _: Tensor) -> None:
        """Begin the pass and unshard units, if not done; cheap, as each child causes this event."""
        weights = [self._units[index].weights for index in indices]
        if self._pass() is None or [w for w in weights if w.residency < Residency.WHOLE]:
            self._unshard_again(weights)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _unshard_again(self, weights: Sequence[Weights]) -> None:
        self.begin()
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
        self._sharded.hide()
        if self.is_running:
            # An exception ended the last pass, and no forward came since.
            self._step.reset()
            self._step.is_interrupted = False
        self.is_running = self._step.is_open = True
        self._step.keeps_graph = torch.is_grad_enabled()
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
            announced = iter(internals.will_accumulate(self._parameters))
            for unit in self._units:
                own = list(itertools.islice(announced, len(unit.parameters)))
                unit.expect(own, sends=self._reduces)
        if self._reduces:
            self._order.begin(self._prefetcher.schedule.units_in_forward())

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

    def _on_inputs_grad(self, call: Call, grads: Any) -> None:
        """Reshard a unit after its backward, unless gradients of leaves came before the rest."""
        unit = self._units[call[0]]
        calls = unit.calls
        if call in calls.running:
            return  # its forward is still running, and computes gradients of its own inputs
        calls.awaited.discard(call)
        calls.in_backward.discard(call)
        if grads is None and (calls.awaited or not unit.are_complete):
            return
        # A unit called on its own output begins the backward of one call before another's ends.
        if not calls.in_backward:
            unit.weights.reshard()
        if self.is_running:
            self._prefetcher.prefetch()

    def on_grad(self, unit: Unit, index: int, _: Tensor) -> None:
        """Take a parameter's gradient; the last one of a unit may start its reduction."""
        with internals.as_plain_tensors():
            if not unit.parameters[index].requires_grad:
                return  # frozen since its forward: torch calls the hook without a gradient
        if not self._takes or self._pass() is None:
            if not self._step.is_open:
                self._sharded.hide()
            is_outside = not self._step.is_open and not unit.weights.has_masters
            if is_outside and unit.weights.needs_ranks:
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
                require_equal_gradients(self._sharded)
        elif self._takes:
            for flat in self._sharded.flats:
                flat.gradients.keep_own()
        self._pass = lambda: None
        self.is_running = False
        for transport in self._sharded.comm.transports.values():
            transport.release_scratch()
        self._sharded.comm.host_copies.release_sources()
        for unit in self._units:
            unit.calls.end_pass()
        for flat in self._sharded.flats:
            flat.is_recorded = False
        self._sharded.store_pending()
        if self._step.is_inside:
            for unit in self._units[:-1]:
                unit.weights.reshard()
        else:
            self._step.close()

    def abandon(self) -> None:
        """Drop a backward pass that an exception ended."""
        self._pass = lambda: None
        self.is_running = self._takes = self._reduces = False
        self._order.abandon()
