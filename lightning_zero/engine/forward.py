"""The forward half of a step: its beginning, the calls of its modules, and its end."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.comm import Communicator, Pending, PendingSync, SyncPoint
from lightning_zero.engine.backward import Backward
from lightning_zero.engine.module_hook import Hook, Hooks
from lightning_zero.engine.schedule import Prefetcher
from lightning_zero.engine.sharded_model import ShardedModel
from lightning_zero.engine.step import Phase, Step
from lightning_zero.engine.unit import Unit, with_grad
from lightning_zero.engine.weights import Residency, Shows
from lightning_zero.plan import check_parameter
from lightning_zero.tensors import internals, tensors_in, unwrapped


class Forward:
    """Handles the events of forwards: unshards what they need, and reshards it afterwards.

    Attributes:
        order_check: The comparison of what the ranks gathered in the last forward without
            gradients. Waiting for it raises a ``RuntimeError`` if they gathered different weights.
        buffers: The broadcasts of buffers.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        step: Step,
        prefetcher: Prefetcher,
        backward: Backward,
        hooks: Hooks,
    ) -> None:
        self._sharded = sharded
        self._step = step
        self._prefetcher = prefetcher
        self._backward = backward
        self._hooks = hooks
        # Only the order of gathers may tell one unit's weights from another's. A backward pass has
        # sync points of its own, which find the same differences.
        in_order = sharded.comm.transport.gathers_in_order
        self._checks_order = sharded.reshards and in_order
        self.order_check: PendingSync | Pending = Pending()
        # Whether a call of the module itself has entered the step and must leave it.
        self._is_called = False
        self.buffers = BufferSync(
            sharded.module, sharded.comm, is_on=sharded.settings.broadcast_buffers
        )

    def hook_modules(self) -> None:
        """Hook the modules of all units, and the children whose weights the root holds."""
        inner, root = self._sharded.units[:-1], self._sharded.root
        for unit in inner:
            releases = unit.weights.reshards
            may_skip = None if releases else unit.inline
            before = functools.partial(self.before_unit, unit)
            self._hooks.add(
                Hook(unit.module, before, may_skip, releases=releases),
                Hook(unit.module, functools.partial(self.after_unit, unit), may_skip),
                with_kwargs=True,
            )
        module, releases = self._sharded.module, root.weights.reshards
        self._hooks.add(
            Hook(module, self.before_root, self._skips_enter, releases=releases),
            Hook(module, self.after_root, self._skips_leave),
        )
        # Children too: a hook may call `self.net(x)`, and the root may hold some of its weights.
        # Children without parameters, such as metrics, need no hooks.
        for child in module.children():
            is_unit = any(child is unit.module for unit in inner)
            if not is_unit and any(True for _ in child.parameters()):
                self._hooks.add(
                    Hook(child, self.before_root, root.inline, releases=releases),
                    Hook(child, self.after_root, root.inline),
                )
        self._hook_holders(root)

    def _hook_holders(self, root: Unit) -> None:
        """Show weights of the root that are cast only while a module that holds them runs."""
        cast = {
            id(parameter): (flat, parameter, *classes)
            for flat in root.flat_parameters
            if flat.plan.is_cast
            for parameter, classes in zip(flat.parameters, flat.classes, strict=True)
        }
        for module in self._sharded.module.modules():
            held = [cast[id(p)] for p in module._parameters.values() if id(p) in cast]
            if held:
                self._hooks.add(
                    Hook(module, functools.partial(self.before_holder, held)),
                    Hook(module, functools.partial(self.after_holder, held)),
                )

    # -- the begin and the end -------------------------------------------------------------------

    def enter(self, *, broadcasts: bool = True) -> None:
        """Enter a forward, and begin a step unless one is under way."""
        if self._step.enter():
            self._begin(broadcasts=broadcasts)

    def _begin(self, *, broadcasts: bool) -> None:
        self.order_check.wait()
        for name, parameter in self._sharded.replicated.items():
            check_parameter(name, parameter)  # it may not be trained from now on
        self._sharded.shown.hide()
        self._sharded.store_pending()
        self._step.begin()
        units, root = self._sharded.units, self._sharded.root
        for unit in units:
            unit.calls.have_run = False
        # Including units whose own hooks a compiled graph skips.
        self._hooks.hook_unfrozen()
        self._prefetcher.begin_step(with_grad=torch.is_grad_enabled())
        self._prefetcher.unshard(root)
        self._prefetcher.prefetch()
        for unit in units[:-1]:
            weights = unit.weights
            # Those that are whole already, so that torch's compiler can inline their units.
            is_there = weights.residency is Residency.WHOLE and not weights.needs_ranks
            if is_there or unit.is_inlined:
                weights.show_in_step(is_inlined=True)
        root.weights.show_in_step()
        if broadcasts and not self._prefetcher.is_joined:
            self.buffers.begin()

    def leave(self, outputs: Any, *, awaits_backward: bool = True) -> None:
        """Leave a forward; after the outermost, await a backward from its ``outputs``."""
        outputs = outputs if awaits_backward else None
        if self._step.leave():
            self.buffers.end(sends=awaits_backward and self.sends)
            self._end(outputs)
        elif self._sharded.root.weights.reshards and not internals.in_backward():
            # The user may keep the outputs until after the step, or even the run.
            tracked = with_grad(outputs) if torch.is_grad_enabled() else []
            if tracked:
                self._backward.unshard_before(tracked)

    @property
    def sends(self) -> bool:
        """Return whether gradients of a forward or backward pass that runs now are to be sent."""
        return torch.is_grad_enabled() and self._backward.syncs

    def _end(self, outputs: Any) -> None:
        tracked = with_grad(outputs) if torch.is_grad_enabled() else []
        if not tracked:
            self._step.close()
            if self._checks_order and not self._prefetcher.asks:
                self.order_check.wait()
                self.order_check = self._sharded.comm.control.call(SyncPoint.FORWARD)
            return
        self._backward.unshard_before(tracked)
        self._step.phase = Phase.AWAITS_BACKWARD

    def is_within_step(self) -> bool:
        """Return whether code that runs now is part of a step."""
        return self._step.phase is not Phase.IDLE

    def compute(self, units: Sequence[Unit], *, computes: bool) -> bool:
        """Make units whole until the end of the step for a use outside of their forwards.

        Returns ``False``, so that the use sees masters, unless it ``computes`` with weights in a
        step, or is of a backward pass.
        """
        phase = self._step.phase
        is_backward = phase is Phase.BACKWARD
        if phase is Phase.IDLE or not (computes or is_backward):
            return False
        # A forward that is run again for a unit's backward calls no hooks; the unit is released
        # after its backward, like any other.
        again = [unit for unit in units if is_backward and computes and unit.calls.in_backward]
        for unit in units:
            self._prefetcher.unshard(unit)
            if unit not in again:
                unit.pin()
        for unit in units:
            if unit in again:
                unit.weights.show()
                continue
            unit.weights.wait()
            if is_backward and not computes:
                for flat in unit.flat_parameters:
                    flat.edits.is_exposed = True
        return True

    def abandon(self) -> None:
        """Drop a forward that an exception ended."""
        self._is_called = False
        self.order_check = Pending()

    # -- calls of modules ------------------------------------------------------------------------

    def before_root(self, module: nn.Module, args: Any) -> None:
        """Enter a call of the module, or of a child whose weights the root holds."""
        # DDP broadcasts buffers in calls of the module itself, not in calls of a child in a hook.
        is_root = module is self._sharded.module
        self.enter(broadcasts=is_root and self._sharded.settings.broadcast_in_calls)
        self._is_called |= is_root

    def after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leave a call that :meth:`before_root` has entered."""
        self._is_called &= module is not self._sharded.module
        self.leave(output)

    def before_holder(self, held: Sequence[Any], module: nn.Module, args: Any) -> None:
        """Show weights of the root that a module holds."""
        weights = self._sharded.root.weights
        if self._step.phase is Phase.IDLE or weights.is_gathered:
            return
        self._prefetcher.unshard(self._sharded.root)
        weights.wait()
        if weights.has_pending:
            weights.require_no_pending([flat for flat, *_ in held])
        for _, parameter, _, readable in held:
            parameter.__class__ = readable

    def after_holder(self, held: Sequence[Any], module: nn.Module, args: Any, output: Any) -> None:
        """Guard the weights that :meth:`before_holder` has shown."""
        if self._sharded.root.weights.shows is not Shows.MASTERS:
            for _, parameter, guarded, _ in held:
                parameter.__class__ = guarded
        if torch.is_grad_enabled() and with_grad(output):
            for flat, *_ in held:
                flat.is_recorded = True

    def _skips_enter(self) -> bool:
        """Return whether a compiled graph may skip :meth:`before_root`: a step was entered."""
        return self._step.is_inside and self._sharded.root.inline()

    def _skips_leave(self) -> bool:
        """Return whether a compiled graph may skip :meth:`after_root`: it skipped the entry too."""
        return not self._is_called and self._sharded.root.inline()

    def before_unit(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Make a unit whole for its forward, and hook the end of its backward."""
        # A forward within a backward pass is a recomputation.
        is_recompute = internals.in_backward()
        if is_recompute:
            self._backward.begin()
        elif self._step.enter():
            self._begin(broadcasts=False)
        is_tracked = torch.is_grad_enabled()
        arguments = [*args, *kwargs.values()] if is_tracked else ()
        unit.calls.begin(arguments, self._backward.events)
        self._prefetcher.need(unit, is_backward=is_recompute)
        if unit.weights.has_pending:
            unit.weights.require_no_pending()
        unit.weights.show()
        if is_tracked and unit in self._hooks.frozen:
            self._hooks.hook_grads(unit)

    def after_unit(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        """Reshard a unit, unless it is needed next, and hook the beginning of its backward."""
        outputs = tensors_in(output)
        tracked = outputs if torch.is_grad_enabled() else ()
        wants_grad = unit.calls.end(tracked, self._backward.events)
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
            if not (stays or self._prefetcher.comes_next(unit)):
                weights.reshard()
        if weights.needs_ranks and weights.shows is Shows.WEIGHTS and not weights.stays_shown:
            weights.guard()
        if self._step.leave():
            self._end(output)


# -- buffers ---------------------------------------------------------------------------------------


class BufferSync:
    """Broadcasts of buffers before the same forwards as in DDP.

    DDP makes none after a forward whose gradients were not to be sent: within `no_sync`, without
    gradients, and under manual optimization, where Lightning tells DDP to expect no backward.

    Attributes:
        is_due: Whether the next forward broadcasts.
    """

    def __init__(self, module: nn.Module, comm: Communicator, *, is_on: bool) -> None:
        self._module, self._comm, self._is_on = module, comm, is_on
        self.is_due = True
        # Whether a forward is running that DDP would see, not just a call of a submodule.
        self._is_counted = False

    def begin(self) -> None:
        """Begin a forward that DDP would see; called by all ranks."""
        self._is_counted = True
        if self._is_on and self.is_due:
            broadcast_buffers(self._module, self._comm)

    def end(self, *, sends: bool) -> None:
        """End any forward; ``sends`` tells whether its gradients are to be sent."""
        if self._is_counted:
            self.is_due = sends
        self._is_counted = False


@torch.no_grad()
def broadcast_buffers(module: nn.Module, comm: Communicator, others: Iterable[Tensor] = ()) -> None:
    """Overwrite the module's buffers, and others, with rank 0's: one message per dtype, like DDP.

    Of tensors that wrap tensors, those are sent.
    """
    if comm.mesh.size == 1 and comm.mesh.tensor is None:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in itertools.chain(_buffers(module), *map(unwrapped, others)):
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        comm.control.broadcast(flat)
        parts = torch.split(flat, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))


def _buffers(module: nn.Module) -> list[Tensor]:
    """Return the module's current buffers, in the same order on all ranks.

    Faster than torch's own traversal, which nests several generators for every module.
    """
    buffers: dict[int, Tensor | None] = {}
    seen: set[nn.Module | None] = {None}
    left: list[nn.Module | None] = [module]
    while left:
        one = left.pop()
        if one is not None and one not in seen:
            seen.add(one)
            left.extend(one._modules.values())
            for buffer in one._buffers.values():
                buffers[id(buffer)] = buffer
    return [buffer for buffer in buffers.values() if buffer is not None]
