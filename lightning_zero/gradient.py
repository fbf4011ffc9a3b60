"""``parameter.grad`` after a backward pass: the true gradient, though no rank holds all of it.

The averaged gradient of a parameter lies in pieces over the ranks. Its **face** is a tensor without
memory that stands for it on the module, so that code written for whole gradients goes on working:

* a norm is computed from the pieces, exactly, with one small message (one for a whole list);
* an element-wise change in place (``mul_``, ``clamp_``, ``zero_``, ``copy_``) is made to the piece;
* everything else gathers the whole gradient.

All but the changes talk to the other ranks, so every rank must do the same. A face always shows
what the piece holds now; after ``optimizer.zero_grad()`` that is zeros. Under mixed precision the
face has the parameter's dtype, and what is computed from it the more precise one of the piece.

Between microbatches whose gradients are not sent, every rank has a whole gradient of its own, and a
:class:`LocalGrad` stands for that one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._pytree import tree_map_only

from lightning_zero.comm import Comm
from lightning_zero.piece import Piece

_aten = torch.ops.aten
_ALIASES = {_aten.detach.default, _aten.alias.default, _aten.detach_.default}
_WRITES = {_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}
"""Element-wise changes that torch does not tag as such."""


class _Exported(Tensor):
    """What leaves torch, or this process, is the whole gradient."""

    def whole(self) -> Tensor:
        """The whole gradient, an ordinary tensor."""
        raise NotImplementedError

    def numpy(self, *, force: bool = False) -> Any:
        """The whole gradient as an array."""
        return self.whole().numpy(force=force)

    def tolist(self) -> Any:
        """The whole gradient as nested lists."""
        return self.whole().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.whole().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class GradFace(_Exported):
    """Stands for the whole gradient of a parameter of which every rank holds a piece.

    Attributes:
        piece: This rank's piece of the parameter.
        comm: The ranks.
        assemble: Makes the whole of which every rank passes its part.
    """

    piece: Piece
    comm: Comm
    assemble: Callable[[Tensor], Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, piece: Piece, like: Tensor, comm: Comm, assemble: Callable[[Tensor], Tensor]
    ) -> GradFace:
        """Make the face of ``piece``'s parameter, of the dtype and on the device of ``like``."""
        face: GradFace = Tensor._make_wrapper_subclass(
            cls, piece.slot.shape, strides=piece.slot.stride, dtype=like.dtype, device=like.device
        )
        face.piece, face.comm, face.assemble = piece, comm, assemble
        return face

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Work on the pieces where that is exact, else on the whole gradient."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func in _ALIASES:
            face = args[0]
            return GradFace(face.piece, face, face.comm, face.assemble)
        if name in ("add", "add_") and _is_autograd_adding(args):
            return args[0]._take_in(args[1])
        if name == "linalg_vector_norm" and _is_of_all(args):
            return _norms([args[0]], _order(args, kwargs))[0].to(kwargs.get("dtype"))
        if name == "_foreach_norm":
            return _norm_of_each(args[0], _order(args, kwargs), kwargs.get("dtype"))
        if _changes_elements(func, name):
            return _change(func, args, kwargs)
        if func._schema.is_mutable and _holds_face(args[0]):
            raise _cannot_change(name)
        args, kwargs = tree_map_only(GradFace, GradFace.whole, (args, kwargs))
        result = func(*args, **kwargs)
        return tree_map_only(Tensor, _View.of, result) if func.is_view else result

    def whole(self) -> Tensor:
        """The whole gradient, in the precision of the piece; every rank calls it."""
        return self.assemble(self.part)

    @property
    def part(self) -> Tensor:
        """What this rank holds of the gradient; zeros if the optimizer dropped it."""
        grad = self.piece.reduced
        return grad if grad is not None else torch.zeros_like(self.piece.detach())

    def part_to_change(self) -> Tensor:
        """:attr:`part`, held by the piece, so that changes last."""
        if self.piece.reduced is None and self.piece.numel():
            self.piece.reduced = self.part
        return self.part

    def _take_in(self, grad: Tensor) -> Tensor:
        """Keep what autograd adds before the engine has made room for it."""
        self.piece.arrival = grad
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        whole = self.whole()
        whole[index] = value.whole() if isinstance(value, GradFace) else value
        self.copy_(whole)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Gradient in pieces over the ranks, of shape {tuple(self.shape)}, {self.dtype}"


# Else torch's `clip_grad_norm_` asks for one norm after the other on a device, each in a message of
# its own. Private, and what torch itself does for DTensor.
_foreach_supported_types.append(GradFace)  # type: ignore[arg-type]


