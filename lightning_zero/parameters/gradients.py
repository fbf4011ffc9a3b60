"""The gradients of one group of parameters, from autograd to the optimizer and to ``p.grad``.

A gradient that autograd has finished is moved to the **partial** buffer, this rank's summand of all
gradients of the group. Reducing it leaves the average over all ranks in the **shard**. Every piece
holds its part of that as its ``grad``, which optimizers read::

    autograd -> take -> partial -> reduce -> add -> shard -> install -> ``grad`` of the pieces

The ``grad`` of a parameter is a property (:data:`GRAD`). Torch's own slot is empty but for the time
from autograd to :meth:`FlatGradients.take`, so autograd never adds to an earlier gradient. Reading
the property returns, in this order:

* a gradient that autograd has just finished, in hooks of the parameter;
* this rank's own gradient behind a backward pass that sent nothing, a copy of the partial buffer;
* the average, as a :class:`FullGrad`;
* ``None``.

Assigning to it drops or replaces both at once. **Lent** is memory of whole gradients that users may
still change: copies, views of a :class:`FullGrad`, and what they have assigned. Before anything
reads gradients, :meth:`FlatGradients.settle` writes it back.

With hybrid sharding the gradients of all microbatches but the last stay within their copy. Pieces
hold the average of the copy until the last microbatch, which sums over the copies. Values that are
equal in all copies may be averaged again, which leaves them unchanged.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.comm import Pending, ReduceBuffer
from lightning_zero.parameters.full_grad import FullGrad
from lightning_zero.parameters.piece import Piece
from lightning_zero.parameters.stores import Store
from lightning_zero.tensors import Work, internals, lasting_tensors, runs_outside

_SLOT: Any = Tensor.grad
_SMALL_BYTES = 2**14
"""Gradients up to this size are moved together: one call each would cost more than the copy."""
_TOGETHER_BYTES = 2**16
"""The most bytes that wait to be moved together; they are still in a core's cache then."""


class Reach(Enum):
    """The ranks over which the gradients of a backward pass are averaged."""

    RANK = "rank"
    """None: they stay on their rank."""
    COPY = "copy"
    """The ranks of one copy (hybrid sharding)."""
    ALL = "all"
    """All ranks."""


