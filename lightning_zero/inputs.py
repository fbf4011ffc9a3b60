"""Inputs that one call of a module shares with other calls, told apart.

The output of an encoder goes into every layer of the decoder, and its gradient is done when the
last of them has gone backward. So it tells none of them that its own backward has ended; the
gradient of an alias that only one call has been given does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call, by place and by name."""


def own_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The arguments of a call, in which tensors of a graph are aliases of this call's own.

    Only where there are several: one that comes alone is what the module before has made. Lists and
    mappings are left alone, which the module may want to change.
    """
    shared = {id(tensor): tensor for tensor in _in_graph((*args, *kwargs.values()))}
    if len(shared) < 2:
        return args, kwargs
    aliases = {key: tensor.view_as(tensor) for key, tensor in shared.items()}
    return _with(args, aliases), {key: _with(value, aliases) for key, value in kwargs.items()}


def _in_graph(value: Any) -> Iterator[Tensor]:
    if type(value) is tuple:
        for item in value:
            yield from _in_graph(item)
    elif type(value) is Tensor and value.grad_fn is not None and value.layout is torch.strided:
        yield value


def _with(value: Any, aliases: dict[int, Tensor]) -> Any:
    """``value`` with the aliases of what is in it, the same for the same tensor."""
    if type(value) is tuple:
        return tuple(_with(item, aliases) for item in value)
    return aliases.get(id(value), value)
