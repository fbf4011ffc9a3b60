"""Which engine owns a parameter, while that engine lives and has not released the parameter.

Owners are not kept alive: parameters outlive their training, and may be trained again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from lightning_zero.parameters.living_views import LivingViews
from lightning_zero.tensors import properties


class Owner(Protocol):
    """The object that knows how a guarded parameter is read and written."""

    def touch(self, parameters: Sequence[Parameter]) -> None:
        """Make ``parameters``, which are used together, readable."""

    def write(self, parameter: Parameter, value: Tensor) -> None:
        """Store ``value``, of the parameter's shape, as the parameter's new value."""


class Memory(Protocol):
    """The flat memory in which parameters lie while they are readable, by their indices."""

    @property
    def gives_back(self) -> bool:
        """Return whether it is released while views may live."""

    def expose(self, index: int, *, is_plain: bool = False) -> None:
        """Note that a parameter may be changed without its version counter.

        With ``is_plain``, that it has a plain view, from which an array may be made unnoticed.
        """

    def replace(self, index: int, data: Tensor) -> None:
        """Store ``data`` as a parameter's new value, or raise."""


class Ownership:
    """The tie of a parameter to its owner and its memory, until the owner ends it or is gone.

    Afterwards a readable parameter is one as in plain torch, and a guarded one stays at rest.

    Args:
        owner: The owner, not kept alive.
        memory: The memory of the parameter, not kept alive.
        index: The parameter's index in that memory.
        parameter: The parameter, before it was owned.

    Attributes:
        name: The parameter's qualified name.
        dtype: The dtype of the parameter's master.
        stride: The parameter's stride before it was owned.
        former: The memory that it had before, not kept alive.
        views: The living views of the parameter.
        last_hook: The ``id`` of the owner's hook that takes gradients; ``None`` without one.
    """

    __slots__ = (
        "_index", "_life", "_memory", "_owner", "dtype", "former", "last_hook", "name", "stride",
        "views",
    )  # fmt: skip

    def __init__(
        self,
        owner: Owner,
        memory: Memory,
        index: int,
        name: str,
        dtype: torch.dtype,
        parameter: Parameter,
    ) -> None:
        self._owner: Callable[[], Owner | None] = weakref.ref(owner)
        self._memory: Callable[[], Memory | None] = weakref.ref(memory)
        self._index = index
        self.name, self.dtype, self.stride = name, dtype, parameter.stride()
        self.former = StorageWeakRef(parameter.untyped_storage())  # type: ignore[no-untyped-call]
        self.views = LivingViews()
        self.last_hook: int | None = None
        # An id is valid only while its parameter lives.
        key = id(parameter)
        self._life = weakref.ref(parameter, lambda _: _ownerships.pop(key, None))

    def end(self) -> None:
        """Release the parameter."""
        self._owner = self._memory = lambda: None

    @property
    def is_over(self) -> bool:
        """Return whether the parameter has no owner any more."""
        return self._owner() is None

    @property
    def owner(self) -> Owner:
        """The owner.

        Raises:
            RuntimeError: There is none any more; a parameter that was left at rest stays so.
        """
        owner = self._owner()
        if owner is None:
            raise RuntimeError(
                f"Parameter {self.name!r} was left sharded when training ended:"
                " restore_weights=False was set, an exception ended the run, or the engine was"
                " never closed. Load the weights from a checkpoint into a new module, or train with"
                " restore_weights=True."
            )
        return owner

    @property
    def gives_back(self) -> bool:
        """Return whether the parameter's memory is released while views may live."""
        memory = self._memory()
        return memory is not None and memory.gives_back

    def expose(self, *, is_plain: bool = False) -> None:
        """Note that the parameter may be changed unnoticed; see :meth:`Memory.expose`."""
        memory = self._memory()
        if memory is not None:
            memory.expose(self._index, is_plain=is_plain)

    def replace(self, parameter: Parameter, data: Tensor) -> None:
        """Store ``data`` as the new value of ``parameter``, or raise."""
        memory = self._memory()
        if memory is None:
            properties.set_data(parameter, data)
        else:
            memory.replace(self._index, data)


_ownerships: dict[int, Ownership] = {}
"""The last ownership of each living parameter, by the parameter's ``id``.

Torch's own dictionary with weak keys would cost every reshard more than all the rest of it.
"""


def take(
    parameter: Parameter, owner: Owner, memory: Memory, index: int, name: str, dtype: torch.dtype
) -> Ownership:
    """Give ``parameter``, which lies at ``index`` in ``memory``, to ``owner``."""
    ownership = _ownerships[id(parameter)] = Ownership(owner, memory, index, name, dtype, parameter)
    return ownership


# Tracing this, torch's compiler would walk over the whole table, from which the garbage of other
# models may take entries meanwhile.
@torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
def ownership_of(parameter: Parameter) -> Ownership:
    """Return the last ownership of a parameter that has had one."""
    return _ownerships[id(parameter)]
