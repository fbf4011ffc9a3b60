"""The gradients of one group of parameters, from autograd to the optimizer and to ``p.grad``.

A gradient passes through three places. Each has its own flag, as an average stays while unsent
gradients come to be added to it::

                  autograd                take                   reduce, add, install
    no gradient ───────────> torch's slot ────> partial ──────────────────────────> averaged
         ^                                      (used)                                 │ ^
         │                                        │                            replace └─┘
         └──────────── drop, abandon ─────────────┴────────────────── drop ────────────┘

The **partial** buffer has this rank's summands of all gradients of the group. Reducing it leaves
the average over all ranks in the **shard**. Every piece holds its part of that as its ``grad``,
which optimizers read.

The ``grad`` of a parameter is a property (:data:`~lightning_zero.parameters.guarded.GRAD`). Torch's
own :data:`SLOT` is empty outside of backward passes, so autograd never adds to an earlier gradient.
Reading the property returns, in this order:

* a gradient that autograd has just finished, in hooks of the parameter;
* this rank's own gradient behind a backward pass that sent nothing, a copy of the partial buffer;
* the average, as a :class:`FullGrad`;
* ``None``.

Assigning to it drops or replaces both at once. **Lent** is memory of whole gradients that users may
still change: copies, views of a :class:`FullGrad`, and what they have assigned. Before anything
reads gradients, :meth:`FlatGradients.settle` writes it back.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.comm import Pending
from lightning_zero.parameters.full_grad import FullGrad
from lightning_zero.parameters.piece import Piece
from lightning_zero.parameters.stores import Store
from lightning_zero.tensors import Work, internals, lasting_tensors, runs_outside

SLOT: Any = Tensor.grad
"""Torch's own property, empty except between autograd and :meth:`FlatGradients.take`."""
_SMALL_BYTES = 2**14
"""Gradients up to this size are moved together: one call each would cost more than the copy."""
_MOST_TOGETHER = 32
"""The most that wait to be moved together; they are still in a core's cache then."""


class Partial:
    """This rank's summands of the gradients of a group, before their reduction.

    Args:
        divisor: What gradients are divided by while they are moved here.

    Attributes:
        buffer: Their memory.
        views: The summand of each parameter.
        filled: For each parameter, whether it has one.
    """

    def __init__(self, store: Store, divisor: int) -> None:
        self.divisor, self._slots = divisor, store.layout.slots
        numel, dtype = store.layout.numel, store.plan.grad.dtype
        self.buffer = store.comm.transport.reduce_buffer(numel, dtype)
        self.views, was_ours = self.buffer.views_of(self._slots)
        for start, stop in () if was_ours else store.layout.gaps:
            self.buffer.tensor[start:stop].zero_()
        self.filled = [False] * len(self._slots)
        # Small gradients on their way.
        self._taken: list[tuple[int, Tensor]] = []

    def add(self, index: int, grad: Tensor) -> None:
        """Add a gradient, or have it added by :meth:`move`."""
        if grad.nbytes > _SMALL_BYTES or self.filled[index]:
            self.move()
            view = self.views[index]
            if self.filled[index]:
                view.add_(grad, alpha=1 / self.divisor)
            elif self.divisor == 1:
                view.copy_(grad)
            else:
                torch.mul(grad, 1 / self.divisor, out=view)
        else:
            self._taken.append((index, grad))
            if len(self._taken) == _MOST_TOGETHER:
                self.move()
        self.filled[index] = True

    def move(self) -> None:
        """Move the small gradients that wait, while they are still in the cache."""
        if not self._taken:
            return
        taken, self._taken = self._taken, []
        places, grads = zip(*taken, strict=True)
        targets = [self.views[place] for place in places]
        internals.copy_each(targets, grads)
        if self.divisor == 1:
            return
        first, last = min(places), max(places)
        if last - first + 1 == len(taken):
            # Neighbours: scale them in one pass, and the zeros between them too.
            targets = [self.buffer.tensor[self._slots[first].offset : self._slots[last].stop]]
        for target in targets:
            target.mul_(1 / self.divisor)


