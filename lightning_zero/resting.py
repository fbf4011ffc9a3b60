"""Parameters that are no tensors of their own, and what happens to whoever uses one.

At rest a parameter's data is a stride-0 placeholder of the full shape. Reading it would be silent
nonsense (and reading a freed storage a segmentation fault), so while a parameter rests its class is
a subclass whose ``__torch_function__`` lets metadata through and hands everything else to the
parameter's owner, which makes it readable or raises.

While a parameter is a view of a flat buffer, its class is a subclass that notices what gives its
memory away: its ``data``, and the methods that return views. What is done to ``data`` is hidden
from the version counter by which changes in place are noticed, and another tensor put in its place
would be trained by nobody. What may outlive the memory becomes a :class:`View`.

Who owns a parameter is known here for as long as that owner lives and has not let go of it. Nobody
is kept alive for it: parameters outlive their training, and may go through another one.

Swapping ``__class__`` is what torch does for ``UninitializedParameter``; it stays in this room. The
alternative, a second ``Parameter`` object in ``module._parameters``, loses the identity that
optimizers, ties, EMA dictionaries and hooks rely on.
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
from torch.nn import Parameter

from lightning_zero import surface


class Owner(Protocol):
    """Whoever knows how a resting parameter is read and written."""

    def touch(self, parameter: Parameter) -> None:
        """Make ``parameter`` readable, or raise."""

    def write(self, parameter: Parameter, value: Tensor) -> None:
        """Keep ``value``, of the parameter's shape, as the parameter's new value."""

    def expose(self, parameter: Parameter) -> None:
        """Notice that a readable ``parameter`` may be changed behind its version counter."""

    def replace(self, parameter: Parameter, data: Tensor) -> None:
        """Keep ``data`` as the new value of a readable ``parameter``, or raise."""

    def gives_back(self, parameter: Parameter) -> bool:
        """Whether the memory of a readable ``parameter`` will be given back while views live."""


class Nobody:
    """Owns a parameter that its owner has let go of, or whose owner is gone.

    Args:
        name: The parameter's qualified name.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def touch(self, parameter: Parameter) -> None:
        """Say that nobody can make a parameter readable that was left at rest."""
        raise RuntimeError(
            f"Parameter {self._name!r} was left sharded when its training ended, because of"
            " restore_weights=False, because other ranks had died or because its engine was never"
            " closed. Load its values from a checkpoint into a new module, or train with"
            " restore_weights=True."
        )

    def write(self, parameter: Parameter, value: Tensor) -> None:
        """Refuse as :meth:`touch` does: there is no memory for the value."""
        self.touch(parameter)

    def expose(self, parameter: Parameter) -> None:
        """Nothing follows the changes of a readable parameter any more."""

    def replace(self, parameter: Parameter, data: Tensor) -> None:
        """Let ``data`` be what a readable parameter is."""
        point(parameter, data)

    def gives_back(self, parameter: Parameter) -> bool:
        """Readable memory stays."""
        return False


class Tie:
    """That a parameter is somebody's, until that one lets go of it or is gone.

    Args:
        owner: Whose; it is not kept alive.
        name: The parameter's qualified name.
    """

    __slots__ = ("_owner", "name")

    def __init__(self, owner: Owner, name: str) -> None:
        self._owner: Callable[[], Owner | None] = weakref.ref(owner)
        self.name = name

    @property
    def owner(self) -> Owner:
        """The owner, or who answers in his place."""
        owner = self._owner()
        return Nobody(self.name) if owner is None else owner

    @property
    def has_ended(self) -> bool:
        """Whether there is no owner any more."""
        return self._owner() is None

    def end(self) -> None:
        """Let go."""
        self._owner = _nobody


def _nobody() -> None:
    return None


_ties: dict[int, Tie] = {}
"""The last tie of each parameter that lives, by its ``id``."""


