"""Inputs that one call of a module shares with other calls, told apart.

The output of an encoder goes into every layer of the decoder, and its gradient is done when the
last of them has gone backward. So it tells none of them that its own backward has ended; the
gradient of an alias that only one call has been given does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call, by place and by name."""


class GivenInputs:
    """The tensors that calls of this step have been given."""

    def __init__(self) -> None:
        self._given: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def forget(self) -> None:
        """Begin a step."""
        self._given.clear()

    def own(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The arguments of a call, in which what an earlier call was given is an alias.

        The first call goes backward last, so the tensor's own gradient tells of it. A tensor that
        comes alone is what the module before has made. Lists and mappings are left alone, which the
        module may want to change.
        """
        tensors = {id(tensor): tensor for tensor in _in_graph((*args, *kwargs.values()))}
        if len(tensors) < 2:
            return args, kwargs
        shared = {key: t for key, t in tensors.items() if self._given.get(key) is t}
        self._given.update(tensors)
        if not shared:
            return args, kwargs
        aliases = {key: tensor.view_as(tensor) for key, tensor in shared.items()}
        return _with(args, aliases), {key: _with(value, aliases) for key, value in kwargs.items()}


def _in_graph(value: Any) -> Iterator[Tensor]:
    if type(value) is tuple:
        for item in value:
            yield from _in_graph(item)
    elif type(value) is Tensor and value.grad_fn is not None and _can_be_viewed(value):
        yield value


def _can_be_viewed(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_nested


def _with(value: Any, aliases: dict[int, Tensor]) -> Any:
    """``value`` with the aliases of what is in it, the same for the same tensor."""
    if type(value) is tuple:
        return tuple(_with(item, aliases) for item in value)
    return aliases.get(id(value), value)
