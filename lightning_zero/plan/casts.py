"""The parameters that forward may read in half precision because autocast casts them anyway.

Autocast casts the inputs of its operations at every call. A parameter whose only use is one such
operation may as well arrive in half precision: no number changes. All others stay in fp32, which is
always correct and costs only bytes. There is no batch before the first forward, so whether a
parameter is cast follows from

1. its module, if that is one of torch's own whose operations autocast lists (:data:`_KINDS`),
2. else a dry run of its module's forward on stand-ins without shapes or data, children not entered.

A parameter with two names is used twice: autocast casts it twice, and adds its gradients in fp32.
The same holds for the weights of a recurrent layer, which are used once per element of a sequence.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn import Parameter

from lightning_zero.plan.cuts import original_class
from lightning_zero.tensors import without_draws

CAST_WEIGHTS = ("autocast", "all", "none")
"""The choices of which weights mixed precision casts."""

_KINDS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("weight", "bias"),
    nn.modules.linear.NonDynamicallyQuantizableLinear: ("weight", "bias"),
    nn.Conv1d: ("weight", "bias"),
    nn.Conv2d: ("weight", "bias"),
    nn.Conv3d: ("weight", "bias"),
    nn.ConvTranspose1d: ("weight", "bias"),
    nn.ConvTranspose2d: ("weight", "bias"),
    nn.ConvTranspose3d: ("weight", "bias"),
    nn.MultiheadAttention: (
        "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias",
    ),
}  # fmt: skip
"""Parameters that autocast casts, by exact class: a subclass may have another forward."""

_OPERATIONS: set[Callable[..., object] | str] = {
    operator.matmul, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.addbmm,
    F.linear, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d,
    F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    "matmul", "mm", "bmm", "addmm", "baddbmm",
}  # fmt: skip
"""Operations that autocast runs in half precision on every device."""

_VIEWS: set[Callable[..., object] | str] = {
    torch.t, torch.transpose, torch.permute, torch.reshape, torch.squeeze, torch.unsqueeze,
    "t", "transpose", "permute", "reshape", "view", "squeeze", "unsqueeze", "contiguous", "flatten",
}  # fmt: skip
"""Operations that only rearrange elements, and pass on each one's gradient unchanged."""

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
    names: dict[int, int] = {}
    for _, parameter in root.named_parameters(remove_duplicate=False):
        names[id(parameter)] = names.get(id(parameter), 0) + 1
    for module in root.modules():
        named = {
            name: parameter
            for name, parameter in module._parameters.items()
            if parameter is not None and names[id(parameter)] == 1
        }
        if not named or "forward" in vars(module):
            continue
        cls = original_class(module)
        cast = _KINDS.get(cls, ())
        # The model's own forward is not traced: it may log and count.
        if module is not root and not cls.__module__.startswith("torch.nn."):
            cast = _cast_in_forward(module)
        yield from (named[name] for name in cast if name in named)


def _cast_in_forward(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the module's own parameters that its forward uses once, and casts."""
    try:
        with without_draws():
            graph = _Uses(param_shapes_constant=True).trace(_copy(module))
    except Exception:  # forward may raise anything on stand-ins without data
        return ()
    reads: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            reads.setdefault(str(node.target), []).append(node)
    return tuple(
        name for name, nodes in reads.items() if len(nodes) == 1 and _is_cast_once(nodes[0])
    )


class _Uses(fx.Tracer):
    """Traces what a forward does with its module's parameters, without entering children."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return ``True`` for every child."""
        return True


def _copy(module: nn.Module) -> nn.Module:
    """Return a copy that shares parameters and children, but nothing else forward may change."""
    one = copy.copy(module)
    for name, value in vars(module).items():
        vars(one)[name] = _own(value)
    return one


def _own(value: Any) -> Any:
    """Copy a tensor that is no parameter, or a container of tensors; return all else as it is."""
    if isinstance(value, Tensor):
        return value if isinstance(value, Parameter) else value.detach().clone()
    if not isinstance(value, dict | list | set):
        return value
    copied: Any = copy.copy(value)
    if isinstance(value, dict):
        copied.update({key: _own(one) for key, one in value.items()})
    elif isinstance(value, list):
        copied[:] = map(_own, value)
    return copied


def _is_cast_once(node: fx.Node) -> bool:
    """Return whether one operation uses a value, perhaps through views, and autocast casts it."""
    if len(node.users) != 1:
        return False
    (user,) = node.users
    arguments = [*user.args, *user.kwargs.values()]
    if arguments.count(node) != 1:
        return False
    if user.target in _VIEWS or (user.target is getattr and user.args[1] in ("T", "mT")):
        return _is_cast_once(user)
    return user.target in _OPERATIONS
