"""What the engine hangs on a module, and what becomes of it when the module is copied or compiled.

A module that is compiled by itself has its hooks around the compiled code. Where modules are
compiled together with the code that calls them, torch's compiler comes across their hooks: it ends
its graph at each that must run, and leaves out those that say that they are not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code


class Hook:
    """Calls ``function`` for ``module`` alone: copies and pickles of the module keep it inert.

    A copy that was made during training has weights of its own; were it to gather those of the
    original, whoever calls the copy on one rank only would wait for the others for ever.

    Args:
        module: Whose calls ``function`` is for.
        function: Gets what torch gives to a module's hook.
        is_needless: Whether a call from compiled code may be left out. Torch's compiler reads it,
            makes the code anew when it would say something else, and repeats what it notes.
    """

    def __init__(
        self,
        module: nn.Module | None,
        function: Callable[..., Any] | None,
        is_needless: Callable[[], bool] | None = None,
    ) -> None:
        self._module = module
        self._function = function
        self._is_needless = is_needless

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What ``function`` says of ``module``; nothing of any other."""
        if torch.compiler.is_dynamo_compiling():
            is_needless = self._is_needless is not None and self._is_needless()
            return None if is_needless else self._call(module, *args, **kwargs)
        if get_eval_frame_callback() is not None:
            # Between two pieces of compiled code, torch's compiler looks at whatever is called.
            return self._call(module, *args, **kwargs)
        if self._function is not None and module is self._module:
            return self._function(module, *args, **kwargs)
        return None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What ``function`` says of ``module``, hidden from torch's compiler."""
        if self._function is not None and module is self._module:
            return self._function(module, *args, **kwargs)
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return _inert()

    def __reduce__(self) -> tuple[Callable[[], Hook], tuple[()]]:
        return _inert, ()


# Private: torch's public `disable` would end a graph here as well. By itself, around a compiled
# module, a hook is nothing to make code of.
skip_code(Hook.__call__.__code__)


def _inert() -> Hook:
    return Hook(None, None, _always)


def _always() -> bool:
    return True
