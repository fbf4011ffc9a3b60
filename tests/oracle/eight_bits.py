"""Tensors that wrap tensors: numbers in eight bits, as libraries keep frozen weights and states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

BLOCK = 4


class EightBits(Tensor):
    """Integers with a scale for each block; all but copying it computes with its values."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> Any:
        how = {"dtype": scales.dtype, "device": codes.device}
        made = Tensor._make_wrapper_subclass(cls, codes.shape, **how)  # type: ignore[attr-defined]
        made.codes, made.scales = codes, scales
        return made

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, *_: Any) -> EightBits:
        return cls(inner["codes"], inner["scales"])

    @classmethod
    def zeros(cls, like: Tensor) -> EightBits:
        scales = torch.zeros(like.numel() // BLOCK, dtype=like.dtype, device=like.device)
        return cls(torch.zeros_like(like, dtype=torch.int8), scales)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        if func is aten.copy_.default and isinstance(args[0], cls):
            codes, scales = encoded(args[1])
            args[0].codes.copy_(codes)
            args[0].scales.copy_(scales)
            return args[0]
        is_cast = kwargs.get("dtype") not in (None, args[0].dtype)
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default) and not is_cast:
            given = {key: value for key, value in kwargs.items() if key == "device"}
            return cls(func(args[0].codes, **given), func(args[0].scales, **given))
        return func(*tree_map(decoded, args), **tree_map(decoded, kwargs))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


# A file is read with the classes only that torch knows as safe.
torch.serialization.add_safe_globals([EightBits])


def encoded(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers, and the scales of their blocks."""
    if isinstance(values, EightBits):
        return values.codes, values.scales
    blocks = values.reshape(-1, BLOCK)
    scales = blocks.abs().amax(1).clamp(min=1e-8) / 127
    return (blocks / scales[:, None]).round().view(values.shape).to(torch.int8), scales


def decoded(value: Any) -> Any:
    """Return the values of numbers in eight bits, and anything else as it is."""
    if not isinstance(value, EightBits):
        return value
    blocks = value.codes.reshape(-1, BLOCK) * value.scales[:, None]
    return blocks.view(value.shape)


def quantize(linear: nn.Linear, *, is_frozen: bool = True) -> None:
    """Keep a layer's weight in eight bits."""
    weight = EightBits(*encoded(linear.weight.detach()))
    linear.weight = nn.Parameter(weight, requires_grad=not is_frozen)
