"""Stand-ins for whole averaged gradients, of which every rank holds only a piece.

The averaged gradient of a parameter lies in pieces over the ranks. A :class:`ShardedGrad` is a
tensor without memory that stands for it on the module, so that code written for whole gradients
keeps working:

* a norm is computed from the pieces, exactly, with one small message (one for a whole list);
* an element-wise change in place (``mul_``, ``clamp_``, ``zero_``, ``copy_``) is made to the piece;
* everything else gathers the whole gradient.

All but the changes are collectives, so every rank must do the same. The stand-in shows what the
piece holds now, or zeros if only the piece's gradient was dropped. When the parameter gets another
gradient or none, a stand-in that is still referenced keeps its values. In mixed precision it has
the dtype of the piece, or of the parameter where torch requires that; results computed from it
have the dtype of the piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_zero.comm import Communicator, SyncPoint
from lightning_zero.parameters.stand_in import OwnPart, StandIn
from lightning_zero.tensors import internals, runs_outside

_aten = torch.ops.aten
_WRITES = {_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}
"""Element-wise changes that torch does not tag as pointwise."""
_UNSCALE = _aten._amp_foreach_non_finite_check_and_unscale_.default
_NORM = f"{SyncPoint.GRADIENT.value}: its norm"


class ShardedGrad(StandIn):
    """The stand-in for an averaged gradient, of which every rank holds a piece.

    Attributes:
        comm: The ranks.
        assemble: Returns the whole tensor, assembled from the parts that all ranks pass.
    """

    comm: Communicator
    assemble: Callable[[Tensor], Tensor]

    @staticmethod
    def __new__(
        cls,
        piece: OwnPart,
        dtype: torch.dtype,
        device: torch.device,
        comm: Communicator,
        assemble: Callable[[Tensor], Tensor],
    ) -> ShardedGrad:
        """Make the stand-in for ``piece``'s parameter."""
        slot = piece.range.slot
        made: ShardedGrad = internals.make_wrapper(
            cls, slot.shape, strides=slot.stride, dtype=dtype, device=device
        )
        made.piece, made.comm, made.assemble = piece, comm, assemble
        return made

    @classmethod
    @override
    def use(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Work on the pieces where that is exact, else on the whole gradient."""
        name = func.overloadpacket.__name__
        if name == "linalg_vector_norm" and _is_of_all(args):
            return _norms([args[0]], _order(args, kwargs))[0].to(kwargs.get("dtype"))
        if name == "_foreach_norm":
            return _norm_of_each(args[0], _order(args, kwargs), kwargs.get("dtype"))
        if _changes_elements(func, name):
            return _change(func, args, kwargs)
        if func is _UNSCALE:
            return _unscale(*args)
        if func._schema.is_mutable and _holds_one(args[0]):
            raise _cannot_change(name)
        args, kwargs = tree_map_only(ShardedGrad, ShardedGrad.whole, (args, kwargs))
        result = func(*args, **kwargs)
        return tree_map_only(Tensor, _ReadOnlyView.of, result) if func.is_view else result

    @override
    @runs_outside
    def whole(self) -> Tensor:
        """Return the whole gradient, in the dtype of the piece; a collective."""
        about = f"of parameter {self.piece.range.slot.name!r}"
        self.comm.control.call(SyncPoint.GRADIENT, about=about).wait()
        return self.assemble(self.part)

    @override
    def another(self, viewed: StandIn | None = None) -> ShardedGrad:
        made = ShardedGrad(self.piece, self.dtype, self.device, self.comm, self.assemble)
        made.viewed = viewed
        return made

    @property
    def part(self) -> Tensor:
        """This rank's part of the gradient; zeros if the optimizer dropped it.

        Raises:
            RuntimeError: A gradient of this rank alone was added to it.
        """
        grad, original = None, self.original
        if original.kept is None:
            grad = self.piece.reduced  # follows a replacement by the user, which may set `kept`
        if original.kept is not None:
            return original.kept
        if original is not self.piece.gradient.sharded:
            raise RuntimeError(
                "You kept a reference to the gradient of parameter"
                f" {self.piece.range.slot.name!r}, and an unreduced gradient has been added to it"
                " since. Keep a copy instead: `p.grad.clone()`"
            )
        return grad if grad is not None else torch.zeros_like(self.piece.detach())

    def part_to_change(self) -> Tensor:
        """Return :attr:`part`, held by the piece or the stand-in, so that changes to it persist."""
        part = self.part
        if self.original.kept is None and self.piece.numel():
            self.piece.reduced = part
        return part

    def __setitem__(self, index: Any, value: Any) -> None:
        whole = self.whole()
        whole[index] = value.whole() if isinstance(value, ShardedGrad) else value
        self.copy_(whole)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Gradient sharded over the ranks, of shape {tuple(self.shape)}, {self.dtype}"


internals.measure_together(ShardedGrad)


class _ReadOnlyView(Tensor):
    """A read-only view of a gathered gradient: a change to it would be lost."""

    @classmethod
    def of(cls, view: Tensor) -> Tensor:
        """Return the same view, read-only."""
        return view.as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse changes; results that are not views become ordinary tensors."""
        name = func.__name__
        changes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if changes and isinstance(args[0], cls):
            raise _cannot_change(f"{name} on a view")
        with internals.as_plain_tensors():
            result = func(*args, **(kwargs or {}))
        is_view = isinstance(result, Tensor) and result._base is not None
        return (
            cls.of(result)
            if is_view
            else tree_map_only(cls, lambda one: one.as_subclass(Tensor), result)
        )


def _cannot_change(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} cannot modify a gradient that is sharded over the ranks. Modify a copy"
        " (`grad = p.grad.clone()`) and assign it back (`p.grad = grad`)."
    )


