"""The part of a parameter that a rank owns, which the optimizer holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from lightning_zero.plan import PieceRange, Plan, whole_shape


class Piece(Parameter):
    """This rank's 1-D part of a parameter's master, which the optimizer holds in its place.

    Every rank holds a piece of every parameter in its ``param_groups``, so group indices, learning
    rates and ``toggle_optimizer`` mean the same everywhere. ``requires_grad`` is the parameter's
    own: freezing a piece freezes the parameter, on every rank, and the other way round. ``grad`` is
    this rank's part of the averaged gradient.

    Attributes:
        parameter: The parameter on the module that this is a piece of.
        range: The range of the parameter's elements.
        gradients: The gradients of the parameter's group.
        place: The parameter's index in that group.
        is_copy: Whether the first rank of the tensor-parallel group has the same values.
    """

    parameter: Parameter
    range: PieceRange
    gradients: Any  # FlatGradients, which know of pieces
    place: int
    is_copy = False

    @property
    def plan(self) -> Plan:
        """The homes of the parameter's weights, gradients and masters."""
        plan: Plan = self.gradients.store.plan
        return plan

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

    def require_fits(self, grad: Tensor) -> None:
        """Raise unless ``grad`` may become the whole gradient."""
        if not isinstance(grad, Tensor):
            raise TypeError(f"assigned grad expected to be a Tensor or None but got {type(grad)}")
        parameter, dtypes = self.parameter, (self.parameter.dtype, self.dtype)
        if (grad.shape, grad.device) != (parameter.shape, parameter.device) or (
            grad.dtype not in dtypes
        ):
            raise RuntimeError(
                f"A gradient of shape {tuple(grad.shape)}, {grad.dtype} on {grad.device} cannot be"
                f" assigned to parameter {self.range.slot.name!r}, of shape"
                f" {tuple(parameter.shape)}, {self.dtype} on {parameter.device}"
            )

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The parameter's shape, over all ranks that tensor parallelism cuts it over."""
        return whole_shape(self.parameter, self.range.slot.shape)
