"""What the engine hangs on a module, and what becomes of it when the module is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Hook:
    """Calls ``function`` for ``module`` alone: copies and pickles of the module keep it inert.

    A copy that was made during training has weights of its own; were it to gather those of the
    original, whoever calls the copy on one rank only would wait for the others for ever.
    """

    def __init__(self, module: nn.Module | None, function: Callable[..., Any] | None) -> None:
        self._module = module
        self._function = function

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What ``function`` says of ``module``; nothing of any other."""
        if self._function is not None and module is self._module:
            return self._function(module, *args, **kwargs)
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return _inert()

    def __reduce__(self) -> tuple[Callable[[], Hook], tuple[()]]:
        return _inert, ()


def _inert() -> Hook:
    return Hook(None, None)