class FlatGradients:
    """The gradients of one group of parameters.

    Attributes:
        pieces: This rank's pieces of the parameters.
        store: Where gradients rest.
        partial: The unreduced gradients; ``None`` while there are none.
        wants: For each parameter, whether it wants a gradient in this backward pass.
        used: For each parameter, whether a gradient came since gradients were last installed, or
            is to come in this backward pass.
        sends: Whether the last backward pass averages gradients over the ranks.
        is_new: Whether no optimizer has begun a step since.
        shows_own: Whether :attr:`partial` holds gradients of passes that sent nothing.
        averaged: For each parameter, whether it has an average; this rank's part may be empty.
        lent: Whole gradients that users may still change, by parameter.
    """

    def __init__(self, pieces: Sequence[Piece], store: Store) -> None:
        self.pieces, self.store = pieces, store
        self.partial: Partial | None = None
        self.wants: list[bool] = []
        self.used, self.averaged = ([False] * len(pieces) for _ in range(2))
        self.sends = self.is_new = True
        self.shows_own = False
        self.lent: dict[int, Tensor] = {}
        # Whether the reduction casts gradients: a move that casts them cannot divide them, too.
        self._casts = store.plan.grad.dtype is not store.plan.weight.dtype
        self._num_ranks = store.comm.mesh.size
        # What reductions under way hold, for :meth:`memory`.
        self._in_flight: list[Tensor] = []
        # The shard while its gradients are not installed yet, and the work that fills it.
        self._fresh: tuple[Tensor, Work] | None = None
        # The shard of which pieces hold parts, as long as they do.
        self._installed: Callable[[], Tensor | None] = _nothing
        # What the property has returned for averages, as long as it is that.
        self._shown: dict[int, Callable[[], FullGrad | None]] = {}
        for index, piece in enumerate(pieces):
            piece.gradients, piece.place = self, index
            with internals.as_plain_tensors():
                before = SLOT.__get__(piece.parameter)
            if before is not None:
                self.replace(index, before)

    def __reduce__(self) -> Any:
        # A pickled or copied piece has no gradient, like a parameter.
        return _nothing, ()

    # -- from autograd to the partial buffer -----------------------------------------------------

    def expect(self, announced: Sequence[bool], *, sends: bool) -> None:
        """Begin a backward pass, which averages gradients over the ranks if it ``sends`` them.

        ``announced`` says for each parameter whether autograd will bring it a gradient.
        """
        if self.lent or self._shown:
            self.settle()
            self.lent.clear()
            self._shown.clear()
        if self.partial is not None and True not in self.partial.filled:
            self.partial = None  # the user has dropped all
        self.sends, self.shows_own, self.is_new = sends, False, True
        self.wants = [piece.parameter.requires_grad for piece in self.pieces]
        self.used = [is_used or comes for is_used, comes in zip(self.used, announced, strict=True)]

    def take(self, index: int, parameter: Tensor) -> None:
        """Take the gradient that autograd has just finished, to be moved to the partial buffer."""
        with internals.as_plain_tensors():
            grad = SLOT.__get__(parameter)
            if grad is None:  # an autograd function returned none: zeros, as under DDP
                grad = torch.zeros_like(parameter)
            else:
                SLOT.__set__(parameter, None)
        if grad.requires_grad:
            # From a backward with create_graph. `no_grad` would cost more than all the rest.
            grad = grad.detach()
        if grad.is_sparse:
            grad = grad.to_dense()
        (self.partial or self._new_partial()).add(index, grad)
        self.used[index] = True

    def _new_partial(self) -> Partial:
        """Return a buffer whose gradients are divided by the number of ranks while they are moved.

        As in DDP, where that costs nothing. Those that are not sent yet are shown as they are.
        """
        divides = self.sends and not self._casts
        self.partial = Partial(self.store, self._num_ranks if divides else 1)
        return self.partial

    # -- from the partial buffer to the shard ----------------------------------------------------

    def reduce(self, unit: str, tag: int) -> Callable[..., None]:
        """Start to average the gradients over the ranks; return a function that finishes it.

        A device does all of it on a stream beside computation, and the function makes computation
        wait. Otherwise the function, called with ``is_wanted=False``, discards the average.
        """
        partial, self.partial = self.partial or self._new_partial(), None
        partial.move()
        for view, is_filled in zip(partial.views, partial.filled, strict=True):
            if not is_filled:
                view.zero_()
        if self._fresh is not None:
            self.wait()  # some gradients of this pass came after their unit's reduction
        buffer, scale, resting = partial.buffer, 1 / self._num_ranks, self._earlier()
        target = self.store.reduced(buffer.tensor)
        self._in_flight = [buffer.tensor] if target is buffer.tensor else [buffer.tensor, target]

        def begin() -> Callable[..., None]:
            if partial.divisor == 1 and not self._casts and scale != 1:
                buffer.tensor.mul_(scale)
            work = self.store.reduce(target, buffer, unit=unit, tag=tag)
            if self.store.plan.reduce_bits is not None:
                self._in_flight = [target]  # the buffer is encoded, and only the code is sent

            def finish(*, is_wanted: bool = True) -> None:
                work.wait()
                self._in_flight = []
                if is_wanted:
                    if self._casts and scale != 1:
                        target.mul_(scale)  # fewer elements than there are to reduce
                    self._fresh = self.store.accumulate(target, resting, unit=unit, tag=tag)

            return finish

        copies = self.store.comm.host_copies
        return copies.beside(begin) if copies.has_streams else begin()

    def _earlier(self) -> Tensor | None:
        """Return the shard to which new gradients are added; ``None`` if there is none."""
        if self._fresh is not None:
            return self._fresh[0]
        if True not in self.averaged:
            return None
        held = [piece.grad for piece in self.pieces]
        shard = self._installed()
        parts = [piece.range.in_shard for piece in self.pieces]
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
    def is_pending(self) -> bool:
        """Return whether a gradient has arrived that is not reduced."""
        return self.partial is not None and True in self.partial.filled

    def install(self, has_grads: Sequence[bool]) -> None:
        """End a backward pass: give the pieces the gradients that any rank has."""
        self._shown.clear()
        if self._fresh is None:
            return
        (fresh, work), self._fresh = self._fresh, None
        work.wait()
        self._installed = weakref.ref(fresh)
        self.used = [False] * len(self.pieces)
        self.averaged = [*has_grads]
        for piece, has_grad in zip(self.pieces, has_grads, strict=True):
            # An optimizer would make a state for a gradient without elements.
            if has_grad and (piece.numel() or not piece.range.slot.numel):
                piece.grad = fresh[piece.range.in_shard]

    def keep_own(self) -> None:
        """End a backward pass whose gradients stay on this rank."""
        if self.partial is not None:
            self.partial.move()
        self.shows_own = True

    def abandon(self) -> None:
        """Discard gradients that arrived or were reduced but are not given to the optimizer yet."""
        self.settle()
        self.lent.clear()
        self.partial, self._in_flight = None, []
        self.shows_own = False
        is_on_host = self.store.plan.rests_on_host
        if is_on_host and self._fresh is not None and self._fresh[0] is self._installed():
            self._fresh[1].wait()  # what the user may change now would be written to later
        self._fresh = None
        self.used = [False] * len(self.pieces)
        self._shown.clear()
        with internals.as_plain_tensors():
            for piece in self.pieces:
                SLOT.__set__(piece.parameter, None)

    # -- what users read and assign --------------------------------------------------------------

    @runs_outside
    def shown(self, index: int) -> Tensor | None:
        """Return the gradient of a parameter as users see it."""
        if (own := self.own(index)) is not None:
            if index not in self.lent:
                self._lend_own(index, own)
            return self.lent[index]
        if not self.averaged[index]:
            return None
        if (grad := self._shown.get(index, _nothing)()) is not None:
            internals.hold(grad)
        if grad is None or not grad.is_current:
            with lasting_tensors():
                grad = self.average(index)
            self._shown[index] = weakref.ref(grad)
        return grad

    def average(self, index: int) -> FullGrad:
        """Return the average of a parameter that has one."""
        piece = self.pieces[index]
        part = torch.zeros_like(piece.detach()) if piece.grad is None else piece.grad
        return FullGrad(self, index, part, self.store.plan.weight.device)

    def own(self, index: int) -> Tensor | None:
        """Return this rank's own gradient behind a backward pass that sent nothing."""
        partial = self.partial if self.shows_own else None
        return None if partial is None or not partial.filled[index] else partial.views[index]

    def _lend_own(self, index: int, view: Tensor) -> None:
        """Lend a copy of this rank's own gradient, added to an earlier average: a collective."""
        piece = self.pieces[index]
        with lasting_tensors():
            if self.averaged[index]:
                # Every rank adds the same, so the next average leaves it unchanged.
                view.add_(self.average(index).whole(is_lent=False))
                piece.grad, self.averaged[index] = None, False
            self.lend(index, view.to(piece.dtype, copy=True))

    def lend(self, place: int, whole: Tensor) -> None:
        """Let changes to the memory of ``whole`` count."""
        if not self.shows_own:
            for lender in [*_lenders]:
                lender._release()
            _lenders.add(self)
        self.lent[place] = whole

    def _release(self) -> None:
        """Release whole averages that users have let go of."""
        if self.shows_own:
            return
        for place, whole in [*self.lent.items()]:
            if internals.num_references(whole.untyped_storage()) <= 2:  # it and that object
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
                if (own := self.own(place)) is not None:
                    own.copy_(whole)
                elif piece.grad is not None:
                    piece.grad.copy_(piece.range.part_of(whole))

    def drop(self, index: int) -> None:
        """Drop the gradient of a parameter; a reference that user code keeps stays valid.

        Call it with ``__torch_function__`` of subclasses disabled.
        """
        if self.lent:
            self.settle(index)
            self.lent.pop(index, None)
        piece = self.pieces[index]
        piece.grad = None
        self.averaged[index] = self.used[index] = False
        if self.partial is not None:
            self.partial.filled[index] = False
        self._shown.pop(index, None)
        SLOT.__set__(piece.parameter, None)

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
            piece.require_fits(value)
            with lasting_tensors():
                whole = value.detach()
                whole = whole.to_dense() if whole.is_sparse else whole
                if (own := self.own(index)) is not None:
                    # What replaces this rank's own is sent for it, without an earlier average.
                    own.copy_(whole)
                    piece.grad, self.averaged[index] = None, False
                    self.lend(index, value)
                    return
                part = piece.range.part_of(whole).to(piece.device, piece.dtype, copy=True)
        with internals.as_plain_tensors():
            self.drop(index)
        self.averaged[index] = True
        if piece.numel() or not piece.range.slot.numel:
            piece.grad = part
        if not isinstance(value, FullGrad):
            self.lend(index, whole)

    def memory(self) -> Counter[str]:
        """Return the bytes held now, by kind; see ``ShardedModel.memory``."""
        plan, shard = self.store.plan, self._fresh[0] if self._fresh else self._installed()
        rows = plan.rows({"gradients": 0 if shard is None else shard.nbytes})
        for piece in self.pieces:
            if piece.grad is not None and (shard is None or piece.grad._base is not shard):
                rows[plan.row("gradients")] += piece.grad.nbytes
        partial = self.partial.buffer.tensor.nbytes if self.partial is not None else 0
        rows["unreduced"] += partial + sum(tensor.nbytes for tensor in self._in_flight)
        return rows


def _nothing() -> None:
    return None


_lenders: weakref.WeakSet[FlatGradients] = weakref.WeakSet()
"""Gradients of which users may still change whole averages."""


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

    Code that changes the ``grad`` of pieces afterwards must change these too.
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
            owner = piece.gradients
            is_own = owner.shows_own and owner.own(piece.place) is not None
            if is_own or SLOT.__get__(piece.parameter) is not None:
                raise RuntimeError(
                    f"The gradient of parameter {piece.range.slot.name!r} is this rank's own: its"
                    " last backward pass did not synchronize gradients. Synchronize them in the"
                    f" last one before {kind}.step(): outside of `no_sync` or `no_backward_sync`,"
                    " or with `sync_grad=True`."
                )
            owner.is_new = False


def have_new(pieces: Iterable[Piece]) -> bool:
    """Return whether a backward pass has begun since :func:`begin_step`."""
    return True in [piece.gradients.is_new for piece in pieces]
