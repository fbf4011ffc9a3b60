"""A module whose parameters are gathered, released and reduced together, and its calls.

Torch has no event for the backward of a module. It begins with the first gradient of the call's
outputs, and has ended when all of its inputs have their gradients.

Graphs hold the hooks for these events, and may live long, for instance if a module keeps its loss.
Python's garbage collector does not see through them, so no graph may refer to anything that holds a
module.

In each backward pass the gradients of a unit go the same way::

    expect -> take, take, ... -> reduce -> finish -> install
    expect -> take, take, ... -> keep_own                       (within ``no_sync``)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from lightning_zero.engine.weights import Residency, Shows, Weights
from lightning_zero.parameters import FlatParameters
from lightning_zero.tensors import internals, outside, span, tensors_in

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
        has_ended: Whether the backward of any call has ended in this pass.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self.running: list[Call] = []
        self.awaited: set[Call] = set()
        self.in_backward: set[Call] = set()
        self.have_run = self.has_ended = False

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
            _on_leaf_grads(inputs, functools.partial(ended, call, None))

    def end(self, outputs: Sequence[Tensor], began: Callable[[Call, Any], None]) -> bool:
        """End the innermost forward; return whether its ``outputs`` can get gradients.

        ``began`` is called with the call at the first of these, in each backward pass.
        """
        call = self.running.pop()
        if any(map(internals.is_func_wrapper, outputs)):
            return True  # a transform of `torch.func` has backward passes of its own
        tracked = [t for t in outputs if t.requires_grad and t.grad_fn is not None]
        if not tracked:
            return False
        # A hook on a view is lost when the view is changed in place; one on its base stays.
        for tensor in tuple(tracked):
            base = tensor._base
            if base is not None and base.requires_grad:
                tracked.append(base)
        on_grads(tracked, functools.partial(began, call), "any")
        return True

    @property
    def have_passed(self) -> bool:
        """Return whether the backward of every call has ended, so that no gradient is expected."""
        return self.has_ended and not self.awaited

    def end_pass(self) -> None:
        """End a backward pass: no earlier call is awaited any more."""
        self.has_ended = False
        self.awaited, self.in_backward = set(), set()


def on_grads(tensors: Sequence[Tensor], call: Callable[[Any], None], mode: Any) -> None:
    """Call ``call`` when any of some tensors has a gradient, or all have, in each pass."""
    if len(tensors) == 1:
        # Equivalent to torch's multi-grad hook, at half the cost.
        tensors[0].register_hook(call)  # type: ignore[no-untyped-call]
    else:
        register_multi_grad_hook(tensors, call, mode=mode)


def _on_leaf_grads(leaves: list[Tensor], done: Callable[[], None]) -> None:
    """Call ``done`` once every leaf has had a gradient."""
    waiting: dict[int, RemovableHandle] = {}

    def note(number: int, _: Tensor) -> None:
        waiting.pop(number).remove()
        if not waiting:
            done()

    for number, leaf in enumerate(leaves):
        hook = functools.partial(note, number)
        waiting[number] = leaf.register_hook(hook)  # type: ignore[no-untyped-call]


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a bound ``method`` as a function, for graphs, that does not keep its object alive.

    Once the object is gone, a call raises :func:`too_late`.
    """
    # Not `WeakMethod`, which would run more Python code for every event of every unit.
    found, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*args: Any) -> None:
        alive = found()
        if alive is None:
            raise too_late()
        if internals.function_modes() or internals.dispatch_modes() or internals.func_level():
            with outside():
                function(alive, *args)
        else:
            function(alive, *args)

    return call


def too_late() -> RuntimeError:
    """Return the error for a backward pass whose weights are gone for good."""
    return RuntimeError(
        "A backward pass goes through a forward that ran before the module's training ended. The"
        " weights that it saved have been released, and gradients are no longer averaged over the"
        " ranks. Run the forward again."
    )


def with_grad(value: Any) -> list[Tensor]:
    """Return the tensors inside ``value`` that require a gradient, or wrap one that may."""
    return [t for t in tensors_in(value) if t.requires_grad or internals.is_func_wrapper(t)]


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
        are_complete: Whether all that want a gradient got one in this backward pass.
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
        """Return whether the weights are whole and the end of the backward will release them."""
        weights = self.weights
        is_gone = weights.residency is Residency.RELEASED
        return weights.reshards and not (is_gone or weights.is_pinned or not self.calls.awaited)

    def pin(self) -> None:
        """Keep the weights whole until the end of the step, for a use that no event announces."""
        self.weights.is_pinned = True
        self.calls.have_run = True

    def inline(self) -> bool:
        """Return whether a compiled graph may contain the unit: its weights are whole beforehand.

        Torch's compiler traces this, and replays its side effects whenever the graph runs.
        """
        if self.weights.shows is not Shows.WEIGHTS or self.weights.is_cast:
            return False
        self.is_inlined = True
        self.calls.have_run = True
        return True

    # -- gradients -------------------------------------------------------------------------------

    def expect(self, *, sends: bool) -> None:
        """Begin to take the gradients of a backward pass, which averages them if it ``sends``."""
        self.wants = []
        for flat in self.flat_parameters:
            flat.gradients.expect(sends=sends)
            self.wants += flat.gradients.wants
        self._missing = set(itertools.compress(itertools.count(), self.wants))
        self.are_complete = not self._missing

    def take(self, index: int) -> bool:
        """Take the gradient that autograd just finished; return whether all are there now."""
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
