"""The part of a parameter that a rank owns, which the optimizer holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only

from lightning_zero.parameters.grad_view import GradientView, GradState
from lightning_zero.parameters.guards import Guarded
from lightning_zero.parameters.piece_range import PieceRange
from lightning_zero.tensors import internals, lasting_tensors, properties

_GRAD: Any = Tensor.grad


class Piece(Parameter):
    """This rank's 1-D part of a parameter's master, which the optimizer holds in its place.

    Every rank holds a piece of every parameter in its ``param_groups``, so group indices, learning
    rates and ``toggle_optimizer`` mean the same everywhere. ``requires_grad`` is the parameter's
    own: freezing a piece freezes the parameter, on every rank, and the other way round. ``grad`` is
    this rank's part of the averaged gradient; it follows when the user drops or replaces the
    parameter's gradient.

    Attributes:
        parameter: The parameter on the module that this is a piece of.
        range: The range of the parameter's elements.
        gradient: What the parameter's ``grad`` shows.
        weight_dtype: The dtype in which the parameter computes.
        stays: Whether it and its states rest on the device, where others may be offloaded.
        is_copy: Whether the first rank of the tensor-parallel group has the same values.
    """

    parameter: Parameter
    range: PieceRange
    gradient: GradientView
    weight_dtype: torch.dtype
    stays: bool
    is_copy = False

    @classmethod
    def cut(
        cls,
        parameter: Parameter,
        range: PieceRange,
        shard: Tensor,
        weight_dtype: torch.dtype,
        *,
        stays: bool,
    ) -> Piece:
        """Return the piece of ``parameter`` whose values lie in this rank's ``shard``."""
        with lasting_tensors():
            piece = cls(shard[range.in_shard], requires_grad=False)
        piece.parameter, piece.range, piece.stays = parameter, range, stays
        piece.weight_dtype = weight_dtype
        return piece

    @property
    def requires_grad(self) -> bool:
        """Return whether the parameter wants a gradient."""
        return self.parameter.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.parameter.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> Piece:
        """Freeze or unfreeze the parameter, in place."""
        self.parameter.requires_grad = requires_grad
        return self

    @property
    def grad(self) -> Tensor | None:
        """The gradient for an optimizer to use or drop: :attr:`reduced`, or the unsynced one."""
        # Optimizers read this several times per step: the usual case makes no further call.
        view = self.gradient
        if not view.is_settled:
            with internals.as_plain_tensors():
                if _GRAD.__get__(self.parameter) is not view.shown:
                    view.follow()
        return view.shown if view.state.is_unsynced else _GRAD.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self.gradient.state.is_unsynced:
            self.gradient.drop()
        _GRAD.__set__(self, value)

    @property
    def part(self) -> Tensor:
        """This rank's part of the master, whether or not an optimizer is stepping."""
        return self.detach()

    @property
    def reduced(self) -> Tensor | None:
        """This rank's part of the averaged gradient."""
        view = self.gradient
        if not view.is_settled:
            with internals.as_plain_tensors():
                if _GRAD.__get__(self.parameter) is not view.shown:
                    view.follow()
        with internals.as_plain_tensors():
            return _GRAD.__get__(self)  # type: ignore[no-any-return]

    @reduced.setter
    def reduced(self, value: Tensor | None) -> None:
        with internals.as_plain_tensors():
            _GRAD.__set__(self, value)

    @property
    def kept(self) -> Tensor | None:
        """The last value of :attr:`reduced`, which holds its memory until the next read."""
        with internals.as_plain_tensors():
            return _GRAD.__get__(self)  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        shape, of = tuple(self.parameter.shape), self.range
        return f"Piece [{of.start}:{of.stop}] of a parameter of shape {shape}, {self.dtype}"


class PieceAtRest(Piece):
    """A piece outside its optimizer's step, which acts as the parameter to all code but ours.

    Code that goes through ``param_groups`` there means whole parameters. With pieces it would get
    a different norm on each rank, and change masters without the whole weights.
    """

    @property
    def grad(self) -> Tensor | None:
        """The parameter's own gradient: averaged, and of the parameter's shape."""
        with internals.as_plain_tensors():
            shown = _GRAD.__get__(self.parameter)
        # During a backward pass, or after an interrupted one: what earlier passes have left.
        is_hidden = shown is None and self.gradient.state is GradState.HIDDEN
        return self.gradient.sharded if is_hidden else shown

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with internals.as_plain_tensors():
            _GRAD.__set__(self.parameter, value)
        if value is None:
            self.gradient.drop()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Act as the piece in this package, else as the parameter; both have the master's dtype."""
        if func in properties.KINDS or internals.is_called_by(_PACKAGE):
            with internals.as_plain_tensors():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(PieceAtRest, attrgetter("parameter"), (args, kwargs or {}))
        return Guarded.__torch_function__(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with internals.as_plain_tensors():
            return super().__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        with internals.as_plain_tensors():
            return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


_PACKAGE = __name__.partition(".")[0]


def averages(pieces: Sequence[Piece]) -> list[Tensor | None]:
    """Follow user changes to gradients, and return each piece's part of its averaged gradient."""
    with internals.as_plain_tensors():
        for piece in pieces:
            if _GRAD.__get__(piece.parameter) is not piece.gradient.shown:
                piece.gradient.follow()
        return list(map(_GRAD.__get__, pieces))


def settle(pieces: Sequence[Piece]) -> None:
    """Make pieces act as pieces for an optimizer's step, while nothing else changes gradients.

    User changes to the gradients are followed once, not at each of the step's many reads.
    """
    averages(pieces)
    for piece in pieces:
        piece.__class__ = Piece
        piece.gradient.is_settled = True


def unsettle(pieces: Iterable[Piece]) -> None:
    """Make pieces act as their parameters again, after a step."""
    for piece in pieces:
        piece.__class__ = PieceAtRest
        piece.gradient.is_settled = False
