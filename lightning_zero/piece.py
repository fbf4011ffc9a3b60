"""What an optimizer holds in place of a parameter: the part of its master that this rank owns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.buffer import lasting_tensors
from lightning_zero.layout import Slot

_GRAD: Any = Tensor.grad


class Piece(Parameter):
    """The 1-D part of one parameter's master on this rank, possibly empty.

    Every rank holds a piece of every parameter in its ``param_groups``, so group indices, learning
    rates and ``toggle_optimizer`` mean the same everywhere. ``requires_grad`` is the parameter's
    own: freezing a piece freezes the parameter, on every rank, and the other way round. ``grad`` is
    this rank's part of the averaged gradient; what the user makes of the parameter's gradient
    (drops it, puts another in its place) becomes the piece's.

    Attributes:
        parameter: The parameter on the module that this is a piece of.
        slot: Where that parameter lies in its buffer.
        start: First element of the piece, counted in the parameter's memory order.
        stop: One past its last element.
        face: What stands for the whole gradient on the parameter.
        local: What stands for the parameter's gradient while it is this rank's own, between
            microbatches whose gradients are not sent.
        shown: What the engine left as the parameter's gradient: one of the two or ``None``.
        was_shown: Whether there was an averaged gradient when the last backward pass began.
        is_dropped: Whether the user dropped the local gradient.
        arrival: What autograd added to what is shown.
    """

    parameter: Parameter
    slot: Slot
    start: int
    stop: int
    face: Tensor
    local: Tensor | None
    shown: Tensor | None
    was_shown: bool
    is_dropped: bool
    arrival: Tensor | None

    @classmethod
    def cut(cls, parameter: Parameter, slot: Slot, data: Tensor, start: int) -> Piece:
        """The piece of ``parameter`` that ``data`` holds from element ``start`` on."""
        with lasting_tensors():
            piece = cls(data, requires_grad=False)
        piece.parameter, piece.slot = parameter, slot
        piece.start, piece.stop = start, start + data.numel()
        piece.local = piece.shown = piece.arrival = None
        piece.was_shown = piece.is_dropped = False
        return piece

    def part_of(self, whole: Tensor) -> Tensor:
        """The elements ``[n]`` of ``whole``, of the parameter's shape, that this piece covers.

        They share the memory of ``whole`` where its elements lie in the parameter's order: of a
        tensor that is mapped from a file nothing else is read.
        """
        if whole.stride() == self.slot.stride:
            return whole.as_strided((self.stop - self.start,), (1,), self._place_in(whole))
        flat = whole.new_empty(self.slot.numel)
        flat.as_strided(self.slot.shape, self.slot.stride).copy_(whole)
        return flat[self.start : self.stop]

    def _place_in(self, whole: Tensor) -> int:
        # An empty piece may begin behind the storage of a tensor without elements.
        return int(whole.storage_offset()) + (self.start if self.stop > self.start else 0)

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter wants a gradient."""
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
        """What an optimizer sees, and drops: :attr:`reduced`, or the whole :attr:`local`."""
        # Optimizers ask several times per step: the usual case costs no further call.
        with torch._C.DisableTorchFunctionSubclass():
            if _GRAD.__get__(self.parameter) is not self.shown:
                self._follow()
        return self.local if self.local is not None else _GRAD.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self.local is not None:
            self._drop_local()
        _GRAD.__set__(self, value)

    @property
    def reduced(self) -> Tensor | None:
        """This rank's part of the averaged gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            if _GRAD.__get__(self.parameter) is not self.shown:
                self._follow()
        return _GRAD.__get__(self)  # type: ignore[no-any-return]

    @reduced.setter
    def reduced(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @property
    def kept(self) -> Tensor | None:
        """What :attr:`reduced` was when it was last asked for; its memory is there until then."""
        return _GRAD.__get__(self)  # type: ignore[no-any-return]

    def install(self, reduced: Tensor) -> None:
        """Let ``reduced`` be the piece's gradient, and the face the parameter's."""
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self.parameter, self.face)
        self.shown = self.face
        # An optimizer that saw a gradient of no elements would make a state for it.
        if self.stop > self.start:
            _GRAD.__set__(self, reduced)

    def show_grad(self) -> None:
        """Let the face be the parameter's gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self.parameter, self.face)
        self.shown = self.face

    def show_local(self, local: Tensor) -> None:
        """Let this rank's own gradient be the parameter's."""
        self.parameter.grad = self.shown = self.local = local

    def hide_grad(self) -> None:
        """Make room for autograd's own gradient on the parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            if _GRAD.__get__(self.parameter) is not self.shown:
                self._follow()
        self.was_shown = self.shown is self.face or (self.local is not None and self.was_shown)
        if self.shown is not None:
            self.parameter.grad = self.shown = None
        self.local = None

    def claim_grad(self) -> Tensor | None:
        """Take the gradient that autograd just finished off the parameter."""
        grad, self.arrival = self.arrival, None
        if grad is not None:
            self.parameter.grad = self.shown
            return grad
        grad, self.parameter.grad = self.parameter.grad, None
        if self.shown is not None:
            # Autograd did not add to what was shown, so the user had dropped it.
            self.grad = self.shown = None
        return grad

    def _drop_local(self) -> None:
        if self.parameter.grad is self.shown:
            self.parameter.grad = None
        self.local = self.shown = None
        self.was_shown, self.is_dropped = False, True

    def _follow(self) -> None:
        """Do as the user, who dropped the parameter's gradient or put another in its place."""
        with torch._C.DisableTorchFunctionSubclass():
            theirs = _GRAD.__get__(self.parameter)
        if theirs is self.shown:
            return
        if theirs is None:
            self.grad = self.shown = None
            return
        if self.local is not None:
            self.parameter.grad, self.reduced, self.was_shown = self.local, None, False
            self.local.copy_(theirs.detach())
            return
        self.show_grad()
        if self.numel():
            with lasting_tensors():
                self.grad = self.part_of(theirs.detach()).to(self.dtype, copy=True)

    def __repr__(self) -> str:  # type: ignore[override]
        shape = tuple(self.parameter.shape)
        return f"Piece [{self.start}:{self.stop}] of a parameter of shape {shape}, {self.dtype}"
