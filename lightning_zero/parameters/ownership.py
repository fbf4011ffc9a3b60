"""Which engine a parameter belongs to, for as long as that engine lives and has not let go of it.

No owner is kept alive by it: parameters outlive their training, and may go through another one.
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
        """Keep ``value``, of the parameter's shape, as the parameter's new value."""

    def expose(self, parameter: Parameter, *, is_plain: bool = False) -> None:
        """Notice that a readable ``parameter`` may be changed behind its version counter.

        Or that it has a plain view, from which an array may be made that nobody hears of.
        """

    def own(self, parameter: Parameter) -> bool:
        """Let a readable ``parameter`` have memory that views show later; return if it moves."""

    def replace(self, parameter: Parameter, data: Tensor) -> None:
        """Keep ``data`` as the new value of a readable ``parameter``, or raise."""

    def gives_back(self, parameter: Parameter) -> bool:
        """Return whether the memory of a readable ``parameter`` is freed while views may live."""


class NoOwner:
    """Owner of a parameter that its owner has let go of, or whose owner is gone."""

    def __init__(self, name: str) -> None:
        self._name = name

    def touch(self, parameters: Sequence[Parameter]) -> None:
        """Raise: a parameter that was left at rest cannot be made readable any more."""
        raise RuntimeError(
            f"Parameter {self._name!r} was left sharded when its training ended, because of"
            " restore_weights=False, because other ranks had died or because its engine was never"
            " closed. Load its values from a checkpoint into a new module, or train with"
            " restore_weights=True."
        )

    def write(self, parameter: Parameter, value: Tensor) -> None:
        """Raise as :meth:`touch` does: there is no memory for the value."""
        self.touch([parameter])

    def expose(self, parameter: Parameter, *, is_plain: bool = False) -> None:
        """Do nothing: changes of the parameter are its own now."""

    def own(self, parameter: Parameter) -> bool:
        """Return ``False``: readable memory stays."""
        return False

    def replace(self, parameter: Parameter, data: Tensor) -> None:
        """Let ``data`` be what a readable parameter is."""
        properties.set_data(parameter, data)

    def gives_back(self, parameter: Parameter) -> bool:
        """Return ``False``: readable memory stays."""
        return False


class Ownership:
    """The fact that a parameter is an owner's, until that one lets go of it or is gone.

    Args:
        owner: Not kept alive.
        name: The parameter's qualified name.
        dtype: Its master's.
        stride: Its stride when nobody owns it.

    Attributes:
        views: The views of the parameter that live.
        last_hook: The ``id`` of the owner's hook, which takes gradients; ``None`` without one.
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
        """Let go."""
        self._owner = lambda: None


_ownerships: dict[int, Ownership] = {}
"""The last ownership of each parameter that lives, by the parameter's ``id``."""


def take(parameter: Parameter, owner: Owner, name: str, dtype: torch.dtype) -> Ownership:
    """Make ``parameter``, whose master has a ``dtype``, the owner's."""
    key = id(parameter)
    if key not in _ownerships:
        # A number means something only as long as its parameter lives. Torch's own dictionary with
        # weak keys asks more of every reshard than all the rest of it.
        weakref.finalize(parameter, _ownerships.pop, key, None)
    _ownerships[key] = Ownership(owner, name, dtype, parameter.stride())
    return _ownerships[key]


def ownership_of(parameter: Parameter) -> Ownership:
    """Return the last ownership of a parameter that was taken once."""
    return _ownerships[id(parameter)]


def owner_of(parameter: Parameter) -> Owner:
    """Return the owner of a parameter that was taken once."""
    return _ownerships[id(parameter)].owner
