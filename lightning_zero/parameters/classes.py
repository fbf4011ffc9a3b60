"""The switching of parameters between classes, and between the data they show."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.parameters.gradients import GRAD
from lightning_zero.parameters.guards import (
    Guarded,
    Readable,
    View,
    make_readable,
    restore_class,
)
from lightning_zero.parameters.local_form import put_values
from lightning_zero.parameters.ownership import Memory, Owner, ownership_of, take
from lightning_zero.plan import Home
from lightning_zero.tensors import internals, lasting_tensors, properties


@functools.cache
def _notice_other_holders() -> None:
    """Make what transforms of ``torch.func`` are given readable: in their wrappers it would rest.

    A wrapper holds what it wraps, as an autograd graph does, so it stays whole. What ``torch.jit``
    traces is used without notice, so it gets copies.
    """
    internals.before_func_wraps(make_readable)
    internals.before_tracing(_copied_if_given_back)


def _copied_if_given_back(value: Any) -> Any:
    parameters = value.parameters() if isinstance(value, torch.nn.Module) else ()
    taken = (p for p in parameters if isinstance(p, (Guarded, Readable)))
    if any(ownership_of(parameter).gives_back for parameter in taken):
        return copy.deepcopy(value).requires_grad_(False)
    return value


@functools.cache
def _class(mixin: type, cls: type[Parameter]) -> type[Parameter]:
    name = f"Guarded{cls.__name__}" if mixin is Guarded else cls.__name__
    made = cast("type[Parameter]", type(name, (mixin, cls), {"grad": GRAD}))
    internals.trace_as_plain(made)
    return made


class ParameterClasses:
    """Switches parameters between guarded and readable, with classes made once for all steps.

    Args:
        named: The parameters, which belong to the owner until :meth:`end`.
        owner: Called when the parameters are used. It is not kept alive.
        memory: Where they lie, in this order, while they are readable. Not kept alive either.
        home: Where the weights rest: the dtype and device of the placeholders.
        dtype: The dtype of the masters.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        owner: Owner,
        memory: Memory,
        home: Home,
        dtype: torch.dtype,
    ) -> None:
        _notice_other_holders()
        self._parameters = [parameter for _, parameter in named]
        for parameter in self._parameters:
            restore_class(parameter)
        self._ownerships = [
            take(parameter, owner, memory, index, name, dtype)
            for index, (name, parameter) in enumerate(named)
        ]
        self._guarded, self._readable = (
            [_class(mixin, type(parameter)) for parameter in self._parameters]
            for mixin in (Guarded, Readable)
        )
        # One element, expanded to any shape: NaN where the dtype has it.
        has_nan = home.dtype.is_floating_point or home.dtype.is_complex
        value = float("nan") if has_nan else 0
        with lasting_tensors():
            one = torch.full((), value, dtype=home.dtype, device=home.device)
            of_shape = {shape: one.expand(shape) for shape in {p.shape for p in self._parameters}}
            self._placeholders = [of_shape[p.shape] for p in self._parameters]
            for parameter, placeholder in zip(self._parameters, self._placeholders, strict=True):
                if not internals.may_hold(parameter, placeholder):
                    put_values(parameter, placeholder)

    def rest(self) -> None:
        """Point the parameters at placeholders, and send every use of them to the owner."""
        with internals.as_plain_tensors():
            for parameter, cls, data in zip(
                self._parameters, self._guarded, self._placeholders, strict=True
            ):
                properties.SET_DATA(parameter, data)
                parameter.__class__ = cls

    def show(self, views: Sequence[Tensor]) -> None:
        """Point the parameters at ``views``, and tell the owner when their memory is exposed."""
        with internals.as_plain_tensors():
            for parameter, cls, data in zip(self._parameters, self._readable, views, strict=True):
                properties.SET_DATA(parameter, data)
                parameter.__class__ = cls

    def guard(self) -> None:
        """Send every use of the parameters to the owner, but leave their data in place."""
        for parameter, cls in zip(self._parameters, self._guarded, strict=True):
            parameter.__class__ = cls

    def end(self) -> None:
        """Release the parameters: readable ones become ordinary again, others stay at rest."""
        for ownership in self._ownerships:
            ownership.end()
        for parameter, cls in zip(self._parameters, self._readable, strict=True):
            if type(parameter) is cls:
                restore_class(parameter)


_GRAD: Any = Tensor.grad


class Lent:
    """A parameter that is an ordinary one, with other data and gradient, until :meth:`end`.

    Args:
        parameter: The parameter, which shows weights or rests.
        data: What it holds in the meantime.
        grad: Its gradient in the meantime.
    """

    def __init__(self, parameter: Parameter, data: Tensor, grad: Tensor | None) -> None:
        self._parameter, self._class = parameter, type(parameter)
        with internals.as_plain_tensors():
            self._data = properties.GET_DATA(parameter)
            self._version = internals.keep_version(parameter)
            _GRAD.__set__(parameter, None)
            properties.SET_DATA(parameter, data)
            _GRAD.__set__(parameter, grad)
        restore_class(parameter)

    @property
    def is_intact(self) -> bool:
        """Return whether nothing has made the parameter show weights meanwhile."""
        return not isinstance(self._parameter, (Guarded, Readable))

    def end(self) -> None:
        """Make the parameter show what it did before."""
        with internals.as_plain_tensors():
            _GRAD.__set__(self._parameter, None)
            if self.is_intact:
                properties.SET_DATA(self._parameter, self._data)
                self._parameter.__class__ = self._class
                self._version.__exit__()


def are_views(tensors: Iterable[Tensor], parameters: Iterable[Parameter]) -> bool:
    """Return whether any tensor lies in the memory that ``parameters`` have, or had before."""
    taken = [p for p in parameters if isinstance(p, (Guarded, Readable))]
    places = {internals.storage_key(p) for p in taken}
    for ownership in map(ownership_of, taken):
        places |= {ownership.former.cdata, *ownership.views.places}
    kept = [tensor for tensor in tensors if internals.has_storage(tensor)]
    return any(isinstance(one, View) or internals.storage_key(one) in places for one in kept)
