"""The life of a step: when units are unsharded, resharded, reduced and refreshed.

The engine knows no Lightning. In a plain loop::

    engine = Engine(module, Settings(stage=3))
    engine.adopt(optimizer)
    for batch in data:
        optimizer.zero_grad()
        loss = module(batch).sum()
        loss.backward()
        optimizer.step()
    engine.close()

What happens, and who says so:

==========================  ====================================================================
event                       action
==========================  ====================================================================
step opens (``step()``, or  unshard the root for the whole step, broadcast buffers
the root's ``forward``)
a unit's ``forward``        unshard it, prefetch the next; afterwards reshard, unless it is the very
                            next need (the last unit of a forward is the first of the backward)
outputs' first gradient     unshard the unit for its backward, prefetch the next
a parameter's gradient      move it to the reduce buffer; the unit's last one starts its reduction
inputs' gradients done      reshard
end of backward             reduce what is left, show the gradients to the optimizer, close the step
optimizer stepped           start to gather the new weights of replicated units
==========================  ====================================================================
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_zero import resting
from lightning_zero.adoption import Adoption
from lightning_zero.bundle import Bundle
from lightning_zero.call import Call, too_late, weakly, with_grad
from lightning_zero.comm import Comm
from lightning_zero.comparison import Comparison
from lightning_zero.hook import Hook
from lightning_zero.join import Join
from lightning_zero.meeting import Subject
from lightning_zero.piece import Piece
from lightning_zero.schedule import Need, Schedules
from lightning_zero.settings import Settings
from lightning_zero.sharded import ShardedModule
from lightning_zero.tensors import tensors_in
from lightning_zero.turns import Turns
from lightning_zero.unit import State, Unit


class Engine(ShardedModule):
    """A module whose parameters live in units, and the step that they go through together.

    Args:
        module: The model. Its parameters become views of flat buffers, sharded according to the
            stage; the ``Parameter`` objects stay.
        settings: What the user chose.
        comm: The ranks; the default process group if omitted.

    Raises:
        ValueError: The module cannot be sharded as it is; the message says why.
    """

    def __init__(self, module: nn.Module, settings: Settings, comm: Comm | None = None) -> None:
        super().__init__(module, settings, comm or Comm(settings.device))
        self._handles: list[RemovableHandle] = []
        self._unheard = {unit: _places(unit) for unit in self.units}
        self._reduces_always = any(
            bundle.plan.reduces_every_microbatch for unit in self.units for bundle in unit.bundles
        )
        self._schedules = Schedules()
        self._depth = 0
        # The depth's sign: torch's compiler would make the code anew for every depth.
        self._is_inside = False
        self._is_called = False
        self._awaits_backward = False
        self._in_backward = False
        self._last_backward: Unit | None = None
        self._syncs = self._reduces_now = True
        self._broadcasts_next = True
        self._keeps_graph = False
        self._was_interrupted = False
        self._join = Join(self.units, self.comm)
        is_due = any(unit.gives_weights_back for unit in self.units)
        self._comparison = Comparison(self.comm, is_due=is_due)
        self._turns = Turns(self.units, self.comm)
        self.is_closed = False
        self.is_restored = False
        self._on_outputs_grad = weakly(self._before_backward)
        self._on_inputs_grad = weakly(self._after_backward)
        self._on_leaf_inputs_grad = weakly(self._after_leaf_inputs)
        self._on_step_grad = weakly(self._hold)
        self._register_hooks()
        for unit in self.units:
            unit.reshard()
        _engines.add(self)

    def _register_hooks(self) -> None:
        for unit in self.units[:-1]:
            module = unit.module
            needless = None if unit.gives_weights_back else functools.partial(_needs_nothing, unit)
            before = Hook(module, functools.partial(self._before_forward, unit), needless)
            after = Hook(module, functools.partial(self._after_forward, unit), needless)
            self._handles += [
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after, always_call=True),
            ]
        # The children too: a validation hook calls `self.net(x)`, and the root holds some of its
        # weights.
        for module in [self.module, *self.module.children()]:
            if any(module is unit.module for unit in self.units[:-1]):
                continue
            needless = functools.partial(_needs_nothing, self.root)
            is_root = module is self.module
            enter = Hook(module, self._enter_root, self._needs_no_entry if is_root else needless)
            leave = Hook(module, self._leave_root, self._needs_no_exit if is_root else needless)
            self._handles += [
                module.register_forward_pre_hook(enter, prepend=True),
                module.register_forward_hook(leave, always_call=True),
            ]
        for unit in self.units:
            self._hook_grads(unit)

    def _hook_grads(self, unit: Unit) -> None:
        """Listen for gradients, also of parameters that were unfrozen since last time."""
        frozen = []
        for bundle, index in self._unheard.pop(unit, ()):
            parameter = bundle.parameters[index]
            if parameter.requires_grad:
                hook = functools.partial(self._on_grad, unit, bundle, index)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)
            else:
                frozen.append((bundle, index))
        if frozen:
            self._unheard[unit] = frozen

    # -- the step --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, *, awaits_backward: bool = True) -> Iterator[Callable[[Any], None]]:
        """Code that all ranks run together: the root is whole, other weights gather on touch.

        Yields a function to call with the step's outputs: a backward pass from them, after the
        context has ended, finds the weights it needs. ``awaits_backward=False`` closes the step at
        once.
        """
        self._enter()
        outputs: list[Any] = []
        try:
            yield outputs.append
        except BaseException:
            self.reset()
            raise
        self._keeps_graph &= awaits_backward
        self._leave(outputs if awaits_backward else None)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Microbatches whose gradients may stay local, if the plan says so."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Forwards without gradients in which ranks may run different units, some none at all."""
        if self._join.is_open:
            yield
            return
        # What a rank does here is its own, and no guide to what all ranks need next.
        apart = self._schedules.apart() if self._join.must_ask else contextlib.nullcontext()
        with self._join.opened(), apart:
            yield

    @property
    def in_step(self) -> bool:
        """Whether all ranks run the same code now, so that a touch may gather."""
        return self._depth > 0 or self._awaits_backward

    def _enter_root(self, module: nn.Module, args: Any) -> None:
        # What DDP does for a call of the module itself, it does not for one of a child in a hook.
        is_root = module is self.module
        self._enter(broadcasts=is_root)
        self._is_called |= is_root

    def _leave_root(self, module: nn.Module, args: Any, output: Any) -> None:
        self._is_called &= module is not self.module
        self._leave(output)

    def _needs_no_entry(self) -> bool:
        """Whether a compiled graph may hold a call of the module: a step has been entered."""
        return self._is_inside and _needs_nothing(self.root)

    def _needs_no_exit(self) -> bool:
        """Whether the call that a compiled graph ends began in one."""
        return not self._is_called and _needs_nothing(self.root)

    def _enter(self, *, broadcasts: bool = True) -> None:
        if self._in_backward and not _in_graph_task():
            # An exception ended the backward pass, and nobody told us.
            self.reset()
        self._depth += 1
        self._is_inside = True
        if self._depth > 1 or self._in_backward:
            return
        self._was_interrupted = False
        self._comparison.wait()
        self._close_step()
        for unit in self.units:
            unit.has_run = False
        # Also of units whose own hooks a compiled graph leaves out.
        for unit in list(self._unheard):
            self._hook_grads(unit)
        self._schedules.begin(with_grad=torch.is_grad_enabled())
        self._unshard(self.root)
        self._prefetch()
        for unit in self.units:
            if unit.is_inlined:
                unit.wait_if_in_flight()
        self.root.wait()
        if not broadcasts or self._join.is_open:
            return
        if self.settings.broadcast_buffers and self._broadcasts_next:
            self.broadcast_buffers()
        self._broadcasts_next = self._syncs

    def _leave(self, outputs: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        self._is_inside = self._depth > 0
        if self._depth or self._in_backward:
            return
        watched = with_grad(outputs) if torch.is_grad_enabled() else []
        if not watched:
            self._close_step()
            if not self._join.asks:
                self._comparison.start()
            return
        # A second backward over the same graph comes when the step is closed: gather again what has
        # no unit of its own to do so.
        pinned = (unit.index for unit in self.units if unit.is_pinned)
        held = [self.root.index, *pinned]
        register_multi_grad_hook(watched, functools.partial(self._on_step_grad, held), mode="any")
        self._awaits_backward = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _hold(self, indices: Iterable[int], _: Tensor) -> None:
        self._begin_backward()
        units = [self.units[index] for index in indices]
        for unit in units:
            unit.unshard()
        for unit in units:
            unit.wait()

    def _close_step(self) -> None:
        """Give everything back that a step held."""
        if self._keeps_graph:
            # A backward under create_graph saved weights for one that is still to come.
            return
        self._awaits_backward = False
        for unit in self.units:
            unit.is_pinned = False
            if unit.state is not State.RESTING:
                unit.reshard()

    def touch(self, parameter: Parameter) -> None:
        """Make a parameter readable outside its unit's forward, or say why it cannot be."""
        name, unit, _, _ = self._places[id(parameter)]
        if unit.is_lent:
            raise resting.kept_too_long(name)
        if self.in_step:
            self._unshard(unit)
            # Whoever reads it may save it for a backward of which no event tells.
            unit.is_pinned = unit.has_run = True
        elif unit.state is State.RESTING:
            raise RuntimeError(
                f"Parameter {name!r} is sharded over {self.comm.world_size} ranks and not in"
                " memory now. Outside of training_step, validation_step and so on, read it in a"
                " context that gathers it on all ranks: `with lightning_zero.gathered(module):`"
            )
        unit.wait()

    # -- forward ---------------------------------------------------------------------------------

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        is_recompute = _in_graph_task()
        if is_recompute:
            self._begin_backward()
        else:
            self._enter()
        unit.has_run = True
        call = Call(unit)
        unit.calling.append(call)
        self._need(unit, is_backward=is_recompute)
        if not torch.is_grad_enabled():
            return
        if unit in self._unheard:
            self._hook_grads(unit)
        call.watch_inputs(
            [*args, *kwargs.values()],
            ended=self._on_inputs_grad,
            leaves_done=self._on_leaf_inputs_grad,
        )

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        call = unit.calling.pop()
        outputs = tensors_in(output)
        wants_grad = torch.is_grad_enabled() and call.watch_outputs(
            outputs, began=self._on_outputs_grad
        )
        if _in_graph_task():
            return
        for tensor in outputs:
            # The module may have given away a view of its weights, which lives on.
            unit.is_pinned |= unit.keep(tensor)
        ahead = self._schedules.now.ahead(1)
        is_next = bool(ahead) and ahead[0].unit == unit.index
        if is_next or (wants_grad and not self.settings.reshard_after_forward):
            unit.idle()
        else:
            unit.reshard()
        self._leave(output)

    def _need(self, unit: Unit, *, is_backward: bool) -> None:
        """Make a unit whole, and start on those that are needed after it."""
        self._schedules.now.record(Need(unit.index, is_backward))
        if unit.state is State.RESTING:
            self._unshard(unit)
        before, self._last_backward = self._last_backward, unit if is_backward else None
        if before is None or before is unit or not before.will_be_given_back:
            self._prefetch()
        # Otherwise the unit whose backward just ended is still whole: its inputs' gradients are
        # this unit's outputs', and this event comes first. Prefetching now would hold one unit
        # more; it starts in a moment, when that one is given back.
        unit.wait()

    def _unshard(self, unit: Unit) -> None:
        if self._join.asks and unit.state is State.RESTING:
            self._join.gather(unit)
        unit.unshard()

    def _prefetch(self) -> None:
        if self._join.asks:
            return
        for need in self._schedules.now.ahead(self.settings.prefetch):
            self.units[need.unit].unshard()

    # -- backward --------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        if self.is_closed:
            raise too_late()
        if self._join.is_open:
            raise RuntimeError(
                "A backward pass began within `lightning_zero.join`, where ranks may run different"
                " units; the gradients of all ranks need the same ones. Go backward outside of it."
            )
        self._in_backward = True
        self._last_backward = None
        self._keeps_graph = torch.is_grad_enabled()
        self._reduces_now = self._syncs or self._reduces_always
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self.units:
                unit.expect(is_local=not self._reduces_now)
        if self._reduces_now:
            self._turns.begin(self._schedules.units_in_forward())
        # Private, as in DDP and FSDP2: torch has no public event for the end of a backward pass,
        # and a plain `loss.backward()` in user code has nobody else to tell us.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _before_backward(self, call: Call, _: Any) -> None:
        unit = call.unit
        self._begin_backward()
        unit.in_backward.add(call)
        self._need(unit, is_backward=True)
        if torch.is_grad_enabled():
            # create_graph: the graph of this backward saves the weights, and no event tells when
            # its own backward will want them.
            unit.is_pinned = True

    def _after_backward(self, call: Call, _: Any = None) -> None:
        unit = call.unit
        if call in unit.calling:
            return  # its forward, which still runs, wants a gradient of its own inputs
        unit.end_call(call)
        if self._reduces_now and not unit.is_complete:
            self._turns.advance()
        # A unit that is called with its own output begins one backward before it ends another.
        if not unit.in_backward:
            unit.reshard()
        if self._in_backward:
            self._prefetch()

    def _after_leaf_inputs(self, call: Call) -> None:
        unit = call.unit
        unit.awaited.discard(call)
        unit.in_backward.discard(call)
        if unit.is_complete and not unit.awaited:
            self._after_backward(call)

    def _on_grad(self, unit: Unit, bundle: Bundle, index: int, _: Tensor) -> None:
        grad = bundle.pieces[index].claim_grad()
        assert grad is not None
        if not self._in_backward:
            self._begin_backward()
        if not unit.take_grad(bundle.reducer, index, grad):
            return
        if self._reduces_now:
            self._turns.advance()
        # A frozen weight may still be wanted for the gradient of something before it.
        if unit is not self.root and unit.is_trainable and not unit.awaited:
            unit.reshard()

    def _finish_backward(self) -> None:
        """End a backward pass: late gradients, waits, and weights that nobody gave back."""
        self._in_backward = False
        if self._reduces_now:
            self._turns.finish()
        else:
            for unit in self.units:
                unit.show_local_grads()
        self.comm.release_scratch()
        for unit in self.units:
            unit.forget_calls()
        if self._depth == 0:
            self._close_step()
            return
        for unit in self.units:
            if unit is not self.root:
                unit.reshard()

    # -- the optimizer ---------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer) -> None:
        """Point ``optimizer`` at this rank's pieces, and refresh weights whenever it has stepped.

        Raises:
            ValueError: It is not element-wise, or a parameter is in two of its groups.
        """
        adoption = Adoption(
            optimizer, self.piece, before=self._begin_writing, after=self._after_step
        )
        self.optimizers.append(optimizer)
        self._handles += adoption.handles

    def _begin_writing(self) -> None:
        """Wait until no rank reads this one's masters or reduce buffers any more."""
        self.keep_edits()
        self.comm.fence(Subject.STEP)
        self.comm.drop_outgrown_windows()

    def _after_step(self, pieces: Iterable[Piece]) -> None:
        """Bring weights up to date with the masters that were stepped."""
        self.comm.fence(Subject.STEPPED)
        # An optimizer may hold pieces of another engine too.
        places = [self._places.get(id(piece.parameter)) for piece in pieces]
        stepped = {place[1].index for place in places if place}
        self._keeps_graph = False
        if not self._depth:
            self._close_step()
        # The root first, which is needed first: a device gathers one unit after the other.
        units = [unit for unit in (self.root, *self.units[:-1]) if unit.index in stepped]
        self.refresh(units, only_stepped=True)
        self.comm.ledger.end_step()
        self.comm.watch.step += 1

    # -- the end ---------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget a step that an exception ended; the next one starts clean."""
        self._depth = 0
        self._is_inside = self._is_called = False
        self._in_backward = self._keeps_graph = False
        self._join.abandon()
        self._comparison.abandon()
        self._was_interrupted = True
        self._turns.abandon()
        self._schedules.forget()
        for unit in self.units:
            unit.abandon()
        self.comm.release_scratch()
        self._close_step()

    def close(self, *, restore: bool = True) -> None:
        """Take the hooks away and, with ``restore``, make the module an ordinary one again.

        Restoring gathers unit by unit and needs host memory for the whole model on every rank.
        Without it the parameters stay at rest. All ranks close together, unless an exception has
        just ended a step.
        """
        if not self._was_interrupted:
            self._comparison.wait()
            self.comm.meetings.call(Subject.CLOSE).wait()
        for unit in self.units:
            unit.wait_if_in_flight()
        if restore and not self._was_interrupted:
            self.keep_edits()
        self._close_step()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.is_closed = True
        for unit in self.units:
            unit.let_go()
        try:
            if restore:
                self._restore()
        finally:
            self.comm.release_windows()
            self.comm.watch.leave()

    def _restore(self) -> None:
        for parameter, whole in self.full_parameters():
            resting.unguard(parameter)
            parameter.data = whole.to("cpu", copy=True)
        for unit in self.units:
            unit.retire()
        self.is_restored = True


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def engine_of(parameters: Iterable[Parameter]) -> Engine | None:
    """The open engine that shards one of ``parameters``, if there is one."""
    wanted = list(parameters)
    for engine in _engines:
        if not engine.is_closed and any(engine.owns(parameter) for parameter in wanted):
            return engine
    return None


def _places(unit: Unit) -> list[tuple[Bundle, int]]:
    """The parameters of a unit, each by its bundle and its place there."""
    return [(bundle, index) for bundle in unit.bundles for index in range(len(bundle.parameters))]


def _needs_nothing(unit: Unit) -> bool:
    """Whether a compiled graph may hold ``unit``: its weights are whole before the graph runs.

    Torch's compiler reads this; what is noted here is noted whenever the graph runs.
    """
    if unit.state is not State.WHOLE:
        return False
    unit.is_inlined = unit.has_run = True
    return True


def _in_graph_task() -> bool:
    """Whether autograd runs a backward pass in this thread: then a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1