class FlatGradients:
    """The gradients of one group of parameters.

    It runs for every gradient, where a call costs as much as a copy, so its state is plain
    attributes and lists, not objects with methods.

    Args:
        assemble: Returns the whole tensor of a parameter, given its index and this rank's part.

    Attributes:
        pieces: This rank's pieces of the parameters.
        store: Where gradients rest.
        partial: The unreduced gradients and a view of each; ``None`` while there are none.
        filled: For each parameter, whether its gradient is, or will be, in :attr:`partial`.
        wants: For each parameter, whether it wants a gradient in this backward pass.
        used: For each parameter, whether a gradient came since gradients were last installed.
        reach: Of the last backward pass.
        is_new: Whether no optimizer has begun a step since.
        shows_own: Whether :attr:`partial` holds gradients of passes that sent nothing.
        averaged: For each parameter, whether it has an average; this rank's part may be empty.
        of_copy: The parameters whose average may be over one copy only, not over all ranks.
        lent: Whole gradients that users may still change, by parameter.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        store: Store,
        assemble: Callable[[int, Tensor], Tensor],
    ) -> None:
        self.pieces, self.store, self.assemble = pieces, store, assemble
        self.partial: tuple[ReduceBuffer, list[Tensor]] | None = None
        self.wants: list[bool] = []
        self.filled, self.used, self.averaged = ([False] * len(pieces) for _ in range(3))
        self.reach, self.is_new = Reach.ALL, True
        self.shows_own = False
        self.of_copy: set[int] = set()
        self.lent: dict[int, Tensor] = {}
        # Small gradients on their way to the partial buffer, and their bytes.
        self._taken: list[tuple[int, Tensor]] = []
        self._taken_bytes = 0
        # What reductions under way hold, for :meth:`memory`.
        self._in_flight: list[Tensor] = []
        # The shard while its gradients are not installed yet, and the work that fills it.
        self._fresh: tuple[Tensor, Work] | None = None
        # The shard of which pieces hold parts, as long as they do.
        self._installed: Callable[[], Tensor | None] = _nothing
        # What the gradients in the partial buffer are divided by. They are while they are moved, as
        # in DDP, where that costs nothing. A move that casts cannot multiply too, so then the
        # reduced shard is scaled, which is N times smaller. The same goes for a rank's own
        # gradients that are shown before they are reduced.
        casts = store.plan.grad.dtype != store.plan.weight.dtype
        self._divisor = self._usual_divisor = 1 if casts else store.comm.mesh.size
        # What :data:`GRAD` has returned, as long as it is that.
        self._shown: dict[int, weakref.ref[Tensor]] = {}
        for index, piece in enumerate(pieces):
            piece.gradients, piece.place = self, index
            _owners[id(piece.parameter)] = weakref.ref(self), index
            with internals.as_plain_tensors():
                before = _SLOT.__get__(piece.parameter)
            if before is not None:
                self.replace(index, before)

    def __reduce__(self) -> Any:
        # A pickled or copied piece has no gradient, like a parameter.
        return _nothing, ()

    # -- from autograd to the partial buffer -----------------------------------------------------

    def expect(self, reach: Reach) -> None:
        """Begin a backward pass whose gradients are averaged over ``reach``."""
        if self.lent or self._shown:
            self.settle()
            self.lent.clear()
            self._shown.clear()
        if self.partial is not None and True not in self.filled:
            self.partial, self._divisor = None, self._usual_divisor  # the user has dropped all
        stays = reach is Reach.RANK or (reach is Reach.COPY and self.store.has_copies)
        if stays or self.of_copy:
            # Shown as they are until a later reduction, or added to such: the shard is divided.
            self._divisor = 1
        self.reach, self.shows_own, self.is_new = reach, False, True
        self.wants = [piece.parameter.requires_grad for piece in self.pieces]

    def take(self, index: int, parameter: Tensor) -> None:
        """Take the gradient that autograd has just finished, to be moved to the partial buffer."""
        with internals.as_plain_tensors():
            grad = _SLOT.__get__(parameter)
            if grad is None:  # an autograd function returned none: zeros, as under DDP
                grad = torch.zeros_like(parameter)
            else:
                _SLOT.__set__(parameter, None)
        if grad.requires_grad:
            # From a backward with create_graph. `no_grad` would cost more than all the rest.
            grad = grad.detach()
        if grad.is_sparse:
            grad = grad.to_dense()
        nbytes = grad.nbytes
        if nbytes > _SMALL_BYTES or self.filled[index]:
            self._move()
            self._move_one(index, grad)
        else:
            if self.partial is None:
                self._allocate_partial()
            self._taken.append((index, grad))
            self._taken_bytes += nbytes
            if self._taken_bytes > _TOGETHER_BYTES:
                self._move()
        self.filled[index] = self.used[index] = True

    def _move_one(self, index: int, grad: Tensor) -> None:
        _, views = self.partial or self._allocate_partial()
        view = views[index]
        if self.filled[index]:
            view.add_(grad, alpha=1 / self._divisor)
        elif self._divisor == 1:
            view.copy_(grad)
        else:
            torch.mul(grad, 1 / self._divisor, out=view)

    def _move(self) -> None:
        """Move the small gradients that wait, while they are still in the cache."""
        if not self._taken:
            return
        buffer, views = self.partial or self._allocate_partial()
        taken, self._taken, self._taken_bytes = self._taken, [], 0
        targets = [views[index] for index, _ in taken]
        internals.copy_each(targets, [grad for _, grad in taken])
        if self._divisor == 1:
            return
        first, last = (end(index for index, _ in taken) for end in (min, max))
        slots = self.store.layout.slots
        if last - first + 1 == len(taken):
            # Neighbours: scale them in one pass, and the zeros between them too.
            targets = [buffer.tensor[slots[first].offset : slots[last].stop]]
        for target in targets:
            target.mul_(1 / self._divisor)

    def _allocate_partial(self) -> tuple[ReduceBuffer, list[Tensor]]:
        layout = self.store.layout
        buffer = self.store.comm.transport.reduce_buffer(layout.numel, self.store.plan.grad.dtype)
        views, was_ours = buffer.views_of(layout.slots)
        for start, stop in () if was_ours else layout.gaps:
            buffer.tensor[start:stop].zero_()
        self.partial = buffer, views
        return self.partial

    # -- from the partial buffer to the shard ----------------------------------------------------

    def reduce(self, unit: str, tag: int) -> Callable[..., None]:
        """Start to average the gradients over the ranks; return a function that finishes it.

        Called with ``is_wanted=False``, that function discards the average.
        """
        self._move()
        partial, views = self.partial or self._allocate_partial()
        for view, is_filled in zip(views, self.filled, strict=True):
            if not is_filled:
                view.zero_()
        self.partial = None
        self.filled = [False] * len(self.pieces)
        target = self.store.reduced(partial.tensor)
        self._in_flight = [partial.tensor] if target is partial.tensor else [partial.tensor, target]
        work = self.store.reduce(target, partial, unit=unit, tag=tag)
        if self.store.plan.reduce_bits is not None:
            self._in_flight = [target]  # the partial buffer is encoded, and only the code is sent
        mesh, reach = self.store.comm.mesh, self.reach
        num_ranks = mesh.shard.size if reach is Reach.COPY else mesh.size
        # What is left of the division by the number of ranks, for the shard.
        late_scale, self._divisor = self._divisor / num_ranks, self._usual_divisor
        sums = reach is Reach.ALL and self.store.has_copies
        if reach is Reach.ALL:
            self.of_copy.clear()

        def finish(*, is_wanted: bool = True) -> None:
            work.wait()
            self._in_flight = []
            if is_wanted:
                self._add(target, late_scale, unit, tag, sums=sums)

        return finish

    def _add(self, reduced: Tensor, scale: float, unit: str, tag: int, *, sums: bool) -> None:
        """Start to move an average to where gradients rest, added to earlier ones not yet dropped.

        The average is ``scale`` times ``reduced``, or if it ``sums``, times the sum of ``reduced``
        over the copies.
        """
        if self._fresh is not None:
            # From this same pass: some gradients came after their unit's reduction.
            self.wait()
        store, earlier = self.store, self._earlier()

        def sum_up(total: Tensor) -> Work:
            work = store.sum_over_copies(total, unit=unit, tag=tag)
            return Pending(
                work, then=functools.partial(total.mul_, scale) if scale != 1.0 else None
            )

        if not sums and scale != 1.0:
            reduced.mul_(scale)
        elif sums and earlier is not None:
            earlier.mul_(1 / (scale * self.store.comm.mesh.replicate.size))
        self._fresh = store.accumulate(reduced, earlier, sum_up if sums else None, unit=unit)

    def _earlier(self) -> Tensor | None:
        """Return the shard to which new gradients are added; ``None`` if there is none."""
        if self._fresh is not None:
            return self._fresh[0]
        if True not in self.averaged:
            return None
        held = [piece.grad for piece in self.pieces]
        shard = self._installed()
        parts = [piece.range.in_shard for piece in self.pieces]
        if not [grad for grad in held if grad is not None]:
            return None  # an optimizer has dropped them
        if shard is None or True in [
            grad is None or grad.data_ptr() != shard[part].data_ptr()
            for grad, part in zip(held, parts, strict=True)
            if part.start != part.stop
        ]:
            # Users may keep what they have dropped, so it is not changed.
            shard = self.store.gradients().zero_()
            for grad, part in zip(held, parts, strict=True):
                if grad is not None:
                    shard[part].copy_(grad)
        return shard

    def wait_for_copies(self) -> None:
        """Wait until the sums over the copies have arrived, if they are under way."""
        # Those that go to the host end on their way.
        if self.store.has_copies and not self.store.plan.rests_on_host:
            self.wait()

    def wait(self) -> None:
        """Wait until an average that is under way has arrived."""
        if self._fresh is not None:
            self._fresh[1].wait()
            self._fresh = self._fresh[0], Pending()

    # -- from the shard to the optimizer ---------------------------------------------------------

    @property
    def has_grads(self) -> list[bool]:
        """For each parameter, whether it got a gradient or its piece keeps an earlier one."""
        return [
            is_used or piece.grad is not None
            for is_used, piece in zip(self.used, self.pieces, strict=True)
        ]

    @property
    def awaits_copies(self) -> bool:
        """Return whether this pass has to sum gradients over the copies, even if none comes."""
        return self.reach is Reach.ALL and bool(self.of_copy)

    def install(self, has_grads: Sequence[bool]) -> None:
        """End a backward pass: give the pieces the gradients that any rank has."""
        self._shown.clear()
        if self._fresh is None:
            return
        (fresh, work), self._fresh = self._fresh, None
        work.wait()
        self._installed = weakref.ref(fresh)
        self.used = [False] * len(self.pieces)
        is_of_copy = self.reach is Reach.COPY and self.store.has_copies
        self.averaged = [*has_grads]
        for index, piece in enumerate(self.pieces):
            if has_grads[index]:
                # An optimizer would make a state for a gradient without elements.
                if piece.numel() or not piece.range.slot.numel:
                    piece.grad = fresh[piece.range.in_shard]
                if is_of_copy:
                    self.of_copy.add(index)

    def keep_own(self) -> None:
        """End a backward pass whose gradients stay on this rank."""
        self._move()
        self.shows_own = True

    def abandon(self) -> None:
        """Discard gradients that arrived or were reduced but are not given to the optimizer yet."""
        self.settle()
        self.lent.clear()
        self.partial, self._in_flight, self.shows_own = None, [], False
        self._taken, self._taken_bytes = [], 0
        is_on_host = self.store.plan.rests_on_host
        if is_on_host and self._fresh is not None and self._fresh[0] is self._installed():
            self._fresh[1].wait()  # what the user may change now would be written to later
        self._fresh = None
        self._divisor = self._usual_divisor
        for flags in (self.filled, self.used):
            flags[:] = [False] * len(flags)
        self._shown.clear()
        with internals.as_plain_tensors():
            for piece in self.pieces:
                _SLOT.__set__(piece.parameter, None)

    # -- what users read and assign --------------------------------------------------------------

    @runs_outside
    def shown(self, index: int) -> Tensor | None:
        """Return the gradient of a parameter as users see it."""
        kept = self._shown.get(index)
        if kept is not None and (grad := kept()) is not None:
            internals.hold(grad)
            if not isinstance(grad, FullGrad) or grad.is_current:
                return grad
        with lasting_tensors():
            if self.shows_own and self.filled[index]:
                grad = self._own(index)
            elif self.averaged[index]:
                grad = self._average(index)
            else:
                return None
        self._shown[index] = weakref.ref(grad)
        return grad

    def _average(self, index: int) -> FullGrad:
        piece = self.pieces[index]
        part = torch.zeros_like(piece.detach()) if piece.grad is None else piece.grad
        return FullGrad(self, index, part, self.store.plan.weight.device)

    def _own(self, index: int) -> Tensor:
        """Return a copy of this rank's own gradient, added to an earlier average: a collective."""
        assert self.partial is not None
        view, piece = self.partial[1][index], self.pieces[index]
        if self.averaged[index]:
            # Every rank adds the same, so the next average leaves it unchanged.
            view.add_(self._average(index).whole(is_lent=False))
            piece.grad, self.averaged[index] = None, False
        return self.lend(index, view.to(piece.dtype, copy=True))

    def lend(self, place: int, whole: Tensor) -> Tensor:
        """Let changes to the memory of ``whole`` count; return ``whole``."""
        if not self.shows_own:
            for lender in [*_lenders]:
                lender._release()
            _lenders.add(self)
        self.lent[place] = whole
        return whole

    def _release(self) -> None:
        """Release whole averages that users have let go of."""
        if self.shows_own:
            return
        for place in [
            place for place, whole in self.lent.items() if not internals.is_shared(whole)
        ]:
            self.settle(place)
            del self.lent[place]

    def settle(self, *places: int) -> None:
        """Write back whole gradients that users may have changed, of some parameters or all."""
        if not self.lent:
            return
        with lasting_tensors():
            for place in places or self.lent:
                whole, piece = self.lent.get(place), self.pieces[place]
                if whole is None:
                    continue
                if self.shows_own and self.filled[place] and self.partial is not None:
                    self.partial[1][place].copy_(whole)
                elif piece.grad is not None:
                    piece.grad.copy_(piece.range.part_of(whole))

    def drop(self, index: int) -> None:
        """Drop the gradient of a parameter; who keeps it, keeps its values.

        To be called where torch does not ask the classes of tensors.
        """
        if self.lent:
            self.settle(index)
            self.lent.pop(index, None)
        piece = self.pieces[index]
        piece.grad = None
        self.averaged[index] = self.filled[index] = self.used[index] = False
        self.of_copy.discard(index)
        self._shown.pop(index, None)
        _SLOT.__set__(piece.parameter, None)

    @runs_outside
    def replace(self, index: int, value: Tensor) -> None:
        """Take a gradient that users assign: their own, or the same on every rank."""
        piece = self.pieces[index]
        if isinstance(value, FullGrad):
            if value.piece is not piece:
                raise _of_another(piece, value.piece)
            if value.is_current:
                return
            part = value.part.clone()
        else:
            _check_fits(piece, value)
            with lasting_tensors():
                whole = value.detach()
                whole = whole.to_dense() if whole.is_sparse else whole
                if self.shows_own and self.filled[index] and self.partial is not None:
                    # What replaces this rank's own is sent for it, without an earlier average.
                    self.partial[1][index].copy_(whole)
                    piece.grad, self.averaged[index] = None, False
                    self._shown[index] = weakref.ref(self.lend(index, value))
                    return
                part = piece.range.part_of(whole).to(piece.device, piece.dtype, copy=True)
        with internals.as_plain_tensors():
            self.drop(index)
        self.averaged[index] = True
        if piece.numel() or not piece.range.slot.numel:
            piece.grad = part
        if not isinstance(value, FullGrad):
            self.lend(index, whole)

    def let_go(self) -> None:
        """Release the parameters: they have no gradients any more."""
        for piece in self.pieces:
            _owners.pop(id(piece.parameter), None)

    def memory(self) -> Counter[str]:
        """Return the bytes held now, by kind; see ``ShardedModel.memory``."""
        plan, shard = self.store.plan, self._fresh[0] if self._fresh else self._installed()
        rows = plan.rows({"gradients": 0 if shard is None else shard.nbytes})
        for piece in self.pieces:
            if piece.grad is not None and (shard is None or piece.grad._base is not shard):
                rows[plan.row("gradients")] += piece.grad.nbytes
        partial = self.partial[0].tensor.nbytes if self.partial is not None else 0
        rows["unreduced"] += partial + sum(tensor.nbytes for tensor in self._in_flight)
        return rows


