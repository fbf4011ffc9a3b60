"""Which engine owns a parameter, while that engine lives and has not released the parameter.

Owners are not kept alive: parameters outlive their training, and may be trained again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.parameters.living_views import LivingViews
from lightning_zero.tensors import properties


class Owner(Protocol):
    """The object that knows how a resting parameter is read and written."""

    def touch(self, parameters: Sequence[Parameter]) -> None:
        """Make ``parameters``, which are used together, readable."""

    def write(self, parameter: Parameter, value: Tensor) -> None:
        """Store ``value``, of the parameter's shape, as the parameter's new value."""

    def expose(self, parameter: Parameter, *, is_plain: bool = False) -> None:
        """Note that a readable ``parameter`` may be changed without its version counter.

        With ``is_plain``, that it has a plain view, from which an array may be made unnoticed.
        """

    def stop_borrowing(self, parameter: Parameter) -> bool:
        """Put a readable ``parameter`` in memory that is refilled; return whether it has moved."""

    def replace(self, parameter: Parameter, data: Tensor) -> None:
        """Store ``data`` as the new value of a readable ``parameter``, or raise."""

    def gives_back(self, parameter: Parameter) -> bool:
        """Return whether a readable ``parameter``'s memory is released while views may live."""


class NoOwner:
    """The owner of a parameter that was released, or whose owner is gone."""

    def __init__(self, name: str) -> None:
        self._name = name

    def touch(self, parameters: Sequence[Parameter]) -> None:
        """Raise: a parameter that was left at rest cannot be made readable any more."""
        raise RuntimeError(
            f"Parameter {self._name!r} was left sharded when training ended:"
            " restore_weights=False was set, other ranks had died, or the engine was never closed."
            " Load the weights from a checkpoint into a new module, or train with"
            " restore_weights=True."
        )

    def write(self, parameter: Parameter, value: Tensor) -> None:
        """Raise as :meth:`touch` does: there is no memory for the value."""
        self.touch([parameter])

    def expose(self, parameter: Parameter, *, is_plain: bool = False) -> None:
        """Do nothing: there are no masters to keep up to date."""

    def stop_borrowing(self, parameter: Parameter) -> bool:
        """Return ``False``: readable memory stays."""
        return False

    def replace(self, parameter: Parameter, data: Tensor) -> None:
        """Assign ``data`` as in plain torch."""
        properties.set_data(parameter, data)

    def gives_back(self, parameter: Parameter) -> bool:
        """Return ``False``: readable memory stays."""
        return False


class Ownership:
    """The tie of a parameter to its owner, until the owner releases it or is gone.

    Args:
        owner: The owner, not kept alive.
        name: The parameter's qualified name.
        dtype: The dtype of the parameter's master.
        stride: The parameter's stride before it was owned.

    Attributes:
        views: The living views of the parameter.
        last_hook: The ``id`` of the owner's hook that takes gradients; ``None`` without one.
    """

    __slots__ = ("_owner", "dtype", "last_hook", "name", "stride", "views")

    def __init__(
        self, owner: Owner, name: str, dtype: torch.dtype, stride: tuple[int, ...]
    ) -> None:
        self._owner: Callable[[], Owner | None] = weakref.ref(owner)
        self.name = name
        self.views = LivingViews()
        self.last_hook: int | None = None
        self.dtype, self.stride = dtype, stride

    @property
    def owner(self) -> Owner:
        """The owner, or a :class:`NoOwner` in its place."""
        owner = self._owner()
        return NoOwner(self.name) if owner is None else owner

    def end(self) -> None:
        """Release the parameter."""
        self._owner = lambda: None


_ownerships: dict[int, Ownership] = {}
"""The last ownership of each living parameter, by the parameter's ``id``."""


def take(parameter: Parameter, owner: Owner, name: str, dtype: torch.dtype) -> Ownership:
    """Give ``parameter``, whose master has ``dtype``, to ``owner``."""
    key = id(parameter)
    if key not in _ownerships:
        # An id is valid only while its parameter lives. Torch's own dictionary with weak keys would
        # cost every reshard more than all the rest of it.
        weakref.finalize(parameter, _ownerships.pop, key, None)
    _ownerships[key] = Ownership(owner, name, dtype, parameter.stride())
    return _ownerships[key]


def ownership_of(parameter: Parameter) -> Ownership:
    """Return the last ownership of a parameter that has had one."""
    return _ownerships[id(parameter)]


def owner_of(parameter: Parameter) -> Owner:
    """Return the owner of a parameter that has had one."""
    return _ownerships[id(parameter)].owner