class Resting:
    """Mixin of the class that a parameter has while its data may not be read."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Let metadata through; make every other use readable first."""
        kwargs = kwargs or {}
        if (
            func is Tensor.copy_
            and isinstance(args[0], Resting)
            and not isinstance(args[1], Resting)
        ):
            # What `load_state_dict` does: a whole value needs no gather to be written.
            parameter = cast(Parameter, args[0])
            _owner(parameter).write(parameter, args[1])
            return parameter
        if func == surface.SET_DATA:
            parameter = cast(Parameter, args[0])
            _owner(parameter).touch(parameter)
            return _replace(parameter, args[1])
        return _touch_and_use(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        parameter = cast(Parameter, self)
        _owner(parameter).touch(parameter)
        return copy.deepcopy(parameter, memo)

    def __repr__(self) -> str:
        parameter = cast(Parameter, self)
        return f"Parameter at rest of shape {tuple(parameter.shape)}, {parameter.dtype}"


class Whole:
    """Mixin of the class that a parameter has while it is a view of a flat buffer.

    No ``__torch_function__``: operations on whole weights cost what they cost on any parameter. So
    functions that return views (``torch.chunk(weight, 2)``) are not noticed, as methods are.
    """

    def __iter__(self) -> Iterator[Tensor]:
        return iter(_view(self, Tensor.unbind))

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        with _ordinary(cast(Parameter, self)) as parameter:
            return copy.deepcopy(parameter, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _ordinary(cast(Parameter, self)) as parameter:
            return parameter.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        with _ordinary(cast(Parameter, self)) as parameter:
            return repr(parameter)


@contextlib.contextmanager
def _ordinary(parameter: Parameter) -> Iterator[Parameter]:
    """A context in which a parameter is of its own class."""
    guise = type(parameter)
    unguard(parameter)
    try:
        yield parameter
    finally:
        parameter.__class__ = guise


_GIVING_ROOMS = {"torch.nn.modules.module", "torch.functional", "torch._tensor"}
"""The rooms of torch that hand on what a parameter's methods return."""


def _view(whole: Whole, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``func`` makes of a readable parameter, for the caller of our caller."""
    if torch.compiler.is_compiling():
        return func(whole, *args, **kwargs)
    asking = sys._getframe(2).f_globals.get("__name__") or "torch."
    if asking.startswith("torch.") and asking not in _GIVING_ROOMS:
        # Torch uses a view and lets go of it; its compiler, which calls this while compiled code
        # runs, wants a plain tensor.
        return func(whole, *args, **kwargs)
    return _use([cast(Parameter, whole)], func, (whole, *args), kwargs)


def _method(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func`` as a method of :class:`Whole`."""

    @functools.wraps(func)
    def method(self: Whole, *args: Any, **kwargs: Any) -> Any:
        return _view(self, func, *args, **kwargs)

    return method


def _attribute(name: str, traced: Callable[[Any], Tensor]) -> property:
    """A tensor's attribute as one of :class:`Whole`."""
    func = getattr(Tensor, name).__get__

    def get(self: Whole) -> Any:
        return traced(self) if torch.compiler.is_compiling() else _view(self, func)

    def replace(self: Whole, data: Tensor) -> None:
        _replace(cast(Parameter, self), data)

    return property(get, replace if name == "data" else None)


def _watch_views() -> None:
    """Give :class:`Whole` all that a tensor has and that returns views."""
    for name, func in surface.VIEWING.items():
        setattr(Whole, name, _method(func))
    for name, traced in surface.VIEWING_ATTRIBUTES.items():
        setattr(Whole, name, _attribute(name, traced))


_watch_views()


def _touch_and_use(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func``, of whose arguments some may rest."""
    guarded = [] if func in surface.METADATA else list(_guarded_in((args, kwargs)))
    for one in guarded:
        if isinstance(one, View):
            one.touch()
        else:
            _owner(one).touch(one)
    parameters = [one.parameter if isinstance(one, View) else one for one in guarded]
    return _use(parameters, func, args, kwargs)


def _use(
    parameters: list[Parameter],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call ``func`` on readable ``parameters``, or on views of them."""
    for parameter in parameters if func in surface.HIDING else ():
        _owner(parameter).expose(parameter)
    for parameter in parameters if func in surface.POINTING else ():
        _keep_address(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        return _lasting(func(*args, **kwargs), parameters)


def _keep_address(parameter: Parameter) -> None:
    """Let the memory of ``parameter`` live as long as someone who knows no more than its address.

    Raises:
        RuntimeError: Torch has no way to do so on the parameter's device.
    """
    tie = _ties[id(parameter)]
    if not tie.owner.gives_back(parameter):
        return
    if parameter.device.type != "cpu":
        raise RuntimeError(
            f"The address of parameter {tie.name!r} cannot be given away: its memory"
            " is given back when its module is done. Give away a copy: `p.detach().clone()`"
        )
    with torch._C.DisableTorchFunctionSubclass():
        # As for any array of numpy's, torch will no longer free the storage.
        torch.empty(0, dtype=torch.uint8).set_(parameter.untyped_storage()).numpy()


def _replace(parameter: Parameter, data: Tensor) -> None:
    _owner(parameter).replace(parameter, data)


class View(Tensor):
    """A view of a parameter; whoever reads it when the parameter rests touches the parameter.

    A plain view would point at memory that was given back.

    Attributes:
        parameter: The parameter that it is a view of.
        tie: Whose the parameter was when the view was taken.
    """

    parameter: Parameter
    tie: Tie

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make the parameters of all views readable first; views of views are views as well."""
        return _touch_and_use(func, args, kwargs or {})

    def touch(self) -> None:
        """Make the parameter readable, or raise."""
        if self.tie.has_ended:
            # Also where numpy keeps the memory, which the parameter has left; and where another
            # owner has the parameter now, in other memory.
            raise kept_too_long(self.tie.name)
        if isinstance(self.parameter, Resting) or self._is_gone:
            self.tie.owner.touch(self.parameter)

    @property
    def _is_gone(self) -> bool:
        """Whether the memory is; a parameter that is lent comes back to it."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.untyped_storage().nbytes() == 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self._ordinary(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._ordinary().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._ordinary())

    def _ordinary(self) -> Tensor:
        self.touch()
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


def kept_too_long(name: str) -> RuntimeError:
    """What to tell whoever reads a view of a parameter that has left the memory for good."""
    return RuntimeError(
        f"A view of parameter {name!r} was kept beyond the training step in which it was"
        " taken; the memory was given back. Clone what is to last: `p.detach().clone()`"
    )


def _lasting(result: Any, parameters: list[Parameter]) -> Any:
    """``result``, in which views of ``parameters`` that will rest know of it."""
    if torch.compiler.is_compiling():
        return result
    storages = {
        _storage(parameter): parameter
        for parameter in parameters
        if _owner(parameter).gives_back(parameter)
    }
    return _lasting_views(result, storages) if storages else result


def _lasting_views(value: Any, storages: dict[int, Parameter]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_lasting_views(one, storages) for one in value)
    # What has no storage of its own: sparse tensors, those that functorch wraps.
    if type(value) is Tensor and torch._C._has_storage(value):
        parameter = storages.get(_storage(value))
        if parameter is not None:
            _become_view(value, parameter)
    return value


def _become_view(tensor: Tensor, parameter: Parameter) -> None:
    # Not `as_subclass`, which adds a node to the graph.
    tensor.__class__ = View
    view = cast(View, tensor)
    view.parameter, view.tie = parameter, _ties[id(parameter)]


def keep(tensor: Tensor, parameters: Iterable[Parameter]) -> None:
    """Let ``tensor``, a view of one of readable ``parameters`` in one buffer, know of it."""
    if type(tensor) is Tensor:
        first = tensor.storage_offset()
        with torch._C.DisableTorchFunctionSubclass():
            before = [p for p in parameters if p.storage_offset() <= first]
            _become_view(tensor, max(before, key=Tensor.storage_offset))


def _storage(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor.untyped_storage()._cdata)


def _guarded_in(value: Any) -> Iterator[Parameter | View]:
    """What must be touched before ``value`` is used."""
    if isinstance(value, Resting):
        yield cast(Parameter, value)
    elif isinstance(value, View):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _guarded_in(item)
    elif isinstance(value, dict):
        yield from _guarded_in(list(value.values()))


@functools.cache
def _class(mixin: type, cls: type[Parameter]) -> type[Parameter]:
    name = f"Resting{cls.__name__}" if mixin is Resting else cls.__name__
    return cast("type[Parameter]", type(name, (mixin, cls), {}))


def _tie(parameter: Parameter, owner: Owner, name: str) -> Tie:
    key = id(parameter)
    if key not in _ties:
        # A number means something only as long as its parameter lives. Torch's own dictionary with
        # weak keys asks more of every reshard than all the rest of it.
        weakref.finalize(parameter, _ties.pop, key, None)
    _ties[key] = Tie(owner, name)
    return _ties[key]


def _owner(parameter: Parameter) -> Owner:
    return _ties[id(parameter)].owner


class Guise:
    """A class for each of some parameters, to be put on by turns with another one."""

    def __init__(self, mixin: type, parameters: Sequence[Parameter]) -> None:
        self._classes = [(p, _class(mixin, type(p))) for p in parameters]

    def put_on(self, data: Sequence[Tensor]) -> None:
        """Let the parameters be of these classes, and ``data`` their own."""
        with torch._C.DisableTorchFunctionSubclass():
            for (parameter, cls), tensor in zip(self._classes, data, strict=True):
                surface.SET_DATA(parameter, tensor)
                parameter.__class__ = cls

    def put_on_alone(self) -> None:
        """Let the parameters be of these classes, their data staying what it is."""
        for parameter, cls in self._classes:
            parameter.__class__ = cls

    def take_off(self) -> None:
        """Let those parameters that are of these classes be ordinary again."""
        for parameter, cls in self._classes:
            if type(parameter) is cls:
                unguard(parameter)


class Guises:
    """The classes that parameters of one owner have by turns, made once for all steps.

    Args:
        named: The parameters. They are known to be the owner's until :meth:`end`.
        owner: Whoever is told of their uses. It is not kept alive.

    Attributes:
        resting: Every use of the parameters goes to the owner.
        whole: The owner is told of every use of their ``data``.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], owner: Owner) -> None:
        parameters = [parameter for _, parameter in named]
        for parameter in parameters:
            unguard(parameter)
        self._ties = [_tie(parameter, owner, name) for name, parameter in named]
        self.resting = Guise(Resting, parameters)
        self.whole = Guise(Whole, parameters)

    def end(self) -> None:
        """Let go of the parameters: readable ones are ordinary again, those at rest stay so."""
        for tie in self._ties:
            tie.end()
        self.whole.take_off()


def unguard(parameter: Parameter) -> None:
    """Make ``parameter`` an object of its own class again."""
    if isinstance(parameter, (Resting, Whole)):
        parameter.__class__ = type(parameter).__mro__[2]


def point(parameter: Parameter, data: Tensor) -> None:
    """Make ``data`` the parameter's own without asking its owner."""
    with torch._C.DisableTorchFunctionSubclass():
        surface.SET_DATA(parameter, data)


def placeholder(dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element that stands for any number: NaN where the dtype has one."""
    value = float("nan") if dtype.is_floating_point else 0
    with torch.inference_mode(False), torch.no_grad():
        return torch.full((), value, dtype=dtype, device=device)
