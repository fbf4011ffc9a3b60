"""The classes that parameters switch between, so that every use finds readable memory.

At rest a parameter's data is a stride-0 placeholder of the full shape. Reading it would be silent
nonsense (and reading a freed storage a segmentation fault), so a parameter at rest is **guarded**:
its class is a subclass (:class:`Guarded`) whose ``__torch_function__`` lets metadata through and
hands everything else to the parameter's owner, which makes it readable or raises. So is one whose
weights are kept for a later need of its unit, and must not go unnoticed when used before that.

While a parameter is a view of a flat buffer, for anybody to read, its class is a subclass
(:class:`Readable`) that intercepts everything that **exposes** its memory: its ``data``, and the
methods that return views. Changes made through ``data`` bypass the version counter that detects
changes in place, and a tensor assigned to it would not be trained. A view that may outlive the
memory becomes a :class:`View`.

Torch swaps ``__class__`` in the same way for ``UninitializedParameter``. Here only this module and
``classes`` do so. The alternative, a second ``Parameter`` object in ``module._parameters``, loses
the identity that optimizers, tied weights, EMA dictionaries and hooks rely on.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lightning_zero.parameters.ownership import Owner, Ownership, ownership_of
from lightning_zero.tensors import copied_if_wrapped, internals, properties


class Guarded:
    """Mixin of the class that a parameter has while its data may not be read."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Let metadata functions through; for any other make the parameters readable first."""
        if func in properties.METADATA and func not in properties.CREATING:
            with internals.as_plain_tensors():  # what is asked of each of many parameters
                return func(*args, **(kwargs or {}))
        if func is Tensor.copy_ and [isinstance(a, Guarded) for a in args[:2]] == [True, False]:
            # What `load_state_dict` does: writing a whole value needs no gather.
            ownership_of(args[0]).owner.write(args[0], args[1])
            return args[0]
        if func == properties.SET_DATA:
            return _replace(args[0], args[1])
        if func in properties.CREATING and isinstance(args[0], Guarded):
            # Code between steps sees the masters, so the new tensor gets their dtype.
            kwargs = {"dtype": ownership_of(cast(Parameter, args[0])).dtype, **(kwargs or {})}
        if func is Tensor.detach:
            _refuse_parameter_of(args[0], sys._getframe(1))
        return _touch_and_use(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        make_readable(self)
        return copy.deepcopy(cast(Parameter, self), memo)

    def __repr__(self) -> str:
        resting = cast(Parameter, self)
        return f"Parameter at rest of shape {tuple(resting.shape)}, {resting.dtype}"


class Readable:
    """Mixin of the class that a parameter has while it is a view of a flat buffer, unguarded.

    It has no ``__torch_function__``: operations cost what they cost on any parameter, and only
    methods that return views are intercepted, not functions (``torch.chunk(weight, 2)``).
    """

    def __iter__(self) -> Iterator[Tensor]:
        return iter(_view(self, Tensor.unbind))

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        with _in_original_class(cast(Parameter, self)) as parameter:
            return copy.deepcopy(parameter, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _in_original_class(cast(Parameter, self)) as parameter:
            copied = Parameter(parameter.detach().clone(), parameter.requires_grad)
            copied.__dict__.update(parameter.__dict__)
            return copied.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        with _in_original_class(cast(Parameter, self)) as parameter:
            return repr(parameter)


@contextlib.contextmanager
def _in_original_class(parameter: Parameter) -> Iterator[Parameter]:
    """Restore a parameter's original class within the context."""
    cls = type(parameter)
    restore_class(parameter)
    try:
        yield parameter
    finally:
        parameter.__class__ = cls


def _refuse_parameter_of(data: Any, caller: FrameType) -> None:
    """Raise if ``caller`` makes a ``Parameter`` of a parameter's data: it would not be trained."""
    if isinstance(data, Parameter) and caller.f_globals.get("__name__") == "torch.nn.parameter":
        raise RuntimeError(
            f"Parameter {ownership_of(data).name!r} is being trained, and another Parameter that"
            " shares its memory would not be trained. Parametrize the module (`weight_norm`) before"
            " `fit`, in `__init__` or `configure_model`, or create the Parameter from a copy:"
            " `p.detach().clone()`"
        )


_TORCH = os.path.dirname(torch.__file__)
_KEEPING = {"torch.nn.modules.module", "torch.functional", "torch._tensor"}
_KEEPING |= {"torch.optim.swa_utils", "torch.nn.utils.convert_parameters"}
"""The modules of torch that pass a view of a parameter on, or keep it while they use others."""


def _view(parameter: Readable, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``func`` on a readable parameter for our caller's caller; track the views it returns."""
    if torch.compiler.is_compiling():
        return func(parameter, *args, **kwargs)
    frame = sys._getframe(2)
    _refuse_parameter_of(parameter, frame)
    if _is_of_torch(frame):
        # Torch does not keep the view; and its compiler, which calls this while compiled code runs,
        # needs a plain tensor.
        return func(parameter, *args, **kwargs)
    return _use([cast(Parameter, parameter)], func, (parameter, *args), kwargs)


def _is_of_torch(frame: FrameType) -> bool:
    """Return whether a frame runs torch's own code, which keeps no views."""
    module = frame.f_globals.get("__name__")
    if module is None:
        # A compiled graph, or code that torch's compiler writes around it; else a user's `exec`.
        is_graph = isinstance(frame.f_locals.get("self"), torch.fx.GraphModule)
        return is_graph or frame.f_code.co_filename.startswith(_TORCH)
    return module.startswith("torch.") and module not in _KEEPING


def _method(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``func`` as a method of :class:`Readable`."""

    @functools.wraps(func)
    def method(self: Readable, *args: Any, **kwargs: Any) -> Any:
        return _view(self, func, *args, **kwargs)

    return method


def _attribute(name: str, traced: Callable[[Any], Tensor]) -> property:
    """Return an attribute of ``Tensor`` as a property of :class:`Readable`."""
    func = getattr(Tensor, name).__get__

    def get(self: Readable) -> Any:
        return traced(self) if torch.compiler.is_compiling() else _view(self, func)

    def replace(self: Readable, data: Tensor) -> None:
        _replace(cast(Parameter, self), data)

    return property(get, replace if name == "data" else None)


_REGISTER: Any = Tensor.register_post_accumulate_grad_hook


def _hook_gradient(self: Guarded | Readable, hook: Callable[..., Any]) -> RemovableHandle:
    """Register a gradient hook that runs before the owner takes the gradient."""
    parameter = cast(Parameter, self)
    last = ownership_of(parameter).last_hook
    with internals.as_plain_tensors():
        handle: RemovableHandle = _REGISTER(parameter, hook)
        if last is not None:
            internals.put_last(last, parameter)
    return handle


def hook_last(parameter: Parameter, hook: Callable[..., Any]) -> RemovableHandle:
    """Register the owner's gradient hook, which runs after all others."""
    with internals.as_plain_tensors():
        handle: RemovableHandle = _REGISTER(parameter, hook)
    ownership_of(parameter).last_hook = handle.id
    return handle


for _mixin in (Guarded, Readable):
    _mixin.register_post_accumulate_grad_hook = _hook_gradient  # type: ignore[union-attr]
for _name, _func in properties.VIEWING.items():
    setattr(Readable, _name, _method(_func))
for _name, _traced in properties.VIEWING_ATTRIBUTES.items():
    setattr(Readable, _name, _attribute(_name, _traced))


# -- views that may outlive the memory of a parameter ----------------------------------------------


class View(Tensor):
    """A view of a parameter; using it while the parameter rests makes the parameter readable.

    A plain view would point at released memory.

    Attributes:
        parameter: The parameter that it is a view of.
        ownership: The parameter's ownership when the view was taken.
        exposes: Whether changes to it do not raise the parameter's version counter.
    """

    parameter: Parameter
    ownership: Ownership
    exposes: bool

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make the parameters of all views readable first; views of views become views too."""
        return _touch_and_use(func, args, kwargs or {})

    @property
    def is_gone(self) -> bool:
        """Return whether the memory was released."""
        with internals.as_plain_tensors():
            return self.numel() > 0 and self.untyped_storage().nbytes() == 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self._ordinary(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy: pickling writes storages last, when the memory may have been released.
        return self._ordinary().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._ordinary())

    def _ordinary(self) -> Tensor:
        _touch([self])
        with internals.as_plain_tensors():
            return self.as_subclass(Tensor)


def kept_too_long(name: str) -> RuntimeError:
    """Return the error for a use of a view whose memory the parameter has left for good."""
    return RuntimeError(
        f"A view of parameter {name!r} was used after the training step in which it was taken,"
        " and its memory has been released. Keep a copy instead: `p.detach().clone()`"
    )


def _touch_and_use(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the resting arguments of ``func`` readable, and call it."""
    used = [] if func in properties.METADATA else list(_used_in((args, kwargs)))
    _touch(used)
    parameters = [one.parameter if isinstance(one, View) else one for one in used]
    exposes = any(isinstance(one, View) and one.exposes for one in used)
    return _use(parameters, func, args, kwargs, exposes=exposes)


def _touch(used: Sequence[Parameter | View]) -> None:
    """Make parameters and views of them readable together, so that none displaces another."""
    by_owner: dict[Owner, list[Parameter]] = {}
    needed = set()
    for one in used:
        if isinstance(one, View):
            ownership, parameter = one.ownership, one.parameter
            if ownership.is_over:
                # Even if numpy keeps the memory alive, or another owner has the parameter now: the
                # parameter has left this memory.
                raise kept_too_long(ownership.name)
            # No error for other memory yet: a gathered parameter returns to its own later.
            rests = one.is_gone or isinstance(parameter, Guarded)
        else:
            ownership, parameter, rests = ownership_of(one), one, isinstance(one, Guarded)
        if rests or not ownership.is_over:
            by_owner.setdefault(ownership.owner, []).append(parameter)
        if rests:
            needed.add(ownership.owner)
    for owner in [each for each in by_owner if each in needed]:
        owner.touch(by_owner[owner])
    for one in used:
        if isinstance(one, View) and one.is_gone:
            raise kept_too_long(one.ownership.name)


def make_readable(value: Any) -> None:
    """Make the resting parameters in ``value``, and views of them, readable together."""
    _touch([*_used_in(value)])


def _replace(parameter: Parameter, data: Tensor) -> None:
    """Pass ``data`` to the owner as the parameter's new value, with both readable."""
    make_readable((parameter, data))
    ownership_of(parameter).replace(parameter, data)


def _used_in(value: Any) -> Iterator[Parameter | View]:
    """Yield the parameters in ``value`` that were taken by an owner, and views of them."""
    if isinstance(value, (Guarded, Readable, View)):
        yield cast("Parameter | View", value)
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _used_in(item)


def _use(
    parameters: list[Parameter], func: Any, args: Any, kwargs: Any, *, exposes: bool = False
) -> Any:
    """Call ``func`` on readable ``parameters`` or views of them; track the views it returns."""
    exposes |= func in properties.EXPOSING
    for parameter in parameters if exposes else ():
        ownership_of(parameter).expose()
    for parameter in parameters if func in properties.POINTING else ():
        _keep_address(parameter)
    with internals.as_plain_tensors():
        result = func(*args, **kwargs)
        if torch.compiler.is_compiling():
            return result
        storages = {internals.storage_key(p): p for p in parameters}
        if internals.func_level() is not None:
            result = copied_if_wrapped(result, storages)
        viewed = list(_lying_in(storages, result))
        returning = {id(p) for _, p in viewed if ownership_of(p).gives_back}
        for tensor, parameter in viewed:
            ownership_of(parameter).views.add(tensor)
            if id(parameter) in returning:
                _become_view(tensor, parameter, exposes=exposes)
            elif func is Tensor.detach:
                ownership_of(parameter).expose(is_plain=True)
        return result


def _lying_in(storages: dict[int, Parameter], value: Any) -> Iterator[tuple[Tensor, Parameter]]:
    """Yield the tensors in ``value`` that lie in one of ``storages``, each with its parameter."""
    if type(value) in (list, tuple):
        for one in value:
            yield from _lying_in(storages, one)
    # Sparse tensors, and those that functorch wraps, have no storage.
    elif type(value) is Tensor and internals.has_storage(value):
        parameter = storages.get(internals.storage_key(value))
        if parameter is not None:
            yield value, parameter


def _become_view(tensor: Tensor, parameter: Parameter, *, exposes: bool) -> None:
    tensor.__class__ = View  # not by `as_subclass`, which adds a node to the graph
    view = cast(View, tensor)
    view.parameter, view.ownership, view.exposes = parameter, ownership_of(parameter), exposes


def track(tensor: Tensor, parameters: Iterable[Parameter]) -> None:
    """Make ``tensor`` a :class:`View` of whichever of the readable ``parameters`` it lies in."""
    if type(tensor) is Tensor:
        first = tensor.storage_offset()
        with internals.as_plain_tensors():
            before = [p for p in parameters if p.storage_offset() <= first]
            _become_view(tensor, max(before, key=Tensor.storage_offset), exposes=False)


def _keep_address(parameter: Parameter) -> None:
    """Keep the memory of ``parameter`` alive for code that holds only its address.

    Raises:
        RuntimeError: Torch has no way to do so on the parameter's device.
    """
    ownership = ownership_of(parameter)
    if not ownership.gives_back:
        return
    if parameter.device.type != "cpu":
        raise RuntimeError(
            f"The address of parameter {ownership.name!r} cannot be exported: its memory is"
            " released after its module has run. Export a copy instead: `p.detach().clone()`"
        )
    with internals.as_plain_tensors():
        # Torch does not resize a storage that was exported to numpy, so it is not freed.
        torch.empty(0, dtype=torch.uint8).set_(parameter.untyped_storage()).numpy()


def restore_class(parameter: Parameter) -> None:
    """Restore the original class of ``parameter``."""
    if isinstance(parameter, (Guarded, Readable)):
        # Behind the class that `classes` has made, and its mixin.
        parameter.__class__ = type(parameter).__mro__[2]
