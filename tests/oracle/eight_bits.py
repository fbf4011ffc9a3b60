"""Weights in eight bits, as libraries of quantization have them: tensors that wrap tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class EightBits(Tensor):
    """A matrix as integers with a scale; all but copying it computes with its values."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> EightBits:
        made: EightBits = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def of(cls, values: Tensor) -> EightBits:
        scale = values.detach().abs().amax() / 127
        return cls((values.detach() / scale).round().to(torch.int8), scale)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].codes.clone(), args[0].scale.clone())
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            found = args[1] if isinstance(args[1], cls) else cls.of(args[1])
            args[0].codes.copy_(found.codes)
            args[0].scale.copy_(found.scale)
            return args[0]
        args, kwargs = tree_map(_values, (args, kwargs or {}))
        return func(*args, **kwargs)


def _values(one: Any) -> Any:
    return one.codes * one.scale if isinstance(one, EightBits) else one


def quantize(linear: nn.Linear, *, is_frozen: bool = True) -> None:
    """Keep a layer's weight in eight bits."""
    linear.weight = nn.Parameter(EightBits.of(linear.weight), requires_grad=not is_frozen)
