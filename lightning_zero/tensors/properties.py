"""Torch's functions, grouped by what they need of a tensor's memory.

========== ====================================================================================
FACTS      read any metadata
METADATA   work on a placeholder that has the parameter's shape but another stride
CREATING   create a tensor, of the parameter's dtype by default
========== ====================================================================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_zero.tensors import internals


def _of(owner: Any, names: str) -> set[Any]:
    """Return the members of these names, as far as this version of torch has them."""
    return {getattr(owner, name) for name in names.split() if hasattr(owner, name)}


_READABLE = _of(
    Tensor,
    "shape dtype device layout requires_grad grad grad_dtype names ndim is_leaf is_cuda is_cpu"
    " is_meta is_sparse is_quantized is_mkldnn is_nested is_xpu is_mps is_xla itemsize nbytes"
    " grad_fn output_nr retains_grad _version _base _backward_hooks _post_accumulate_grad_hooks",
)
_WRITABLE = _of(Tensor, "requires_grad grad grad_dtype names _backward_hooks")
_LAYOUT = _of(Tensor, "stride storage_offset")
_DATA: Any = Tensor.data

FACTS = frozenset(
    {attribute.__get__ for attribute in _READABLE}
    | _LAYOUT
    | _of(
        Tensor,
        "size dim ndimension numel nelement element_size is_floating_point is_complex get_device"
        " __hash__ __len__",
    )
    | _of(torch, "is_floating_point is_complex numel is_tensor")
)
METADATA = frozenset(
    (FACTS - _LAYOUT)
    | {attribute.__set__ for attribute in _WRITABLE}
    | _of(Tensor, "requires_grad_ register_hook register_post_accumulate_grad_hook is_same_size")
    | _of(torch, "is_same_size")
)
CREATING = frozenset(
    _of(Tensor, "new_empty new_zeros new_ones new_full new_tensor")
    | _of(torch, "empty_like zeros_like ones_like full_like rand_like randn_like")
)
GET_DATA, SET_DATA = _DATA.__get__, _DATA.__set__


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Assign ``tensor.data``, even for a subclass that intercepts the assignment."""
    with internals.as_plain_tensors():
        SET_DATA(tensor, data)
