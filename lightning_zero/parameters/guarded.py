"""The classes that parameters switch between, so that every use finds readable memory.

At rest a parameter's data is a stride-0 placeholder of the full shape. Reading it would be silent
nonsense (and reading a freed storage a segmentation fault), so a parameter is **guarded** wherever
its module does not run: its class is a subclass (:class:`Guarded`) whose ``__torch_function__``
lets metadata through, and asks the parameter's owner for values before anything else. What autograd
records computes with the weights; all other code sees and changes the masters.

While its module runs, or while masters are shown, a parameter is **readable**: its class is a
subclass (:class:`Readable`) without ``__torch_function__``, so operations cost what they cost on
any parameter.

Torch swaps ``__class__`` in the same way for ``UninitializedParameter``. The alternative, a second
``Parameter`` object in ``module._parameters``, loses the identity that optimizers, tied weights,
EMA dictionaries and hooks rely on.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lightning_zero.parameters.gradients import SLOT, FlatGradients
from lightning_zero.tensors import internals, properties

# -- owners ----------------------------------------------------------------------------------------


class Owner(Protocol):
    """The object that knows how guarded parameters become readable."""

    def touch(self, parameters: Sequence[Parameter], *, computes: bool = False) -> None:
        """Give ``parameters``, which are used together, values: masters, or weights to compute."""

    def write(self, parameter: Parameter, value: Tensor) -> None:
        """Store ``value`` as the parameter's new value."""


class Ownership:
    """The weak link from a parameter to its group.

    Attributes:
        name: The parameter's qualified name.
        group_of: Returns its ``FlatParameters``; ``None`` if they were released or are gone.
        index: The parameter's index in its group.
        dtype: The dtype of the parameter's master.
        stride: The parameter's stride before it was owned.
        former: The memory that it had before, not kept alive.
        last_hook: The ``id`` of the owner's hook that takes gradients; ``None`` without one.
    """

    __slots__ = ("_life", "dtype", "former", "group_of", "index", "last_hook", "name", "stride")

    def __init__(
        self, group: Any, index: int, name: str, dtype: torch.dtype, parameter: Parameter
    ) -> None:
        self.group_of: Callable[[], Any] = weakref.ref(group)
        self.index, self.name, self.dtype = index, name, dtype
        self.stride = parameter.stride()
        self.former = StorageWeakRef(parameter.untyped_storage())  # type: ignore[no-untyped-call]
        self.last_hook: int | None = None
        # An id is valid only while its parameter lives.
        key = id(parameter)
        self._life = weakref.ref(parameter, lambda _: _ownerships.pop(key, None))

    def end(self, group: Any) -> None:
        """Release the parameter, unless another group has taken it."""
        if self.group_of() is group:
            self.group_of = lambda: None

    @property
    def owner(self) -> Owner:
        """The owner.

        Raises:
            RuntimeError: There is none any more; a parameter that was left at rest stays so.
        """
        group = self.group_of()
        if group is None:
            raise RuntimeError(
                f"Parameter {self.name!r} was left sharded when training ended:"
                " restore_weights=False was set, an exception ended the run, or the engine was"
                " never closed. Load the weights from a checkpoint into a new module, or train with"
                " restore_weights=True."
            )
        owner: Owner = group.owner
        return owner


_ownerships: dict[int, Ownership] = {}
"""The last ownership of each living parameter, by the parameter's ``id``.

Torch's own dictionary with weak keys would cost every reshard more than all the rest of it.
"""


# Tracing this, torch's compiler would walk over the whole table, from which the garbage of other
# models may take entries meanwhile.
@torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
def ownership_of(parameter: Parameter) -> Ownership:
    """Return the last ownership of a parameter that has had one."""
    return _ownerships[id(parameter)]


def take(named: Iterable[tuple[str, Parameter]], group: Any, dtype: torch.dtype) -> None:
    """Give parameters, whose masters have ``dtype``, to a group."""
    _notice_transforms()
    for index, (name, parameter) in enumerate(named):
        restore_class(parameter)
        _ownerships[id(parameter)] = Ownership(group, index, name, dtype, parameter)


