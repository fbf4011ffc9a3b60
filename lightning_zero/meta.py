"""Models that were built on the ``meta`` device get their memory one unit at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn


def materialize(root: nn.Module, modules: Iterable[nn.Module], device: torch.device) -> None:
    """Give memory and initial values to the meta parameters and buffers that ``modules`` own.

    Values come from the module's ``reset_parameters()``, then from the ``_init_weights(module)`` of
    the nearest module around it that has one (the convention of Transformers).

    Raises:
        ValueError: A module owns meta tensors and has neither.
    """
    initializers = dict(_initializers(root))
    for module in modules:
        if not _owns_meta(module):
            continue
        reset = getattr(module, "reset_parameters", None)
        initialize = initializers.get(id(module))
        if reset is None and initialize is None:
            raise ValueError(
                f"A module of class {type(module).__name__} was built on the meta device, but has"
                " no `reset_parameters()` that would give its tensors values. Add one, or build the"
                " model on the CPU."
            )
        _allocate(module, device)
        with torch.no_grad():
            if callable(reset):
                reset()
            if initialize is not None:
                initialize._init_weights(module)  # type: ignore[operator]


def _owns_meta(module: nn.Module) -> bool:
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and tensor.is_meta for tensor in tensors)


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Replace the module's own meta tensors by empty ones; a parameter stays the same object."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.is_meta:
            empty = torch.empty_like(parameter, device=device)
            fresh = nn.Parameter(empty, parameter.requires_grad)
            torch.utils.swap_tensors(parameter, fresh)  # type: ignore[no-untyped-call]
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)


def _initializers(
    module: nn.Module, inherited: nn.Module | None = None
) -> Iterator[tuple[int, nn.Module]]:
    """Each module's id with the nearest module around it that has ``_init_weights``."""
    if callable(getattr(module, "_init_weights", None)):
        inherited = module
    if inherited is not None:
        yield id(module), inherited
    for child in module.children():
        yield from _initializers(child, inherited)
