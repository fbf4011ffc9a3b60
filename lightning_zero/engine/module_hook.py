"""The engine's hooks on modules and parameters, safe to copy and to compile.

The hooks of a module that is compiled on its own run around the compiled code. Where modules are
compiled together with the code that calls them, torch's compiler traces their hooks: it breaks the
graph at each hook that must run, and skips those that report that they are not needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code

from lightning_zero.engine.unit import Unit
from lightning_zero.optimizer import Removable
from lightning_zero.parameters import hook_last, unfollowed
from lightning_zero.tensors import internals, outside


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
        if self._releases and internals.is_tracing() is not None:
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


class Hooks:
    """The hooks that the engine registers on modules and parameters, to be removed together.

    Args:
        on_grad: Called when autograd has finished a gradient, with the unit, the index of its
            parameter, and what torch passes.

    Attributes:
        handles: The handles of all hooks.
        frozen: For each unit, the indices of parameters without a hook: they require no gradient.
    """

    def __init__(self, units: Iterable[Unit], on_grad: Callable[..., None]) -> None:
        self.handles: list[Removable] = []
        self.frozen = {unit: list(range(len(unit.parameters))) for unit in units}
        self._on_grad = on_grad
        self.hook_unfrozen()

    def add(
        self,
        module: nn.Module,
        before: Callable[..., Any],
        after: Callable[..., Any],
        needless: tuple[Callable[[], bool] | None, Callable[[], bool] | None] = (None, None),
        *,
        releases: bool = False,
        with_kwargs: bool = False,
    ) -> None:
        """Call ``before`` and ``after`` around a module's forward, unless they are needless."""
        first = Hook(module, before, needless[0], releases=releases)
        self.handles += [
            module.register_forward_pre_hook(first, prepend=True, with_kwargs=with_kwargs),
            module.register_forward_hook(Hook(module, after, needless[1]), always_call=True),
        ]

    def hook_unfrozen(self) -> None:
        """Hook the gradients of all parameters that require one now."""
        for unit in list(self.frozen):
            self.hook_grads(unit)

    def hook_grads(self, unit: Unit) -> None:
        """Hook the gradients of a unit, including those of parameters unfrozen since last time."""
        frozen = []
        for index in self.frozen.pop(unit, ()):
            parameter = unit.parameters[index]
            if parameter.requires_grad:
                hook = functools.partial(self._on_grad, unit, index)
                self.handles.append(hook_last(parameter, hook))
            else:
                frozen.append(index)
        if frozen:
            self.frozen[unit] = frozen

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
