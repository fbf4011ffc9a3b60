"""The engine's hooks on modules and in graphs.

Those of modules are safe to copy and to compile. The hooks of a module that is compiled on its own
run around the compiled code. Where modules are compiled together with the code that calls them,
torch's compiler traces their hooks: it breaks the graph at each hook that must run, and skips those
that report that they are not needed.

Graphs may live long, for instance if a module keeps its loss. Python's garbage collector does not
see through them, so no hook in a graph may refer to anything that holds a module.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from lightning_zero.parameters import unfollowed
from lightning_zero.tensors import internals, outside, tensors_in


class Hook:
    """Calls ``function`` for ``module`` only: copies and pickles of the module get an inert hook.

    A copy made during training has its own weights. If it gathered those of the original, a call of
    the copy on only one rank would wait for the others forever.

    Args:
        module: The module whose calls ``function`` is for.
        function: Called with the arguments of a module hook.
        is_needless: Whether a call from compiled code may be skipped. Torch's compiler traces it,
            recompiles when its answer would change, and replays its side effects.
        releases: Whether weights are released after the call: what transforms of ``torch.func`` and
            ``torch.jit.trace`` hold would then be gone, so these are refused.
    """

    def __init__(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        is_needless: Callable[[], bool] | None = None,
        *,
        releases: bool = False,
    ) -> None:
        self.module = module
        self._releases = releases
        self._function = function
        self._is_needless = is_needless

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` for ``module``; do nothing for any other."""
        if torch.compiler.is_dynamo_compiling():
            is_needless = self._is_needless is not None and self._is_needless()
            return None if is_needless else self._call(module, *args, **kwargs)
        if get_eval_frame_callback() is not None:
            # Between two compiled graphs, torch's compiler looks at every function that is called.
            return self._call(module, *args, **kwargs)
        if self._releases and torch.jit.is_tracing():  # type: ignore[no-untyped-call]
            raise unfollowed("torch.jit.trace")
        if internals.function_modes() or internals.dispatch_modes() or internals.func_level():
            if self._releases and internals.func_level():
                raise unfollowed("A transform of torch.func")
            with outside():
                return self._call(module, *args, **kwargs)
        return self._function(module, *args, **kwargs) if module is self.module else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` for ``module``, hidden from torch's compiler."""
        return self._function(module, *args, **kwargs) if module is self.module else None

    def __reduce__(self) -> Any:
        return functools.partial, (_do_nothing,)


# Private: torch's public `disable` would break graphs here as well. A hook that runs on its own,
# around a compiled module, is not worth compiling.
skip_code(Hook.__call__.__code__)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Replace a hook in a copy."""


def hook_calls(
    module: nn.Module,
    before: Callable[..., Any],
    after: Callable[..., Any],
    needless: tuple[Callable[[], bool] | None, Callable[[], bool] | None] = (None, None),
    *,
    releases: bool = False,
    with_kwargs: bool = False,
) -> list[RemovableHandle]:
    """Call ``before`` and ``after`` around a module's forward, unless they are needless."""
    first = Hook(module, before, needless[0], releases=releases)
    return [
        module.register_forward_pre_hook(first, prepend=True, with_kwargs=with_kwargs),
        module.register_forward_hook(Hook(module, after, needless[1]), always_call=True),
    ]


# -- in graphs ------------------------------------------------------------------------------------


def on_grads(tensors: Sequence[Tensor], call: Callable[[Any], None], mode: Any) -> None:
    """Call ``call`` when any of some tensors has a gradient, or all have, in each pass."""
    if len(tensors) == 1:
        # Equivalent to torch's multi-grad hook, at half the cost.
        tensors[0].register_hook(call)  # type: ignore[no-untyped-call]
    else:
        register_multi_grad_hook(tensors, call, mode=mode)


def on_leaf_grads(leaves: list[Tensor], done: Callable[[], None]) -> None:
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