def _nothing() -> None:
    return None


# -- the property of parameters --------------------------------------------------------------------

_owners: dict[int, tuple[weakref.ref[FlatGradients], int]] = {}
"""The gradients that a parameter has a part in, and its index there, by the parameter's ``id``."""
_lenders: weakref.WeakSet[FlatGradients] = weakref.WeakSet()
"""Gradients of which users may still change whole averages."""


def _owner_of(parameter: Parameter) -> tuple[FlatGradients | None, int]:
    owner, index = _owners.get(id(parameter), (None, 0))
    return (None if owner is None else owner()), index


def _get(parameter: Parameter) -> Tensor | None:
    with internals.as_plain_tensors():
        grad = _SLOT.__get__(parameter)
    if grad is None:
        owner, index = _owner_of(parameter)
        if owner is not None and (owner.averaged[index] or owner.shows_own):
            grad = owner.shown(index)
    return cast("Tensor | None", grad)


def _set(parameter: Parameter, value: Tensor | None) -> None:
    owner, index = _owner_of(parameter)
    with internals.as_plain_tensors():
        is_in_hook = internals.in_backward() and _SLOT.__get__(parameter) is not None
        if owner is None or is_in_hook:
            _SLOT.__set__(parameter, value)
        elif value is None:
            owner.drop(index)
    if owner is not None and not is_in_hook and value is not None:
        owner.replace(index, value)


