"""The module that ``fabric.setup`` wraps: its forward is a step of an engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_zero.engine import Engine


class ShardedModule(nn.Module):
    """A module whose forward is a step of an engine.

    Attributes:
        module: The user's module, whose parameters the engine shards.
        engine: The engine.
    """

    def __init__(self, module: nn.Module, engine: Engine) -> None:
        super().__init__()
        self.module = module
        self.engine = engine

    @override
    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; a backward from what it returns finds its weights."""
        with self.engine.step(awaits_backward=torch.is_grad_enabled()) as watch:
            output = self.module(*args, **kwargs)
            watch(output)
            # Lightning asks for `fabric.backward` in place of `loss.backward` of a strategy that
            # would note the loss.
            self.engine.prepare_backward(output)
            return output
