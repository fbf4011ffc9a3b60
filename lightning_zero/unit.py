"""A module's parameters that are gathered, released and reduced together.

A **unit** is a module's bundles and the state they are in::

    state       weight buffer            parameters
    RESTING     released (stage 3)       placeholders that send a read to the engine
    IN_FLIGHT   allocated, being filled  the same; at stages 1 and 2 also between a step and its use
    WHOLE       filled                   views of the buffer that notice uses of their `data`

The life of a stage-3 unit in one microbatch::

    unshard -> wait -> forward -> reshard ... unshard -> wait -> backward -> take_grad... -> reduce
    -> reshard -> finish_reduce                                  (stages 1 and 2: no reshard)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero import resting
from lightning_zero.buffer import Buffer
from lightning_zero.bundle import Bundle
from lightning_zero.comm import Work
from lightning_zero.meeting import Subject
from lightning_zero.reducer import Reducer
from lightning_zero.span import span


class State(Enum):
    """Where a unit's whole weights are."""

    RESTING = "resting"
    """Given back."""
    IN_FLIGHT = "in flight"
    """On their way."""
    WHOLE = "whole"
    """Readable."""


class Unit:
    """The bundles of one module and the state of its whole weights.

    Attributes:
        name: The module's qualified name; the root's is ``""``.
        module: The module whose forward the unit serves.
        bundles: Its parameters, by dtype and trainability.
        index: Its number; the root's is the last.
        label: The name to show.
        gives_weights_back: Whether whole weights are released after use.
        state: Where its whole weights are.
        is_pinned: Whether they stay whole to the end of the step.
        has_run: Whether this rank used the weights in this step.
        is_inlined: Whether a graph that holds more than this unit was compiled, for which the
            weights must be whole when a step begins.
        calling: The calls of its forward that run now, the innermost last.
        awaited: The calls whose inputs' gradients will tell when their backward has ended.
        in_backward: The calls whose backward has begun and not ended.
        is_trainable: Whether every parameter wants a gradient in this backward pass.
        wants_grads: Whether any does.
        is_complete: Whether all that want a gradient got one in this backward pass.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        bundles: Sequence[Bundle],
        index: int,
    ) -> None:
        self.name = name
        self.module = module
        self.bundles = list(bundles)
        self.index = index
        self.state = State.WHOLE
        self.is_pinned = False
        self.has_run = self.is_inlined = False
        self.calling: list[Any] = []
        self.awaited: set[Any] = set()
        self.in_backward: set[Any] = set()
        self._has_ended = False
        self._is_idle = False
        self._lent: list[Buffer] = []
        self._works: list[Work] = []
        self._finishes: list[Callable[[], None]] = []
        self._num_missing = 0
        self.is_trainable = self.wants_grads = False
        self.is_complete = True
        self.label = name or "root"
        self.gives_weights_back = any(bundle.plan.gives_weights_back for bundle in self.bundles)
        # Numbers that no bundle of another unit has; a unit has under 16.
        self._tagged = [
            (16 * index + number + 1, bundle) for number, bundle in enumerate(self.bundles)
        ]

    @property
    def numel(self) -> int:
        """Elements of all slots, without padding."""
        return sum(slot.numel for bundle in self.bundles for slot in bundle.layout.slots)

    @property
    def is_whole(self) -> bool:
        """Whether the weights are all here."""
        return self.state is State.WHOLE

    @property
    def will_be_given_back(self) -> bool:
        """Whether the weights are whole and the end of the unit's backward will release them."""
        is_told = bool(self.awaited)
        is_held = self.state is State.RESTING or self.is_pinned or not is_told
        return self.gives_weights_back and not is_held

    def unshard(self) -> None:
        """Start to make the weights whole."""
        if self.state is State.RESTING:
            self._gather()

    def refresh(self, *, only_stepped: bool = False) -> None:
        """Start to bring whole weights up to date with masters that have changed.

        Args:
            only_stepped: Leave out bundles that no optimizer steps.
        """
        self.wait()
        self.guard()
        self._gather(only_stepped=only_stepped)

    def idle(self) -> None:
        """Keep whole weights for a later need, but notice whoever else uses them."""
        if self.gives_weights_back and not self.is_pinned:
            self.guard()
            self._is_idle = True

    def keep(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a view of weights that will be given back; it knows from now on."""
        if not (self.gives_weights_back and torch._C._has_storage(tensor)):
            return False
        storage = tensor.untyped_storage()._cdata
        for bundle in self.bundles:
            if bundle.weight.tensor.untyped_storage()._cdata == storage:
                resting.keep(tensor, bundle.parameters)
                return True
        return False

    def guard(self) -> None:
        """Send every use of the parameters to their owner."""
        for bundle in self.bundles:
            bundle.guard()

    @span("unshard")
    def _gather(self, *, only_stepped: bool = False) -> None:
        self._works = [
            bundle.gather(self.label, tag)
            for tag, bundle in self._tagged
            if not only_stepped or bundle.may_be_stepped
        ]
        self.state = State.IN_FLIGHT

    def wait(self) -> None:
        """Make the weights readable; they must be whole or on their way."""
        if self.state is not State.WHOLE:
            self._arrive()
        elif self._is_idle:
            self._is_idle = False
            for bundle in self.bundles:
                bundle.show_whole(is_new=False)

    @span("wait")
    def _arrive(self) -> None:
        assert self.state is State.IN_FLIGHT, f"{self.label} is waited for but was not unsharded"
        for work in self._works:
            work.wait()
        self._works = []
        for bundle in self.bundles:
            bundle.show_whole()
        self.state = State.WHOLE

    def gather_again(self) -> None:
        """Gather for ranks that ask for it, whether the weights are whole here or not."""
        was_idle = self._is_idle
        self.keep_edits()
        self._gather()
        self.wait()
        if was_idle:
            self.guard()

    def keep_edits(self) -> None:
        """Let the masters follow what users changed in whole weights, on all ranks."""
        if self.state is not State.WHOLE:
            return
        edited = [bundle for bundle in self.bundles if bundle.edited]
        if not edited:
            return
        comm = self.bundles[0].comm
        comm.fence(Subject.EDIT)
        for bundle in self.bundles:
            bundle.keep_edits()
        comm.fence(Subject.EDIT)

    @property
    def changed(self) -> list[str]:
        """The names of whole or lent parameters that were changed since they were shown."""
        return [
            bundle.layout.slots[i].name for bundle in self.bundles for i in bundle.edits.changed
        ]

    def reshard(self) -> None:
        """Give whole weights back, if their home is sharded and nothing pins them."""
        if self.state is State.RESTING or self.is_pinned or not self.gives_weights_back:
            return
        self._is_idle = False
        if self.state is State.IN_FLIGHT:
            self.wait()
        self.keep_edits()
        self._release()

    @span("reshard")
    def _release(self) -> None:
        for bundle in self.bundles:
            bundle.show_resting()
            bundle.weight.release()
        self.state = State.RESTING

    def wait_if_in_flight(self) -> None:
        """Let a gather that was started arrive."""
        if self.state is State.IN_FLIGHT:
            self.wait()

    @property
    def is_lent(self) -> bool:
        """Whether whole masters are shown now."""
        return bool(self._lent)

    def lend(self) -> None:
        """Show whole parameters in the master's precision until :meth:`take_back`."""
        self._lent = [bundle.lend(is_whole=self.state is State.WHOLE) for bundle in self.bundles]

    def store_lent(self) -> None:
        """Take rank 0's lent values as everybody's masters; between two fences."""
        for bundle, lent in zip(self.bundles, self._lent, strict=True):
            bundle.edits.bring_back()
            bundle.comm.broadcast(lent.tensor)
            bundle.store(lent)

    def take_back(self) -> None:
        """End :meth:`lend`."""
        self._lent = []
        for bundle in self.bundles:
            if self.state is State.RESTING:
                bundle.show_resting()
            else:
                bundle.show_whole()

    def abandon(self) -> None:
        """Give up whatever is under way; weights and gradients in flight are dropped."""
        self.is_pinned = False
        self.calling = []
        self.forget_calls()
        try:
            self.wait_if_in_flight()
            self.finish_reduce()
        except RuntimeError:
            # The ranks we waited for are gone; what they would have sent is lost with them.
            self._works, self._finishes = [], []
            self.state = State.WHOLE
        for bundle in self.bundles:
            bundle.reducer.drop()

    def let_go(self) -> None:
        """Leave the parameters to themselves, as they are."""
        for bundle in self.bundles:
            bundle.let_go()

    def retire(self) -> None:
        """Free the weights after the parameters were pointed elsewhere."""
        for bundle in self.bundles:
            bundle.retire()
        self.state = State.RESTING

    @property
    def has_arrivals(self) -> bool:
        """Whether a gradient arrived that is not reduced yet."""
        return True in [True in bundle.reducer.filled for bundle in self.bundles]

    def expect(self, *, is_local: bool) -> None:
        """Begin a backward pass: make room for gradients, and note how many are wanted."""
        for bundle in self.bundles:
            bundle.reducer.expect(is_local=is_local)
        wants = [p.requires_grad for bundle in self.bundles for p in bundle.parameters]
        self._num_missing = sum(wants)
        self.is_complete = not self._num_missing
        self.is_trainable, self.wants_grads = all(wants), any(wants)

    def show_local_grads(self) -> None:
        """Show the gradients of a backward pass that are not sent."""
        for bundle in self.bundles:
            bundle.reducer.show_local()

    def forget_calls(self) -> None:
        """End a backward pass: nothing that came before it is waited for."""
        self._has_ended = False
        self.awaited, self.in_backward = set(), set()

    def end_call(self, call: Any) -> None:
        """Note that the backward of a call has ended."""
        self.awaited.discard(call)
        self.in_backward.discard(call)
        self._has_ended = True

    @property
    def is_passed(self) -> bool:
        """Whether the backward of every call has ended, so that no gradient is expected."""
        return self._has_ended and not self.awaited

    def take_grad(self, reducer: Reducer, index: int, grad: Tensor) -> bool:
        """Take in a gradient that autograd just finished; whether it was the last one wanted."""
        self._num_missing -= not reducer.arrived[index]
        reducer.take(index, grad)
        self.is_complete = not self._num_missing
        return self.is_complete

    @span("reduce")
    def reduce(self) -> None:
        """Start to average the gradients that arrived over the ranks."""
        self.finish_reduce()
        self._finishes = [
            bundle.reducer.reduce(self.label, tag)
            for tag, bundle in self._tagged
            if True in [parameter.requires_grad for parameter in bundle.parameters]
        ]

    def finish_reduce(self) -> None:
        """End the reductions that were started."""
        if self._finishes:
            self._finish_reduce()

    @span("finish_reduce")
    def _finish_reduce(self) -> None:
        finishes, self._finishes = self._finishes, []
        for finish in finishes:
            finish()
