"""DTensor parameters in the form in which they are trained: this rank's part, a plain tensor.

A module that holds DTensors gets a class of its own, with a property for each of them: the module's
parameters are the local parts, and code that reads ``module.weight``, as a forward does, gets the
DTensor that wraps the part. All that an engine does with parameters is as for any other module.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_zero.comm import DTensorForm, cut_by_own_plan, is_dtensor, reads_parts
from lightning_zero.parameters.guarded import Guarded, make_readable
from lightning_zero.plan import derived_class, original_class, set_cut
from lightning_zero.tensors import internals, properties

_FORMS, _LOCAL = "_lightning_zero_forms", "_lightning_zero_local"


def make_local(module: nn.Module, mesh: Any) -> None:
    """Replace DTensor parameters by local parts; a second call changes nothing.

    Args:
        module: The model, cut by ``parallelize_module``; or one that has a plan of its own.
        mesh: The device mesh of all ranks.

    Raises:
        ValueError: No parameter is a DTensor, or one cannot be trained so; nothing has changed.
    """
    is_local = any(_FORMS in vars(child) for child in module.modules())
    if not is_local and not any(map(is_dtensor, module.parameters())):
        cut_by_own_plan(module, mesh)
    forms = {
        id(parameter): DTensorForm.of(name, parameter, mesh)
        for name, parameter in module.named_parameters()
        if is_dtensor(parameter)
    }
    if not forms and not is_local:
        raise ValueError(
            f"tensor_parallel_size > 1, but no parameter of {type(module).__name__} is cut over"
            " tensor-parallel ranks. Call torch's parallelize_module with"
            ' self.device_mesh["tensor_parallel"] in `configure_model`, or use a model of'
            " Transformers that has a `tp_plan`."
        )
    _require_plain(module)
    made: dict[int, Parameter] = {}
    for child in module.modules():
        own = {name: p for name, p in child._parameters.items() if id(p) in forms}
        for name, parameter in own.items():
            assert parameter is not None
            key = id(parameter)
            if key not in made:
                made[key] = Parameter(forms[key].local(parameter), parameter.requires_grad)
                set_cut(made[key], forms[key].cut)
                setattr(parameter, _LOCAL, made[key])
            child._parameters[name] = made[key]
        if own:
            vars(child)[_FORMS] = {name: forms[id(p)] for name, p in own.items()}
            cls: Any = type(child)
            child.__class__ = _local_class(cls, tuple(own))


def local_of(parameter: Any) -> Any:
    """Return what :func:`make_local` has put in a parameter's place, or the parameter."""
    return getattr(parameter, _LOCAL, parameter)


def make_distributed(module: nn.Module) -> None:
    """Replace whole local parts by DTensors, as before :func:`make_local`."""
    made: dict[int, Parameter] = {}
    for child in [*module.modules()]:
        forms: dict[str, DTensorForm] = vars(child).pop(_FORMS, {})
        if forms:
            child.__class__ = original_class(child)
        for name, form in forms.items():
            parameter = child._parameters[name]
            if parameter is not None:
                if id(parameter) not in made:
                    wrapped = form.wrap(parameter.detach())
                    made[id(parameter)] = Parameter(wrapped, parameter.requires_grad)
                child._parameters[name] = made[id(parameter)]


@contextmanager
def uncut(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Enter a context in which modules read plain parameters, and keep parts of whole ones."""
    found = [(one, vars(one)[_FORMS]) for one in modules if _FORMS in vars(one)]
    classes = [type(child) for child, _ in found]
    for child, _ in found:
        child.__class__ = original_class(child)
    try:
        yield
    finally:
        for (child, forms), cls in zip(found, classes, strict=True):
            child.__class__ = cls
            for name, form in forms.items():
                parameter: Any = child._parameters[name]
                if form.cut is not None and parameter.shape == form.shape:
                    put_values(parameter, form.cut.part_of(parameter.detach()).clone())


def put_values(parameter: Parameter, values: Tensor) -> None:
    """Make a parameter hold ``values``, of any shape and device."""
    if internals.may_hold(parameter, values):
        properties.set_data(parameter, values)
    else:
        internals.take_contents(parameter, Parameter(values, parameter.requires_grad))


_are_whole = False


@contextmanager
def loading_whole() -> Iterator[None]:
    """Enter a context in which ``load_state_dict`` refuses parts, which code between steps has.

    A file may have a smaller model's tensors, of the shape of a part.
    """
    global _are_whole
    before, _are_whole = _are_whole, True
    try:
        yield
    finally:
        _are_whole = before


def _require_plain(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if is_dtensor(parameter) and internals.has_hooks(parameter):
            raise ValueError(
                f"Parameter {name!r} has hooks, which is not supported with tensor_parallel_size"
                " > 1. Register them in `on_fit_start`."
            )
    for name, buffer in module.named_buffers():
        if is_dtensor(buffer):
            raise ValueError(
                f"Buffer {name!r} is a DTensor, which is not supported. Keep buffers out of the"
                " modules that parallelize_module cuts."
            )


@functools.cache
def _local_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    def _load_from_state_dict(
        self: nn.Module, state: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        """Load this rank's parts of whole values."""
        for name, form in vars(self)[_FORMS].items():
            if (key := prefix + name) in state:
                value = state[key]
                state[key] = form.part_of(value)
                if _are_whole and form.cut is not None and state[key] is value:
                    args[-1].append(
                        f"size mismatch for {key}: its shape is {tuple(value.shape)} in the"
                        f" checkpoint and {tuple(form.shape)} in the model, over all ranks."
                    )
        cls._load_from_state_dict(self, state, prefix, *args)

    wrapped = {name: _wrapped(name) for name in names}
    return derived_class(cls, {**wrapped, "_load_from_state_dict": _load_from_state_dict})


def _wrapped(name: str) -> property:
    """Return the property that reads a parameter as the DTensor that its forward expects."""

    def read(module: nn.Module) -> Any:
        parameter = module._parameters[name]
        if parameter is None:
            return None
        if isinstance(parameter, Guarded):  # a compiler traces what is readable
            make_readable(parameter, computes=torch.is_grad_enabled())
        if reads_parts(module):
            return parameter
        return vars(module)[_FORMS][name].read(parameter)

    return property(read)
