"""The calls of a unit's forward, and the events of autograd that mark their backward.

Torch has no event for the backward of a module. It begins with the first gradient of the call's
outputs, and has ended when all of its inputs have their gradients.

Graphs hold the hooks for these events, and may live long, for instance if a module keeps its loss.
Python's garbage collector does not see through them, so no graph may refer to anything that holds a
module.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from lightning_zero.tensors import internals, outside, tensors_in


Call = tuple[int, int]
"""One call of a unit's forward: the unit's index, and a number. No object: a graph holds it."""

_numbers = itertools.count()


class Events(NamedTuple):
    """Callbacks for the events of a call's backward.

    Attributes:
        began: Called at the first gradient of an output, with the call and the gradients.
        ended: Called when the inputs have their gradients, with the call and the gradients.
        leaves_done: Called instead of ``ended`` if all inputs are leaves. A leaf may have its
            gradient before the rest of the call's backward is done, so this alone is not the end.
    """

    began: Callable[[Call, Any], None]
    ended: Callable[[Call, Any], None]
    leaves_done: Callable[[Call], None]


class Calls:
    """The calls of a unit's forward, each from its beginning to the end of its backward.

    Args:
        unit: The unit's index.

    Attributes:
        running: The calls whose forward is running, the innermost last.
        awaited: The calls whose inputs' gradients will mark the end of their backward.
        in_backward: The calls whose backward has begun and not ended.
        have_run: Whether this rank used the unit's weights in this step, by a call or otherwise.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self.running: list[Call] = []
        self.awaited: set[Call] = set()
        self.in_backward: set[Call] = set()
        self.have_run = False
        self._has_ended = False

    def begin(self, arguments: Any, events: Events) -> None:
        """Begin a forward, and hook the gradients of the inputs among its ``arguments``."""
        self.have_run = True
        call = self._unit, next(_numbers)
        self.running.append(call)
        for inputs in _inputs(arguments) if arguments else ():
            self.awaited.add(call)
            inner = [tensor for tensor in inputs if not tensor.is_leaf]
            if len(inner) == 1:
                # Equivalent to torch's multi-grad hook, at half the cost.
                inner[0].register_hook(functools.partial(events.ended, call))  # type: ignore[no-untyped-call]
            elif inner:
                register_multi_grad_hook(inner, functools.partial(events.ended, call), mode="all")
            else:
                # Torch's multi-grad hook does not support leaves in `torch.autograd.grad`.
                _on_leaf_grads(inputs, functools.partial(events.leaves_done, call))

    def end(self, outputs: Iterable[Tensor], events: Events) -> bool:
        """End the innermost forward; return whether its ``outputs`` can get gradients."""
        call = self.running.pop()
        outputs = list(outputs)
        if any(map(internals.is_func_wrapper, outputs)):
            outputs = [t for tensors in _by_level(outputs) for t in tensors]
        tracked = [t for t in outputs if t.requires_grad and t.grad_fn is not None]
        if not tracked:
            return False
        # A hook on a view is lost when the view is changed in place; one on its base stays.
        for tensor in tuple(tracked):
            base = tensor._base
            if base is not None and base.requires_grad:
                tracked.append(base)
        if len(tracked) == 1:
            tracked[0].register_hook(functools.partial(events.began, call))  # type: ignore[no-untyped-call]
        else:
            register_multi_grad_hook(tracked, functools.partial(events.began, call), mode="any")
        return True

    def end_backward(self, call: Call, *, is_certain: bool = True) -> None:
        """Note a call's backward as ended; if not ``is_certain``, no event will mark its end."""
        self.awaited.discard(call)
        self.in_backward.discard(call)
        self._has_ended |= is_certain

    @property
    def have_passed(self) -> bool:
        """Return whether the backward of every call has ended, so that no gradient is expected."""
        return self._has_ended and not self.awaited

    def end_pass(self) -> None:
        """End a backward pass: no earlier call is awaited any more."""
        self._has_ended = False
        self.awaited, self.in_backward = set(), set()

    def abandon(self) -> None:
        """Forget all calls, including those that are running."""
        self.running = []
        self.end_pass()


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
    """Return the tensors inside ``value`` that require a gradient."""
    found = tensors_in(value)
    if any(map(internals.is_func_wrapper, found)):
        return [tensor for tensors in _by_level(found) for tensor in tensors]
    return [tensor for tensor in found if tensor.requires_grad]


def _by_level(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Return the tensors that require a gradient, those of each ``torch.func`` transform apart.

    A transform (``grad``, ``vmap``) wraps tensors in others, and each has backward passes of its
    own, which lead through tensors of its level only.
    """
    found: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.requires_grad:
            found.setdefault(internals.func_level_of(tensor), []).append(tensor)
        while internals.is_func_wrapper(tensor):
            tensor = internals.without_func_wrapper(tensor)
            if tensor.requires_grad:
                found.setdefault(internals.func_level_of(tensor), []).append(tensor)
    return found.values()


def _inputs(value: Any) -> Iterable[list[Tensor]]:
    """Return the tensors in a module's arguments whose gradients mark the end of its backward.

    An object passed from module to module may hold tensors of others, such as the keys and values
    that a Transformers decoder caches, whose gradients come much later. Tensors inside objects
    therefore count only if there are no other ones.
    """
    given = tensors_in(value, within_objects=False)
    if any(map(internals.is_func_wrapper, given)):
        return _by_level(given)
    found = [tensor for tensor in given if tensor.requires_grad] or with_grad(value)
    return [found] if found else []
