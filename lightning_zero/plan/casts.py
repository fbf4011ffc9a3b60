"""The parameters that forward may read in half precision because autocast casts them anyway.

Autocast casts the inputs of its operations at every call. A parameter whose only use is one such
operation may as well arrive in half precision: no number changes. That is known of torch's own
modules (:data:`_KINDS`). All others stay in fp32, which is always correct and costs only bytes.

A parameter with two names is used twice: autocast casts it twice, and adds its gradients in fp32.
The same holds for the weights of a recurrent layer, which are used once per element of a sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import Parameter

CAST_WEIGHTS = ("autocast", "all", "none")
"""The choices of which weights mixed precision casts."""

_KINDS = {
    "torch.nn.modules.linear.Linear": ("weight", "bias"),
    "torch.nn.modules.linear.NonDynamicallyQuantizableLinear": ("weight", "bias"),
    **{
        f"torch.nn.modules.conv.Conv{kind}{dims}d": ("weight", "bias")
        for kind in ("", "Transpose")
        for dims in (1, 2, 3)
    },
    "torch.nn.modules.activation.MultiheadAttention": (
        "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias",
    ),
    "transformers.pytorch_utils.Conv1D": ("weight", "bias"),
}  # fmt: skip
"""Parameters that autocast casts, by exact class: a subclass may have another forward."""

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def uncast_parameters(root: nn.Module, choice: str = "autocast") -> set[int]:
    """Return the ids of the parameters that mixed precision leaves in fp32.

    Args:
        root: The model.
        choice: ``"autocast"`` casts the parameters that autocast is known to cast, ``"all"`` those
            that torch accepts in half precision, ``"none"`` none.
    """
    if choice == "all":
        # Torch's normalizations reject weights of less precision than input or statistics.
        norms = (m for m in root.modules() if isinstance(m, _NORMS))
        return {id(p) for norm in norms for p in norm.parameters(recurse=False)}
    cast = set() if choice == "none" else {id(p) for p in _known_to_be_cast(root)}
    return {id(p) for p in root.parameters() if p.dtype is torch.float32} - cast


def _known_to_be_cast(root: nn.Module) -> Iterator[Parameter]:
    """Yield the parameters that autocast is known to cast, exactly once."""
    uses = Counter(id(p) for _, p in root.named_parameters(remove_duplicate=False))
    for module in root.modules():
        cls = type(module)
        names = (
            () if "forward" in vars(module) else _KINDS.get(f"{cls.__module__}.{cls.__name__}", ())
        )
        for parameter in map(module._parameters.get, names):
            if parameter is not None and uses[id(parameter)] == 1:
                yield parameter