# -- the property of gradients ---------------------------------------------------------------------


def _gradients_of(parameter: Parameter) -> tuple[FlatGradients | None, int]:
    ownership = _ownerships[id(parameter)]
    group = ownership.group_of()
    return (None if group is None else group.gradients), ownership.index


def _get(parameter: Parameter) -> Tensor | None:
    with internals.as_plain_tensors():
        grad = SLOT.__get__(parameter)
    if grad is None:
        gradients, index = _gradients_of(parameter)
        if gradients is not None and (gradients.averaged[index] or gradients.shows_own):
            grad = gradients.shown(index)
    return cast("Tensor | None", grad)


def _set(parameter: Parameter, value: Tensor | None) -> None:
    gradients, index = _gradients_of(parameter)
    with internals.as_plain_tensors():
        is_in_hook = internals.in_backward() and SLOT.__get__(parameter) is not None
        if gradients is None or is_in_hook:
            SLOT.__set__(parameter, value)
        elif value is None:
            gradients.drop(index)
    if gradients is not None and not is_in_hook and value is not None:
        gradients.replace(index, value)


GRAD = property(_get, _set, lambda parameter: _set(parameter, None))
"""The ``grad`` of a parameter that an engine has taken."""


# -- classes ---------------------------------------------------------------------------------------

_OF_MASTER: dict[Any, Callable[[torch.dtype, Any], Any]] = {
    Tensor.dtype.__get__: lambda dtype, _: dtype,  # type: ignore[attr-defined]
    Tensor.itemsize.__get__: lambda dtype, _: dtype.itemsize,  # type: ignore[attr-defined]
    Tensor.element_size: lambda dtype, _: dtype.itemsize,
    Tensor.nbytes.__get__: lambda dtype, p: dtype.itemsize * p.numel(),  # type: ignore[attr-defined]
}
"""Metadata of the master, which a guarded parameter shows."""

_UNRECORDED = {properties.GET_DATA, properties.SET_DATA, Tensor.detach, torch.detach}
"""Uses that autograd never records."""


class _Owned:
    """The common base of both classes of parameters."""

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a gradient hook that runs before the owner takes the gradient."""
        parameter = cast(Parameter, self)
        last = ownership_of(parameter).last_hook
        with internals.as_plain_tensors():
            handle: RemovableHandle = _REGISTER(parameter, hook)
            if last is not None:
                internals.put_last(last, parameter)
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        make_readable(self)
        with _in_original_class(cast(Parameter, self)) as parameter:
            return copy.deepcopy(parameter, memo)


_REGISTER: Any = Tensor.register_post_accumulate_grad_hook


def hook_last(parameter: Parameter, hook: Callable[..., Any]) -> RemovableHandle:
    """Register the owner's gradient hook, which runs after all others, if need be once trained."""
    with internals.as_plain_tensors():
        is_trained = parameter.requires_grad
        parameter.requires_grad = True  # torch asks for it, and keeps the hook without it
        handle: RemovableHandle = _REGISTER(parameter, hook)
        parameter.requires_grad = is_trained
    ownership_of(parameter).last_hook = handle.id
    return handle