GRAD = property(_get, _set, lambda parameter: _set(parameter, None))
"""The ``grad`` of a parameter that an engine has taken."""


def _check_fits(piece: Piece, value: Tensor) -> None:
    parameter = piece.parameter
    if not isinstance(value, Tensor):
        raise TypeError(f"assigned grad expected to be a Tensor or None but got {type(value)}")
    dtypes = (parameter.dtype, piece.dtype)
    if (value.shape, value.device) != (parameter.shape, parameter.device) or (
        value.dtype not in dtypes
    ):
        raise RuntimeError(
            f"A gradient of shape {tuple(value.shape)}, {value.dtype} on {value.device} cannot be"
            f" assigned to parameter {piece.range.slot.name!r}, of shape {tuple(parameter.shape)},"
            f" {piece.dtype} on {parameter.device}"
        )


def _of_another(piece: Piece, other: Piece) -> RuntimeError:
    name, source = piece.range.slot.name, other.range.slot.name
    return RuntimeError(
        f"The gradient of parameter {source!r} was assigned to parameter {name!r}"
        " (`p.grad = q.grad`). Gradients are sharded over the ranks, and two parameters cannot"
        " share one. Assign a copy instead: `p.grad = q.grad.clone()`"
    )


# -- what optimizers need --------------------------------------------------------------------------


