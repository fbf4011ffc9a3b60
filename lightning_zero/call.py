"""A call of a unit's forward, and how autograd tells where its backward is.

Torch has no event for the backward of a module. It begins with the first gradient of the call's
outputs, and it has ended when the gradients of its inputs are there.

Graphs hold the hooks that tell, and may be held for long: by a module that keeps its loss. Python's
garbage collector does not see through them, so nothing that holds a module hangs on a graph.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from lightning_zero.tensors import tensors_in
from lightning_zero.unit import Unit


class Call:
    """One call of a unit's forward."""

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)

    @property
    def unit(self) -> Unit:
        """The unit; whoever is told of a call holds all units."""
        unit = self._unit()
        assert unit is not None
        return unit

    def watch_inputs(
        self,
        value: Any,
        *,
        ended: Callable[[Call, Any], None],
        leaves_done: Callable[[Call], None],
    ) -> None:
        """Call ``ended`` when the inputs have their gradients.

        Args:
            value: The arguments of the call.
            ended: What to call when the backward of the call has ended, with it and what torch
                tells.
            leaves_done: What to call in its stead if all inputs are leaves. A leaf may be done
                before the graph behind it is, so by itself it does not tell enough.
        """
        inputs = _inputs(value)
        if not inputs:
            return
        self.unit.awaited.add(self)
        inner = [tensor for tensor in inputs if not tensor.is_leaf]
        if len(inner) == 1:
            # What torch's hook for several tensors would come to, at half the price.
            inner[0].register_hook(functools.partial(ended, self))  # type: ignore[no-untyped-call]
        elif inner:
            register_multi_grad_hook(inner, functools.partial(ended, self), mode="all")
        else:
            # Torch's hook for several tensors takes no leaves in `torch.autograd.grad`.
            self._watch_leaves(inputs, leaves_done)

    def _watch_leaves(self, leaves: list[Tensor], done: Callable[[Call], None]) -> None:
        waiting: dict[int, RemovableHandle] = {}

        def note(number: int, _: Tensor) -> None:
            waiting.pop(number).remove()
            if not waiting:
                done(self)

        for number, leaf in enumerate(leaves):
            hook = functools.partial(note, number)
            waiting[number] = leaf.register_hook(hook)  # type: ignore[no-untyped-call]

    def watch_outputs(
        self, tensors: Iterable[Tensor], *, began: Callable[[Call, Any], None]
    ) -> bool:
        """Call ``began`` at the first gradient of an output; whether there can be one.

        Args:
            tensors: What the call returned.
            began: What to call, with this call and what torch tells.
        """
        watched = [t for t in tensors if t.requires_grad and t.grad_fn is not None]
        if not watched:
            return False
        # A hook on a view is lost when the view is changed in place; one on its base stays.
        for base in [tensor._base for tensor in watched]:
            if base is not None and base.requires_grad:
                watched.append(base)
        if len(watched) == 1:
            watched[0].register_hook(functools.partial(began, self))  # type: ignore[no-untyped-call]
        else:
            register_multi_grad_hook(watched, functools.partial(began, self), mode="any")
        return True


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A bound ``method`` for a graph to call, which does not keep its object alive.

    Called when that one is gone it raises :func:`too_late`.
    """
    # Not `WeakMethod`, which is Python again, for every event of every unit.
    found, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*args: Any) -> None:
        alive = found()
        if alive is None:
            raise too_late()
        function(alive, *args)

    return call


def too_late() -> RuntimeError:
    """What to tell whoever goes backward when the weights that a graph saved are gone."""
    return RuntimeError(
        "A backward pass began from a forward that ran before the module's training ended. The"
        " weights that it saved were given back, and the ranks average no more gradients. Run the"
        " forward again."
    )


def with_grad(value: Any) -> list[Tensor]:
    """The tensors inside ``value`` that want a gradient."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def _inputs(value: Any) -> list[Tensor]:
    """The tensors in a module's arguments whose gradients tell that its backward is done.

    An object may be handed from module to module and hold what others left in it (the keys and
    values that a Transformers decoder caches): gradients that come much later. It counts only where
    no tensor is given otherwise.
    """
    given = [t for t in tensors_in(value, within_objects=False) if t.requires_grad]
    return given or with_grad(value)
