"""The engine's hooks on modules and parameters, also when a module is copied or compiled.

A module that is compiled by itself has its hooks around the compiled code. Where modules are
compiled together with the code that calls them, torch's compiler comes across their hooks: it ends
its graph at each that must run, and leaves out those that say that they are not needed.
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
from lightning_zero.parameters import guards


class Hook:
    """Calls ``function`` for ``module`` alone: copies and pickles of the module have an inert one.

    A copy that was made during training has weights of its own; were it to gather those of the
    original, a call of the copy on one rank only would wait for the others for ever.

    Args:
        module: Whose calls ``function`` is for.
        function: Gets what torch gives to a module's hook.
        is_needless: Whether a call from compiled code may be left out. Torch's compiler reads it,
            makes the code anew when it would say something else, and repeats what it notes.
    """

    def __init__(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        is_needless: Callable[[], bool] | None = None,
    ) -> None:
        self.module = module
        self._function = function
        self._is_needless = is_needless

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` for ``module``; do nothing for any other."""
        if torch.compiler.is_dynamo_compiling():
            is_needless = self._is_needless is not None and self._is_needless()
            return None if is_needless else self._call(module, *args, **kwargs)
        if get_eval_frame_callback() is not None:
            # Between two pieces of compiled code, torch's compiler looks at whatever is called.
            return self._call(module, *args, **kwargs)
        return self._function(module, *args, **kwargs) if module is self.module else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` for ``module``, hidden from torch's compiler."""
        return self._function(module, *args, **kwargs) if module is self.module else None

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _inert, ()


# Private: torch's public `disable` would end a graph here as well. By itself, around a compiled
# module, a hook is nothing to make code of.
skip_code(Hook.__call__.__code__)


def _inert() -> Callable[..., None]:
    """Return what a copy has in the place of a hook."""
    return _do_nothing


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


class Hooks:
    """The hooks that the engine registers, on modules and on parameters, to be removed together.

    Args:
        on_grad: Called with a unit, the index of its parameter and what torch passes, when
            autograd has finished a gradient.

    Attributes:
        handles: The handles of all hooks.
        frozen: The parameters of each unit that want no gradient yet and have no hook, by index.
    """

    def __init__(self, units: Iterable[Unit], on_grad: Callable[..., None]) -> None:
        self.handles: list[Removable] = []
        self.frozen = {unit: list(range(len(unit.gradients.parameters))) for unit in units}
        self._on_grad = on_grad
        self.hook_unfrozen()

    def add(self, before: Hook, after: Hook, *, with_kwargs: bool = False) -> None:
        """Call ``before`` and ``after`` around the forward of their module."""
        module = before.module
        self.handles += [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=with_kwargs),
            module.register_forward_hook(after, always_call=True),
        ]

    def hook_unfrozen(self) -> None:
        """Listen for gradients of all parameters that want one now."""
        for unit in list(self.frozen):
            self.hook_grads(unit)

    def hook_grads(self, unit: Unit) -> None:
        """Listen for gradients of a unit, also of parameters that were unfrozen since last time."""
        frozen = []
        for index in self.frozen.pop(unit, ()):
            parameter = unit.gradients.parameters[index]
            if parameter.requires_grad:
                hook = functools.partial(self._on_grad, unit, index)
                self.handles.append(guards.hook_last(parameter, hook))
            else:
                frozen.append(index)
        if frozen:
            self.frozen[unit] = frozen

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