class LocalGrad(_Exported):
    """Stands for the gradient that this rank summed up by itself since the last reduction.

    Reading and changing it talks to no other rank, unless averaged gradients of before were kept:
    then the first use gathers them.

    Attributes:
        piece: This rank's piece of the parameter.
        held: The whole gradient, in the buffer from which it will be reduced.
        averaged: The face of an averaged gradient of before, to which :attr:`held` adds.
    """

    piece: Piece
    held: Tensor
    averaged: GradFace | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, piece: Piece, like: Tensor, held: Tensor) -> LocalGrad:
        """Show ``held`` with the dtype of ``like``, which a parameter wants of its gradient."""
        local: LocalGrad = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=like.dtype, device=like.device
        )
        local.piece, local.held = piece, held
        face = piece.face
        local.averaged = face if piece.was_shown and isinstance(face, GradFace) else None
        return local

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Work on the gradient that is held."""
        kwargs = kwargs or {}
        if func in _ALIASES:
            return LocalGrad(args[0].piece, args[0], args[0].held)
        if func.overloadpacket.__name__ in ("add", "add_") and _is_autograd_adding(args):
            args[0].piece.arrival = args[1]
            return args[0]
        target = args[0] if func._schema.is_mutable else None
        args, kwargs = tree_map_only(LocalGrad, LocalGrad.whole, (args, kwargs))
        result = func(*args, **kwargs)
        return target if isinstance(target, LocalGrad) else result

    def whole(self) -> Tensor:
        """The gradient as DDP shows it within ``no_sync``; changes of it last."""
        if self.averaged is not None and self.piece.was_shown:
            # Averaging it once more, with what every rank adds, leaves it what it is.
            self.held.add_(self.averaged.whole())
            self.piece.reduced, self.piece.was_shown = None, False
        return self.held

    def __setitem__(self, index: Any, value: Any) -> None:
        self.whole()[index] = value.whole() if isinstance(value, LocalGrad) else value

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Gradient of this rank alone, of shape {tuple(self.shape)}, {self.dtype}"


class _View(Tensor):
    """A view of a gathered gradient; it may be read only, since a change would be lost."""

    @classmethod
    def of(cls, view: Tensor) -> Tensor:
        """The same view, read-only."""
        return view.as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse changes; what is no view is an ordinary tensor."""
        name = func.__name__
        changes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if changes and isinstance(args[0], cls):
            raise _cannot_change(f"{name} of a view")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        is_view = isinstance(result, Tensor) and result._base is not None
        return cls.of(result) if is_view else tree_map_only(cls, _ordinary, result)


def _ordinary(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor)


def _cannot_change(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} cannot change a gradient that lies in pieces over the ranks. Change a copy"
        " (`grad = p.grad.clone()`) and put it back (`p.grad = grad`)."
    )


def _norms(faces: Sequence[GradFace], order: float) -> Tensor:
    """The norm of each gradient over all ranks, in one message."""
    parts = [face.part for face in faces]
    dtype = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    dtype = torch.promote_types(torch.float32, dtype)
    zero = torch.zeros((), dtype=dtype, device=faces[0].comm.device)
    norms = [
        torch.linalg.vector_norm(part, order, dtype=dtype) if part.numel() else zero
        for part in parts
    ]
    local = torch.stack(norms)
    if order == inf:
        faces[0].comm.max(local)
        return local
    if order == 0:
        faces[0].comm.sum(local)
        return local
    powers = local.pow(order)
    faces[0].comm.sum(powers)
    return powers.pow(1 / order)


def _norm_of_each(
    tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None
) -> list[Tensor]:
    """The norms of faces, in one message, and of tensors that are whole, in their order."""
    faces = [one for one in tensors if isinstance(one, GradFace)]
    norms = iter(_norms(faces, order).to(dtype).unbind())
    return [
        next(norms)
        if isinstance(one, GradFace)
        else torch.linalg.vector_norm(one, order, dtype=dtype)
        for one in tensors
    ]


def _order(args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    return float(args[1] if len(args) > 1 else kwargs.get("ord", 2))


def _is_of_all(args: Sequence[Any]) -> bool:
    """Whether a vector norm is over all dimensions, and of an order that pieces can add up."""
    dims = args[2] if len(args) > 2 else None
    is_whole = dims is None or len(dims) == args[0].dim()
    return is_whole and not any(args[3:]) and (len(args) < 2 or args[1] >= 0)


def _is_autograd_adding(args: Sequence[Any]) -> bool:
    stand_ins = (GradFace, LocalGrad)
    is_in_backward = torch._C._current_graph_task_id() != -1
    return is_in_backward and isinstance(args[0], stand_ins) and not isinstance(args[1], stand_ins)


def _holds_face(value: Any) -> bool:
    return isinstance(value, GradFace) or (
        isinstance(value, (list, tuple)) and any(isinstance(one, GradFace) for one in value)
    )


def _changes_elements(func: Any, name: str) -> bool:
    if not name.endswith("_"):
        return False
    return name.startswith("_foreach") or torch.Tag.pointwise in func.tags or func in _WRITES


def _change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do to the pieces what ``func`` would do to the whole gradients."""
    targets, *others = args
    if isinstance(targets, (list, tuple)):
        parts = [one.part_to_change() if isinstance(one, GradFace) else one for one in targets]
        matched = [
            [_matching(one, target) for one, target in zip(other, targets, strict=True)]
            if isinstance(other, (list, tuple))
            else other
            for other in others
        ]
        func(parts, *matched, **kwargs)
        return None
    if not isinstance(targets, GradFace):
        args, kwargs = tree_map_only(GradFace, GradFace.whole, (args, kwargs))
        return func(*args, **kwargs)
    matched = [_matching(other, targets) for other in others]
    matched_kwargs = {key: _matching(value, targets) for key, value in kwargs.items()}
    func(targets.part_to_change(), *matched, **matched_kwargs)
    return targets


def _matching(value: Any, target: Any) -> Any:
    """The part of an operand that meets this rank's part of ``target``."""
    if not isinstance(value, Tensor) or (value.dim() == 0 and not isinstance(value, GradFace)):
        return value
    if not isinstance(target, GradFace):
        return value.whole() if isinstance(value, GradFace) else value
    if isinstance(value, GradFace):
        if value.piece is target.piece:
            return value.part
        value = value.whole()
    return target.piece.part_of(value.expand(target.shape))
