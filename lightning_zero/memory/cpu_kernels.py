"""Bytes that kernels on a CPU keep beyond what torch says of them for tensors without data.

Torch predicts shapes and dtypes, and here it predicts less than is kept (torch 2.13):

* a loss is computed for each element and summed up in the same storage, which stays as large;
* a norm of half-precision inputs with fp32 weights keeps its statistics in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_LOSSES = {
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.binary_cross_entropy.default,
}
_WEIGHT_OF_NORM = {
    _aten.native_layer_norm.default: 2,
    _aten.native_group_norm.default: 1,
    _aten.native_batch_norm.default: 1,
}
"""Which argument a norm's weight is."""


def kept_beyond(func: Any, args: tuple[Any, ...], out: Any) -> Iterator[tuple[Tensor, int]]:
    """Yield the outputs of an operation that hold more than they seem to, with the bytes."""
    if func in _LOSSES:
        if out.shape != args[0].shape:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
            yield out, max(0, prod(shape) - 1) * out.itemsize
    elif func in _WEIGHT_OF_NORM:
        weight = args[_WEIGHT_OF_NORM[func]]
        for statistic in out[1:3] if weight is not None else ():
            yield statistic, statistic.numel() * max(0, weight.itemsize - statistic.itemsize)