class Guarded(_Owned):
    """Mixin of the class that a parameter has while its data may not be read."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Let metadata functions through; for any other get values from the owner first."""
        kwargs = kwargs or {}
        if func is Tensor.detach and sys._getframe(1).f_code is _MAKES_PARAMETERS:
            raise _untrained(args[0])
        if func in properties.METADATA:
            if func in _OF_MASTER and isinstance(args[0], Guarded):
                return _OF_MASTER[func](ownership_of(cast(Parameter, args[0])).dtype, args[0])
            with internals.as_plain_tensors():  # code may call these for each of many parameters
                return func(*args, **kwargs)
        if func is Tensor.copy_ and [isinstance(a, Guarded) for a in args[:2]] == [True, False]:
            # What `load_state_dict` does: writing a whole value needs no gather.
            ownership_of(args[0]).owner.write(args[0], args[1])
            return args[0]
        if func == properties.SET_DATA and isinstance(args[0], Guarded):
            _require_like(cast(Parameter, args[0]), args[1])
        if func in properties.CREATING:
            if isinstance(args[0], Guarded):
                kwargs = {"dtype": ownership_of(cast(Parameter, args[0])).dtype, **kwargs}
        elif not _repeats_backward(func, (args, kwargs)):
            is_recorded = torch.is_grad_enabled() and func not in _UNRECORDED
            is_recorded &= any(one.requires_grad for one in _tensors_in((args, kwargs)))
            make_readable((args, kwargs), computes=is_recorded)
        with internals.as_plain_tensors():
            return func(*args, **kwargs)

    def __repr__(self) -> str:
        resting = cast(Parameter, self)
        dtype = ownership_of(resting).dtype
        return f"Parameter at rest of shape {tuple(resting.shape)}, {dtype}"


class Readable(_Owned):
    """Mixin of the class that a parameter has while its values may be used without notice.

    Operations cost what they cost on any parameter. Only ``data`` and ``detach`` are intercepted:
    what they return may outlive the memory, and change it without the parameter's version counter.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _in_original_class(cast(Parameter, self)) as parameter:
            copied = Parameter(parameter.detach().clone(), parameter.requires_grad)
            copied.__dict__.update(parameter.__dict__)
            return copied.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        with _in_original_class(cast(Parameter, self)) as parameter:
            return repr(parameter)

    def detach(self) -> Tensor:
        """Return the values without a graph."""
        if torch.compiler.is_compiling():
            return Tensor.detach(cast(Tensor, self))
        if sys._getframe(1).f_code is _MAKES_PARAMETERS:
            raise _untrained(cast(Parameter, self))
        return _handed_out(cast(Parameter, self), Tensor.detach, is_plain=True)

    @property
    def data(self) -> Tensor:
        """The values, whose changes autograd does not see."""
        if torch.compiler.is_compiling():
            return torch.detach(cast(Tensor, self))
        return _handed_out(cast(Parameter, self), properties.GET_DATA)

    @data.setter
    def data(self, value: Tensor) -> None:
        _require_like(cast(Parameter, self), value)
        with internals.as_plain_tensors():
            properties.SET_DATA(self, value)


def _handed_out(
    parameter: Parameter, get: Callable[[Tensor], Tensor], *, is_plain: bool = False
) -> Tensor:
    """Return what ``get`` makes of a parameter, and note that it may be changed by that."""
    group = ownership_of(parameter).group_of()
    if group is None:
        return get(parameter)
    if group.masters is not None:
        return Tensor.detach(parameter)  # changes of masters by it are counted
    found = get(parameter)
    group.edits.expose(found, is_plain=is_plain)
    return found


_MAKES_PARAMETERS = Parameter.__new__.__code__
"""The code of `Parameter(p)`, which calls `p.detach()`."""


def _untrained(parameter: Parameter) -> RuntimeError:
    """Return the error for code that makes a ``Parameter`` of one that is trained."""
    return RuntimeError(
        f"Parameter {ownership_of(parameter).name!r} is being trained, and another Parameter made"
        " of it would not be. Parametrize the module (`weight_norm`) before `fit`, in `__init__` or"
        " `configure_model`, or create the Parameter from a copy: `p.detach().clone()`"
    )


def _require_like(parameter: Parameter, data: Tensor) -> None:
    ownership = ownership_of(parameter)
    if (group := ownership.group_of()) is not None:
        group.require_like(ownership.index, data)


def _repeats_backward(func: Any, value: Any) -> bool:
    """Return whether a dispatch mode calls what autograd computes, with weights that are whole."""
    if not isinstance(func, torch._ops.OpOverload) or not internals.in_backward():
        return False
    with internals.as_plain_tensors():
        return all(
            one.untyped_storage().nbytes() >= one.nbytes
            for one in _tensors_in(value)
            if isinstance(one, Guarded) and isinstance(one, Tensor)
        )


def make_readable(value: Any, *, computes: bool = False) -> None:
    """Give the guarded parameters in ``value`` values together, so that none displaces another."""
    by_owner: dict[int, tuple[Owner, list[Parameter]]] = {}
    for one in _tensors_in(value):
        if isinstance(one, (Guarded, Readable)):
            owned = cast(Parameter, one)
            if isinstance(one, Guarded) or ownership_of(owned).group_of() is not None:
                owner = ownership_of(owned).owner
                by_owner.setdefault(id(owner), (owner, []))[1].append(owned)
    for owner, parameters in by_owner.values():
        if any(isinstance(one, Guarded) for one in parameters):
            owner.touch(parameters, computes=computes)


@functools.cache
def _notice_transforms() -> None:
    """Have transforms of ``torch.func`` wrap values, not placeholders."""
    internals.before_func_wraps(_note_transform)


def _note_transform(value: Any) -> None:
    if isinstance(value, _Owned):
        group = ownership_of(cast(Parameter, value)).group_of()
        if group is not None and group.plan.reshards:
            raise unfollowed("A transform of torch.func")
        make_readable(value, computes=True)


def unfollowed(what: str) -> RuntimeError:
    """Return the error for code that holds weights beyond what stage 3 can track."""
    return RuntimeError(
        f"{what} holds weights in a way that stage 3 cannot follow, as it releases them. Use stage"
        " 1 or 2, or transform a copy.deepcopy of the module made within"
        " `with lightning_zero.gathered(module):`"
    )


def _tensors_in(value: Any) -> Iterator[Tensor]:
    # Not `tensors_in`: torch's compiler traces this.
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


@contextlib.contextmanager
def _in_original_class(parameter: Parameter) -> Iterator[Parameter]:
    """Restore a parameter's original class within the context."""
    cls = type(parameter)
    restore_class(parameter)
    try:
        yield parameter
    finally:
        parameter.__class__ = cls