def settle(pieces: Iterable[Piece]) -> list[Tensor]:
    """Write back what users have changed of gradients; return the whole ones that they still see.

    Who changes the ``grad`` of pieces afterwards changes these too.
    """
    owners = {id(piece.gradients): piece.gradients for piece in pieces}
    seen: list[Tensor] = []
    for owner in owners.values():
        if owner.lent:
            owner.settle()
            mine = {piece.place for piece in pieces if piece.gradients is owner}
            seen += [whole for index, whole in owner.lent.items() if index in mine]
    return seen


def drop(pieces: Iterable[Piece]) -> None:
    """Drop the gradients of the parameters of ``pieces``."""
    with internals.as_plain_tensors():
        for piece in pieces:
            piece.gradients.drop(piece.place)


def begin_step(pieces: Sequence[Piece], kind: str) -> None:
    """Make gradients ready for an optimizer of this ``kind`` to read.

    Raises:
        RuntimeError: A gradient is not averaged over all ranks.
    """
    settle(pieces)
    with internals.as_plain_tensors():
        for piece in pieces:
            owner, index = piece.gradients, piece.place
            is_own = owner.shows_own and owner.filled[index]
            is_own |= _SLOT.__get__(piece.parameter) is not None
            if is_own or index in owner.of_copy:
                copy = "reduced within one copy of the model's states only"
                whose = "this rank's own" if is_own else copy
                raise RuntimeError(
                    f"The gradient of parameter {piece.range.slot.name!r} is {whose}: its last"
                    " backward pass did not synchronize gradients. Synchronize them in the last"
                    f" one before {kind}.step(): outside of `no_sync` or `no_backward_sync`, or"
                    " with `sync_grad=True`."
                )
            owner.is_new = False


def have_new(pieces: Iterable[Piece]) -> bool:
    """Return whether a backward pass has begun since :func:`begin_step`."""
    return True in [piece.gradients.is_new for piece in pieces]
