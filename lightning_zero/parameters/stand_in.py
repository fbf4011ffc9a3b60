"""Tensors without memory that stand for gradients on the module.

A rank's own gradient, between microbatches whose gradients are not sent, is in a buffer; the
averaged one lies in pieces over the ranks (``sharded_grad.py``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_zero.parameters.piece_range import PieceRange
from lightning_zero.tensors import internals

_aten = torch.ops.aten
_ALIASES = {_aten.detach.default, _aten.alias.default, _aten.detach_.default}
"""Operations whose result is the same gradient."""


class ShownGrad(Protocol):
    """The part of a view that its stand-ins need."""

    shown: Tensor | None
    arrival: Tensor | None

    @property
    def sharded(self) -> Tensor:
        """The stand-in for the averaged gradient."""

    def add_sharded(self, held: Tensor) -> None:
        """Add an earlier averaged gradient, if there is one, to ``held``."""


class OwnPart(Protocol):
    """The part of a parameter's piece that its gradient needs."""

    parameter: Parameter
    range: PieceRange
    reduced: Tensor | None
    stays: bool
    is_copy: bool

    @property
    def gradient(self) -> ShownGrad:
        """Return the tensor that the parameter's ``grad`` shows."""

    @property
    def last_reduced(self) -> Tensor | None:
        """Return the last value of :attr:`reduced`."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the part."""

    @property
    def device(self) -> torch.device:
        """Where the part is."""

    def numel(self) -> int:
        """Return the number of elements."""

    def detach(self) -> Tensor:
        """Return the part's values."""


class StandIn(Tensor):
    """A tensor without memory; exporting it from torch or this process gives the whole gradient.

    Attributes:
        piece: This rank's piece of the parameter.
        viewed: The stand-in that this one is a view of; ``None`` if it is no view.
        kept: This rank's part, once the piece no longer has it.
    """

    piece: OwnPart
    viewed: StandIn | None = None
    kept: Tensor | None = None

    __torch_function__ = internals.without_torch_function  # type: ignore[assignment]

    @property
    def original(self) -> StandIn:
        """The stand-in that this one is a view of, or this one if it is no view."""
        return self if self.viewed is None else self.viewed

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Set aside what autograd adds, and return views; anything else is a use."""
        if func in _ALIASES:
            return args[0].another(viewed=args[0].original)
        if func.overloadpacket.__name__ in ("add", "add_") and _is_autograd_adding(args):
            args[0].piece.gradient.arrival = args[1]
            return args[0]
        return cls.use(func, args, kwargs or {})

    @classmethod
    @abstractmethod
    def use(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``func``, some of whose arguments are stand-ins of this class."""

    @abstractmethod
    def another(self, viewed: StandIn | None = None) -> StandIn:
        """Return a new stand-in for the same gradient, or a view of ``viewed``."""

    @abstractmethod
    def whole(self) -> Tensor:
        """Return the whole gradient, an ordinary tensor."""

    @property
    def data(self) -> Tensor:
        """The same gradient; assigning to it copies values, and keeps its dtype and shape."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        dtypes = (self.dtype, self.piece.dtype)
        if (value.shape, value.device) != (self.shape, self.device) or value.dtype not in dtypes:
            raise RuntimeError(
                f"Data of shape {tuple(value.shape)}, {value.dtype} on {value.device} cannot be"
                f" assigned to the gradient of parameter {self.piece.range.slot.name!r}, of shape"
                f" {tuple(self.shape)}, {self.dtype} on {self.device}"
            )
        with torch.no_grad():
            self.copy_(value)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole gradient as an array."""
        return self.whole().numpy(force=force)

    def tolist(self) -> Any:
        """Return the whole gradient as nested lists."""
        return self.whole().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.whole().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _is_autograd_adding(args: Sequence[Any]) -> bool:
    """Return whether autograd is adding a gradient that it has finished to a stand-in."""
    is_ours = internals.in_backward() and isinstance(args[0], StandIn)
    return is_ours and not isinstance(args[1], StandIn)


class UnsyncedGrad(StandIn):
    """The stand-in for the gradient that this rank has accumulated since the last reduction.

    Using it is not a collective, unless an earlier averaged gradient was kept: then the first use
    gathers that.

    Attributes:
        held: The whole gradient, in the buffer from which it will be reduced.
    """

    held: Tensor

    @staticmethod
    def __new__(cls, piece: OwnPart, like: Tensor, held: Tensor) -> UnsyncedGrad:
        """Make the stand-in for ``held``, with the dtype and device of ``like``."""
        made: UnsyncedGrad = internals.make_wrapper(
            cls, held.shape, strides=held.stride(), dtype=like.dtype, device=like.device
        )
        made.piece, made.held = piece, held
        return made

    @classmethod
    @override
    def use(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Work on the held gradient."""
        target = args[0] if func._schema.is_mutable else None
        args, kwargs = tree_map_only(UnsyncedGrad, UnsyncedGrad.whole, (args, kwargs))
        result = func(*args, **kwargs)
        return target if isinstance(target, UnsyncedGrad) else result

    @override
    def another(self, viewed: StandIn | None = None) -> UnsyncedGrad:
        made = UnsyncedGrad(self.piece, self, self.held)
        made.viewed = viewed
        return made

    @override
    def whole(self) -> Tensor:
        """Return the gradient as DDP shows it within ``no_sync``; changes to it persist.

        Raises:
            RuntimeError: The parameter shows another gradient by now, or none.
        """
        if self.piece.gradient.shown is not self.original:
            raise RuntimeError(
                "You kept a reference to the unreduced gradient of parameter"
                f" {self.piece.range.slot.name!r}, and its buffer has been reused since. Keep a"
                " copy instead: `p.grad.clone()`"
            )
        self.piece.gradient.add_sharded(self.held)
        return self.held

    def __setitem__(self, index: Any, value: Any) -> None:
        self.whole()[index] = value.whole() if isinstance(value, UnsyncedGrad) else value

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Unreduced gradient of this rank, of shape {tuple(self.shape)}, {self.dtype}"
