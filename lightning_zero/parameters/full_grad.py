"""The averaged gradient of a parameter as ``p.grad`` returns it: whole, but without memory.

The average lies in parts over the ranks. Plain tensors in its place would need the memory of the
whole model's gradients as soon as ``clip_grad_norm_`` or ``zero_grad`` lists them. So

* a norm is computed from the parts, exactly, with one small message (one for a whole list);
* an element-wise change in place (``mul_``, ``clamp_``, ``zero_``, ``copy_``) is made to the part;
* everything else gathers the whole gradient. What is changed of that, also through views of it,
  is written back to the part.

All but element-wise changes are collectives, so every rank must do the same. A gradient that is
kept while its parameter gets another one keeps its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_zero.comm import Communicator, SyncPoint
from lightning_zero.parameters.piece import Piece
from lightning_zero.tensors import internals, runs_outside

_aten = torch.ops.aten
_ALIASES = {_aten.detach.default, _aten.alias.default, _aten.detach_.default}
"""Operations whose result is the same gradient."""
_WRITES = {_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}
"""Element-wise changes that torch does not tag as pointwise."""
_UNSCALE = _aten._amp_foreach_non_finite_check_and_unscale_.default
_NORM = f"{SyncPoint.GRADIENT.value}: its norm"


class FullGrad(Tensor):
    """The averaged gradient of a parameter, of which every rank holds a part.

    Exporting it from torch or this process exports the whole gradient.

    Attributes:
        gradients: The gradients of the parameter's group.
        place: The parameter's index in it.
        part: This rank's part.
    """

    gradients: Any  # FlatGradients, which make these
    place: int
    part: Tensor

    __torch_function__ = internals.without_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, gradients: Any, place: int, part: Tensor, device: torch.device) -> FullGrad:
        """Make the gradient of which this rank holds ``part``, to be whole on ``device``."""
        slot = gradients.pieces[place].range.slot
        made: FullGrad = internals.make_wrapper(
            cls, slot.shape, strides=slot.stride, dtype=part.dtype, device=device
        )
        made.gradients, made.place, made.part = gradients, place, part
        return made

    @property
    def piece(self) -> Piece:
        """This rank's piece of the parameter."""
        piece: Piece = self.gradients.pieces[self.place]
        return piece

    @property
    def shared(self) -> Tensor | None:
        """The memory of the whole gradient if users have a view of it."""
        return self.gradients.lent.get(self.place) if self.is_current else None

    @property
    def is_current(self) -> bool:
        """Return whether it is the parameter's gradient still."""
        held = self.piece.grad
        is_empty = held is None and not self.part.numel()
        return self.part is held or (is_empty and self.gradients.averaged[self.place])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Work on the parts where that is exact, else on the whole gradient."""
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if func in _ALIASES:
            one = args[0]
            return FullGrad(one.gradients, one.place, one.part, one.device)
        if name == "linalg_vector_norm" and _is_of_all(args):
            return _norm_of_each(args[:1], args, kwargs)[0]
        if name == "_foreach_norm":
            return _norm_of_each(args[0], args, kwargs)
        if func is _UNSCALE:
            return _unscale(*args)
        targets = args[0] if func._schema.is_mutable else ()
        if _changes_elements(func, targets):
            _change(func, targets, args[1:], kwargs)
            return targets if isinstance(targets, Tensor) else None
        wholes: dict[int, Tensor] = {}

        is_lent = func.is_view or func._schema.is_mutable

        def whole_of(grad: FullGrad) -> Tensor:
            if id(grad) not in wholes:
                wholes[id(grad)] = grad.whole(is_lent=is_lent)
            return wholes[id(grad)]

        args, kwargs = tree_map_only(FullGrad, whole_of, (args, kwargs))
        result = func(*args, **kwargs)
        changed = [targets] if isinstance(targets, Tensor) else targets
        for grad in changed:
            if isinstance(grad, FullGrad):
                grad.part.copy_(grad.piece.range.part_of(wholes[id(grad)]))
        return targets if isinstance(targets, FullGrad) else result

    @runs_outside
    def whole(self, *, is_lent: bool = True) -> Tensor:
        """Return the whole gradient, in the dtype of the part; a collective.

        With ``is_lent``, changes to it become those of the part as long as that is the parameter's.
        """
        self.gradients.settle(self.place)
        about = f"of parameter {self.piece.range.slot.name!r}"
        comm = self.gradients.store.comm
        comm.control.call(SyncPoint.GRADIENT, about=about).wait()
        parts = [(self.piece.range.in_shard, self.part)]
        whole: Tensor = self.gradients.store.assemble(parts).views[self.place].clone()
        if not is_lent or not self.is_current:
            return whole
        # Always gathered, as ranks may differ in what they still have views of.
        whole = whole if self.shared is None else self.shared
        self.gradients.lend(self.place, whole)
        return whole

    @property
    def data(self) -> Tensor:
        """The same gradient; assigning to it copies values, and keeps its dtype and shape."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.piece.require_fits(value)
        with torch.no_grad():
            self.copy_(value)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole gradient as an array."""
        return self.whole().detach().numpy(force=force)

    def tolist(self) -> Any:
        """Return the whole gradient as nested lists."""
        return self.whole(is_lent=False).tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.whole(is_lent=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole(is_lent=False).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Gradient sharded over the ranks, of shape {tuple(self.shape)}, {self.dtype}"


internals.measure_together(FullGrad)


# -- norms ---------------------------------------------------------------------------------------


def norms_of(
    parts: Sequence[Tensor], pieces: Sequence[Piece], order: float, comm: Communicator
) -> Tensor:
    """Return the norm over all ranks of each gradient, given this rank's parts; one message."""
    parts = [part.abs() if part.is_complex() else part for part in parts]
    dtype = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    dtype = torch.promote_types(torch.float32, dtype)
    of_none = torch.full((), inf if order < 0 else 0.0, dtype=dtype, device=parts[0].device)
    found, in_memory = [of_none] * len(parts), dict[bool, list[int]]()
    for index, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
        if part.numel() and not piece.is_copy:
            in_memory.setdefault(piece.plan.stays, []).append(index)
    for own in in_memory.values():
        each = torch._foreach_norm([parts[index] for index in own], order, dtype=dtype)
        for index, norm in zip(own, each, strict=True):
            found[index] = norm
    if len({norm.device for norm in found}) > 1:
        found = [norm.to(comm.device) for norm in found]
    norms = torch.stack(found).to(comm.device)
    if abs(order) == inf:
        signed = norms if order > 0 else -norms
        comm.control.max(signed, _NORM)
        return signed.abs()
    if order == 0:
        comm.sum_over_shards(norms, _NORM)
        return norms
    total = norms.pow(order)
    comm.sum_over_shards(total, _NORM)
    return total.pow(1 / order)