def _norms(grads: Sequence[ShardedGrad], order: float) -> Tensor:
    """Return the norm of each gradient over all ranks, in one message."""
    parts, comm = [grad.part for grad in grads], grads[0].comm
    parts = [part.abs() if part.is_complex() else part for part in parts]
    dtype = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    dtype = torch.promote_types(torch.float32, dtype)
    zero = torch.zeros((), dtype=dtype, device=parts[0].device)
    norms = [
        zero
        if grad.piece.is_copy or not part.numel()
        else torch.linalg.vector_norm(part, order, dtype=dtype)
        for grad, part in zip(grads, parts, strict=True)
    ]
    local = stack_on(comm.device, norms)
    if order == inf:
        comm.control.max(local, _NORM)
        return local
    if order == 0:
        comm.sum_over_shards(local, _NORM)
        return local
    powers = local.pow(order)
    comm.sum_over_shards(powers, _NORM)
    return powers.pow(1 / order)


def stack_on(device: torch.device, numbers: Sequence[Tensor]) -> Tensor:
    """Return scalars, from one device or several, as a vector on ``device``."""
    if len({number.device for number in numbers}) > 1:
        numbers = [number.to(device) for number in numbers]
    return torch.stack([*numbers]).to(device)


def _norm_of_each(
    tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None
) -> list[Tensor]:
    """Return the norms of stand-ins, in one message, and of whole tensors, in the given order."""
    sharded = [one for one in tensors if isinstance(one, ShardedGrad)]
    norms = iter(_norms(sharded, order).to(dtype).unbind())
    return [
        next(norms)
        if isinstance(one, ShardedGrad)
        else torch.linalg.vector_norm(one, order, dtype=dtype)
        for one in tensors
    ]


def _order(args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    return float(args[1] if len(args) > 1 else kwargs.get("ord", 2))


def _is_of_all(args: Sequence[Any]) -> bool:
    """Return whether a norm is over all dimensions, and of an order that works piece by piece."""
    dims = args[2] if len(args) > 2 else None
    is_whole = dims is None or len(dims) == args[0].dim()
    return is_whole and not any(args[3:]) and (len(args) < 2 or args[1] >= 0)


def _holds_one(value: Any) -> bool:
    return isinstance(value, ShardedGrad) or (
        isinstance(value, (list, tuple)) and any(isinstance(one, ShardedGrad) for one in value)
    )


def _changes_elements(func: Any, name: str) -> bool:
    if not name.endswith("_"):
        return False
    return name.startswith("_foreach") or torch.Tag.pointwise in func.tags or func in _WRITES


def _change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply ``func`` to the pieces as if to the whole gradients."""
    targets, *others = args
    if isinstance(targets, (list, tuple)):
        parts = [one.part_to_change() if isinstance(one, ShardedGrad) else one for one in targets]

        def matching(other: Any, numbers: list[int]) -> Any:
            if isinstance(other, (list, tuple)):
                return [_matching(other[n], targets[n]) for n in numbers]
            return _beside(other, parts[numbers[0]])

        for numbers in _by_memory(targets):
            matched = [matching(other, numbers) for other in others]
            func([parts[n] for n in numbers], *matched, **kwargs)
        return None
    if not isinstance(targets, ShardedGrad):
        args, kwargs = tree_map_only(ShardedGrad, ShardedGrad.whole, (args, kwargs))
        return func(*args, **kwargs)
    matched = [_matching(other, targets) for other in others]
    matched_kwargs = {key: _matching(value, targets) for key, value in kwargs.items()}
    func(targets.part_to_change(), *matched, **matched_kwargs)
    return targets


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, factor: Tensor) -> None:
    """Unscale gradients for ``torch.amp.GradScaler``; all ranks get an inf that any has found."""
    parts = [one.part_to_change() if isinstance(one, ShardedGrad) else one for one in grads]
    for numbers in _by_memory(grads):
        device = parts[numbers[0]].device
        found = found_inf.to(device)
        _UNSCALE([parts[number] for number in numbers], found, factor.to(device))
        found_inf.copy_(torch.maximum(found_inf, found.to(found_inf.device)))
    comm = next(one.comm for one in grads if isinstance(one, ShardedGrad))
    comm.control.max(found_inf, f"{SyncPoint.GRADIENT.value}: whether it is finite")


def _by_memory(tensors: Sequence[Any]) -> list[list[int]]:
    """Return the indices of tensors, grouped by whether their parts may rest on the host."""
    found: dict[bool, list[int]] = {}
    for number, one in enumerate(tensors):
        may_be_away = isinstance(one, ShardedGrad) and not one.piece.stays
        found.setdefault(may_be_away, []).append(number)
    return [*found.values()]


def _matching(value: Any, target: Any) -> Any:
    """Return the part of an operand that lines up with this rank's part of ``target``."""
    if not isinstance(value, Tensor) or (value.dim() == 0 and not isinstance(value, ShardedGrad)):
        return _beside(value, target.piece) if isinstance(target, ShardedGrad) else value
    if not isinstance(target, ShardedGrad):
        return value.whole() if isinstance(value, ShardedGrad) else value
    if isinstance(value, ShardedGrad):
        if value.piece is target.piece:
            return value.part
        value = value.whole()
    return target.piece.range.part_of(value.expand(target.shape)).to(target.piece.device)


def _beside(value: Any, part: Tensor | OwnPart) -> Any:
    """Return an operand on the host if it is a tensor and ``part`` rests there, else unchanged."""
    if isinstance(value, Tensor) and part.device.type == "cpu":
        return value.to(part.device)
    return value
