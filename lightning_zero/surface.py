"""What can be done to a tensor, by what it needs of the tensor's memory.

========== ====================================================================================
METADATA   tells about a tensor without reading it
HIDING     gives the memory to something whose changes raise no version
POINTING   gives the memory's address to something that does not keep torch from freeing it
VIEWING    methods and attributes that may be another tensor over the same memory
========== ====================================================================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_READABLE_ATTRIBUTES = [
    "shape",
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "grad",
    "grad_dtype",
    "names",
    "ndim",
    "is_leaf",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_sparse",
    "is_quantized",
    "is_mkldnn",
    "is_nested",
    "is_xpu",
    "is_mps",
    "is_xla",
    "itemsize",
    "nbytes",
    "grad_fn",
    "output_nr",
    "retains_grad",
    "_version",
    "_base",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
]
_WRITABLE_ATTRIBUTES = ("requires_grad", "grad", "grad_dtype", "names", "_backward_hooks")
_METHODS = [
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "is_floating_point",
    "is_complex",
    "get_device",
    "requires_grad_",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "__hash__",
    "__len__",
    "is_same_size",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_tensor",
]
_FUNCTIONS = [
    "is_floating_point",
    "is_complex",
    "numel",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "is_tensor",
    "is_same_size",
]

_VIEWING_METHODS = [
    "__array__",
    "__dlpack__",
    "__getitem__",
    "_neg_view",
    "adjoint",
    "as_strided",
    "as_subclass",
    "broadcast_to",
    "chunk",
    "diagonal",
    "detach",
    "dsplit",
    "expand",
    "expand_as",
    "flatten",
    "hsplit",
    "movedim",
    "moveaxis",
    "narrow",
    "new",
    "numpy",
    "permute",
    "ravel",
    "reshape",
    "reshape_as",
    "resize",
    "resize_as",
    "select",
    "slice_inverse",
    "split",
    "split_with_sizes",
    "squeeze",
    "swapaxes",
    "swapdims",
    "t",
    "tensor_split",
    "transpose",
    "unbind",
    "unfold",
    "unsafe_chunk",
    "unsafe_split",
    "unsafe_split_with_sizes",
    "unsqueeze",
    "view",
    "view_as",
    "vsplit",
]


def _metadata() -> frozenset[Any]:
    """Everything that tells about a parameter without reading its data."""
    allowed: set[Any] = {torch.Tensor.__len__}
    for name in _READABLE_ATTRIBUTES:
        if hasattr(Tensor, name):
            allowed.add(getattr(Tensor, name).__get__)
    for name in _WRITABLE_ATTRIBUTES:
        if hasattr(Tensor, name):
            allowed.add(getattr(Tensor, name).__set__)
    allowed.update(getattr(Tensor, name) for name in _METHODS)
    allowed.update(getattr(torch, name) for name in _FUNCTIONS)
    return frozenset(allowed)


_DATA: Any = Tensor.data
_CUDA_ARRAY: Any = Tensor.__cuda_array_interface__

METADATA = _metadata()
GET_DATA, SET_DATA = _DATA.__get__, _DATA.__set__
POINTING = {Tensor.__dlpack__, _CUDA_ARRAY.__get__}
HIDING = {GET_DATA, Tensor.numpy, Tensor.__array__} | POINTING
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
"""Attributes that are such, and what they are to dynamo, which would not find torch's own."""