def _norm_of_each(
    tensors: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the norms of sharded gradients, in one message, and of others, in the given order."""
    order, dtype = float(args[1] if len(args) > 1 else kwargs.get("ord", 2)), kwargs.get("dtype")
    sharded = [one for one in tensors if isinstance(one, FullGrad)]
    for one in sharded:
        one.gradients.settle(one.place)
    comm = sharded[0].gradients.store.comm
    found = norms_of([one.part for one in sharded], [one.piece for one in sharded], order, comm)
    norms = iter(found.to(dtype).unbind())
    return [
        next(norms)
        if isinstance(one, FullGrad)
        else torch.linalg.vector_norm(one, order, dtype=dtype)
        for one in tensors
    ]


def _is_of_all(args: Sequence[Any]) -> bool:
    """Return whether a norm is over all dimensions."""
    dims = args[2] if len(args) > 2 else None
    return (dims is None or len(dims) == args[0].dim()) and not any(args[3:])


# -- changes in place ----------------------------------------------------------------------------


def _changes_elements(func: Any, targets: Any) -> bool:
    """Return whether a call changes each element of gradients by itself."""
    name, ones = func.overloadpacket.__name__, targets if _is_list(targets) else [targets]
    if not name.endswith("_") or not any(isinstance(one, FullGrad) for one in ones):
        return False
    return name.startswith("_foreach") or torch.Tag.pointwise in func.tags or func in _WRITES


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _change(func: Any, targets: Any, others: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Apply ``func`` to the part of each target, or to the whole one if users have a view of it."""
    is_list = _is_list(targets)
    for index, target in enumerate(targets if is_list else [targets]):
        whole = target.shared if isinstance(target, FullGrad) else target
        memory = target.part if whole is None else whole

        def match(
            value: Any, target: Any = target, whole: Any = whole, memory: Any = memory
        ) -> Any:
            """Return what of an operand lines up with the memory."""
            if not isinstance(value, Tensor):
                return value
            if isinstance(value, FullGrad):
                if value.part is getattr(target, "part", None):
                    return memory
                value = value.whole(is_lent=False)
            if value.numel() == 1:
                value = value.reshape(())
            elif whole is None:
                value = target.piece.range.part_of(value.expand(target.shape))
            return value.to(memory.device)

        own = [[match(o[index])] if is_list and _is_list(o) else match(o) for o in others]
        options = {key: match(value) for key, value in kwargs.items()}
        func([memory] if is_list else memory, *own, **options)
        if isinstance(target, FullGrad) and whole is not None:
            target.part.copy_(target.piece.range.part_of(whole))


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, factor: Tensor) -> None:
    """Unscale gradients for ``torch.amp.GradScaler``; all ranks get an inf that any has found."""

    def unscale(memory: list[Tensor], factor: Tensor) -> None:
        found = torch.zeros(1, device=factor.device)
        _UNSCALE(memory, found, factor)
        found_inf.copy_(torch.maximum(found_inf, found.reshape(found_inf.shape).to(found_inf)))

    _change(unscale, grads, [factor], {})
    comm = next(one.gradients.store.comm for one in grads if isinstance(one, FullGrad))
    comm.control.max(found_inf, f"{SyncPoint.GRADIENT.value}: whether it is finite")
