"""Tensors whose values are brought here when they are used, from a file or from other ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_zero.tensors import internals, properties


class ReadOnUse(Tensor):
    """A tensor whose values are read when they are used.

    Attributes:
        value: The whole tensor once it may have been changed, ``None`` before.
    """

    value: Tensor | None

    @abstractmethod
    def read(self) -> Tensor:
        """Return the whole tensor, newly read unless it may have been changed."""

    def keep(self, whole: Tensor, *, is_changed: bool) -> None:
        """Keep what :meth:`read` returned, which was changed or may be from now on."""
        self.value = whole


class ReadingAssigned(TorchFunctionMode):
    """A mode in which ``parameter.data = value`` reads the value.

    Torch asks the class of the parameter only, and would take memory that there is not.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == properties.SET_DATA and isinstance(args[1], ReadOnUse):
            return call_with_values(func, args, kwargs or {})[0]
        return func(*args, **(kwargs or {}))


def call_with_values(
    func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> tuple[Any, list[tuple[ReadOnUse, Tensor]]]:
    """Call ``func`` with whole tensors, and keep those that the caller may change afterwards.

    Returns the result, and each lazy tensor with the whole one that was given in its place.
    """
    versions: list[int] = []
    wholes: list[tuple[ReadOnUse, Tensor]] = []

    def whole(value: Any) -> Any:
        if isinstance(value, ReadOnUse):
            wholes.append((value, (found := value.read())))
            versions.append(internals.version_of(found))
            return found
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(whole(item) for item in value)
        return {k: whole(v) for k, v in value.items()} if type(value) is dict else value

    result = func(*whole(args), **whole(dict(kwargs)))
    for (lazy, found), version in zip(wholes, versions, strict=True):
        # A call without a result changes something: an attribute, or a list of tensors.
        is_changed = internals.version_of(found) != version
        may_be = found.requires_grad or result is None or func is Tensor.data_ptr
        if is_changed or may_be or (result is not found and _shares(result, found)):
            lazy.keep(found, is_changed=is_changed)
    return result, wholes


def _shares(result: Any, tensor: Tensor) -> bool:
    if isinstance(result, (list, tuple)):
        return any(_shares(item, tensor) for item in result)
    # Even a result that is not a tensor may be a view: an array, a storage, an address.
    return not isinstance(result, (bool, int, float, complex, str, torch.Size, type(None))) and (
        not isinstance(result, Tensor)
        or (
            result.layout == torch.strided
            and result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        )
    )
