"""The classes of one group's parameters, and the data that they show, by turns."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.parameters.guards import Resting, Whole, unguard
from lightning_zero.parameters.ownership import Owner, take
from lightning_zero.plan import Home
from lightning_zero.tensors import internals, lasting_tensors, properties


@functools.cache
def _class(mixin: type, cls: type[Parameter]) -> type[Parameter]:
    name = f"Resting{cls.__name__}" if mixin is Resting else cls.__name__
    return cast("type[Parameter]", type(name, (mixin, cls), {}))


class ParameterClasses:
    """The classes that the parameters of one owner have by turns, made once for all steps.

    Args:
        named: The parameters, the owner's until :meth:`end`.
        owner: Called at uses of the parameters. It is not kept alive.
        home: Where the weights rest: the dtype and device of the placeholders.
        dtype: The masters'.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        owner: Owner,
        home: Home,
        dtype: torch.dtype,
    ) -> None:
        self._parameters = [parameter for _, parameter in named]
        for parameter in self._parameters:
            unguard(parameter)
        self._ownerships = [take(parameter, owner, name, dtype) for name, parameter in named]
        self._resting, self._whole = (
            [_class(mixin, type(parameter)) for parameter in self._parameters]
            for mixin in (Resting, Whole)
        )
        # One element that stands for any number: NaN where the dtype has one.
        has_nan = home.dtype.is_floating_point or home.dtype.is_complex
        value = float("nan") if has_nan else 0
        with lasting_tensors():
            one = torch.full((), value, dtype=home.dtype, device=home.device)
            self._placeholders = [one.expand(p.shape) for p in self._parameters]

    def rest(self) -> None:
        """Point the parameters at placeholders, and send every use of them to the owner."""
        with internals.as_plain_tensors():
            for parameter, cls, data in zip(
                self._parameters, self._resting, self._placeholders, strict=True
            ):
                properties.SET_DATA(parameter, data)
                parameter.__class__ = cls

    def show(self, views: Sequence[Tensor]) -> None:
        """Point the parameters at ``views``, and let the owner know what gives them away."""
        with internals.as_plain_tensors():
            for parameter, cls, data in zip(self._parameters, self._whole, views, strict=True):
                properties.SET_DATA(parameter, data)
                parameter.__class__ = cls

    def guard(self) -> None:
        """Send every use of the parameters to the owner, their data staying what it is."""
        for parameter, cls in zip(self._parameters, self._resting, strict=True):
            parameter.__class__ = cls

    def end(self) -> None:
        """Let go of the parameters: readable ones are ordinary again, those at rest stay so."""
        for ownership in self._ownerships:
            ownership.end()
        for parameter, cls in zip(self._parameters, self._whole, strict=True):
            if type(parameter) is cls:
                unguard(parameter)
