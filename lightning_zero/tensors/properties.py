"""Torch's functions, grouped by what they need of a tensor's memory.

========== ====================================================================================
FACTS      read any metadata
METADATA   work on a placeholder that has the parameter's shape but another stride
CREATING   the METADATA functions that create a tensor, of the parameter's dtype by default
EXPOSING   expose the memory to changes that do not raise the version counter
POINTING   hand out the memory's address without keeping torch from freeing the memory
VIEWING    methods and attributes that may return another tensor over the same memory
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

_VIEWING_METHODS = [
    "__array__", "__dlpack__", "__getitem__", "_neg_view", "adjoint", "as_strided", "as_subclass",
    "broadcast_to", "chunk", "diagonal", "detach", "dsplit", "expand", "expand_as", "flatten",
    "hsplit", "movedim", "moveaxis", "narrow", "new", "numpy", "permute", "ravel", "reshape",
    "reshape_as", "resize", "resize_as", "select", "slice_inverse", "split", "split_with_sizes",
    "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unfold",
    "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "unsqueeze", "view", "view_as",
    "vsplit",
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
_CUDA_ARRAY: Any = Tensor.__cuda_array_interface__

CREATING = frozenset(
    [getattr(Tensor, name) for name in _CREATING_METHODS]
    + [getattr(torch, name) for name in _CREATING_FUNCTIONS]
)
FACTS = _facts()
METADATA = _metadata()
GET_DATA, SET_DATA = _DATA.__get__, _DATA.__set__
POINTING = {Tensor.__dlpack__, _CUDA_ARRAY.__get__}
EXPOSING = {GET_DATA, Tensor.numpy, Tensor.__array__} | POINTING
VIEWING = {name: getattr(Tensor, name) for name in _VIEWING_METHODS} | {
    "unflatten": torch.unflatten  # The method calls itself by `super()`, which dynamo cannot trace.
}
VIEWING_ATTRIBUTES = {
    "data": torch.detach,
    "T": lambda tensor: torch.permute(tensor, tuple(reversed(range(tensor.dim())))),
    "mT": lambda tensor: torch.transpose(tensor, -2, -1),
    "H": torch.adjoint,
    "mH": torch.adjoint,
    "real": torch.real,
    "imag": torch.imag,
}
"""Attributes that return views, each with an equivalent function that dynamo can trace."""


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Assign ``tensor.data``, even for a subclass that intercepts the assignment."""
    with internals.as_plain_tensors():
        SET_DATA(tensor, data)
