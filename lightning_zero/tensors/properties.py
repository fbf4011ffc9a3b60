"""Torch's functions, grouped by what they need of a tensor's memory.

========== ====================================================================================
FACTS      read any metadata
METADATA   work on a placeholder that has the parameter's shape but another stride
CREATING   the METADATA functions that create a tensor, of the parameter's dtype by default
========== ====================================================================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_zero.tensors import internals

_READABLE_ATTRIBUTES = [
    "shape", "dtype", "device", "layout", "requires_grad", "grad", "grad_dtype", "names", "ndim",
    "is_leaf", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn",
    "is_nested", "is_xpu", "is_mps", "is_xla", "itemsize", "nbytes", "grad_fn", "output_nr",
    "retains_grad", "_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks",
]  # fmt: skip
_WRITABLE_ATTRIBUTES = ("requires_grad", "grad", "grad_dtype", "names", "_backward_hooks")
_FACT_METHODS = [
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point",
    "is_complex", "get_device", "stride", "storage_offset", "__hash__", "__len__",
]  # fmt: skip
_METHODS = ["requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "is_same_size"]
_CREATING_METHODS = ["new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"]
_FACT_FUNCTIONS = ["is_floating_point", "is_complex", "numel", "is_tensor"]
_CREATING_FUNCTIONS = [
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
]  # fmt: skip


def _facts() -> frozenset[Any]:
    """Return the functions that read metadata."""
    attributes = [getattr(Tensor, name) for name in _READABLE_ATTRIBUTES if hasattr(Tensor, name)]
    return frozenset(
        [attribute.__get__ for attribute in attributes]
        + [getattr(Tensor, name) for name in _FACT_METHODS]
        + [getattr(torch, name) for name in _FACT_FUNCTIONS]
    )


def _metadata() -> frozenset[Any]:
    """Return the functions that need only a parameter's metadata, except its stride."""
    attributes = [getattr(Tensor, name) for name in _WRITABLE_ATTRIBUTES if hasattr(Tensor, name)]
    return (FACTS - {Tensor.stride, Tensor.storage_offset}).union(
        [attribute.__set__ for attribute in attributes],
        [getattr(Tensor, name) for name in _METHODS],
        [torch.is_same_size],
        CREATING,
    )


_DATA: Any = Tensor.data

CREATING = frozenset(
    [getattr(Tensor, name) for name in _CREATING_METHODS]
    + [getattr(torch, name) for name in _CREATING_FUNCTIONS]
)
FACTS = _facts()
METADATA = _metadata()
GET_DATA, SET_DATA = _DATA.__get__, _DATA.__set__


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Assign ``tensor.data``, even for a subclass that intercepts the assignment."""
    with internals.as_plain_tensors():
        SET_DATA(tensor, data)