@functools.cache
def class_of(mixin: type, cls: type[Parameter]) -> type[Parameter]:
    """Return the class of parameters of ``cls`` with a mixin."""
    name = f"Guarded{cls.__name__}" if mixin is Guarded else cls.__name__
    made = cast("type[Parameter]", type(name, (mixin, cls), {"grad": GRAD}))
    internals.trace_as_plain(made)
    return made


def restore_class(parameter: Parameter) -> None:
    """Restore the original class of ``parameter``."""
    if isinstance(parameter, _Owned):
        parameter.__class__ = type(parameter).__bases__[1]  # see `class_of`


# -- parameters for other purposes -----------------------------------------------------------------


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
            SLOT.__set__(parameter, None)
            properties.SET_DATA(parameter, data)
            SLOT.__set__(parameter, grad)
        restore_class(parameter)

    @property
    def is_intact(self) -> bool:
        """Return whether nothing has made the parameter show weights meanwhile."""
        return not isinstance(self._parameter, _Owned)

    def end(self) -> None:
        """Make the parameter show what it did before."""
        with internals.as_plain_tensors():
            SLOT.__set__(self._parameter, None)
            if self.is_intact:
                properties.SET_DATA(self._parameter, self._data)
                self._parameter.__class__ = self._class
                self._version.__exit__()


def are_views(tensors: Iterable[Tensor], parameters: Iterable[Parameter]) -> bool:
    """Return whether any tensor lies in the memory that ``parameters`` have, or had before."""
    taken = [cast(Parameter, p) for p in parameters if isinstance(p, _Owned)]
    places = {internals.storage_key(p) for p in taken}
    places |= {ownership_of(p).former.cdata for p in taken}
    kept = [tensor for tensor in tensors if internals.has_storage(tensor)]
    return any(internals.storage_key(one) in places for one in kept)
