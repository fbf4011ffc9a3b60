"""The part of a parameter that a rank owns, which the optimizer holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.parameters.grad_view import GradientView
from lightning_zero.parameters.piece_range import PieceRange
from lightning_zero.plan import whole_shape
from lightning_zero.tensors import internals

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
        if view.follows:
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
    def whole_shape(self) -> tuple[int, ...]:
        """The parameter's shape, over all ranks that tensor parallelism cuts it over."""
        return whole_shape(self.parameter, self.range.slot.shape)

    @property
    def reduced(self) -> Tensor | None:
        """This rank's part of the averaged gradient."""
        view = self.gradient
        if view.follows:
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
    def last_reduced(self) -> Tensor | None:
        """The last value of :attr:`reduced`, which holds its memory until the next read."""
        with internals.as_plain_tensors():
            return _GRAD.__get__(self)  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        shape, of = tuple(self.parameter.shape), self.range
        return f"Piece [{of.start}:{of.stop}] of a parameter of shape {shape}, {self.dtype}"


def averages(pieces: Sequence[Piece]) -> list[Tensor | None]:
    """Follow user changes to gradients, and return each piece's part of its averaged gradient."""
    with internals.as_plain_tensors():
        for piece in pieces:
            theirs, view = _GRAD.__get__(piece.parameter), piece.gradient
            if theirs is view.shown:
                continue
            if theirs is None:
                view.drop()  # as `follow` does, a call less for every `zero_grad`
            else:
                view.follow()
        return list(map(_GRAD.__get__, pieces))


def stop_following(pieces: Sequence[Piece]) -> None:
    """Follow user changes to gradients a last time, before the many reads of an optimizer's step.

    Until :func:`follow_again`, nothing but the step changes gradients.
    """
    averages(pieces)
    for piece in pieces:
        piece.gradient.follows = False


def follow_again(pieces: Iterable[Piece]) -> None:
    """Follow user changes to gradients at each read again, after a step."""
    for piece in pieces:
        piece.gradient.follows = True
