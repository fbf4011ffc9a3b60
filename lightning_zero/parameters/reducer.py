"""The gradients of one group of parameters on their way from autograd to the optimizer.

A gradient that autograd has finished is moved to the **partial** buffer, this rank's summand of all
gradients of the group. Reducing it leaves the average over all ranks in the **shard**; every piece
holds its part of that::

    autograd -> take -> partial -> reduce -> shard -> install -> grad of pieces and parameters
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_zero.comm import ReduceBuffer
from lightning_zero.parameters.grad_shard import GradShard, Reach
from lightning_zero.parameters.grad_view import GradState
from lightning_zero.parameters.piece import Piece
from lightning_zero.parameters.stores import Store
from lightning_zero.tensors import Work, internals

_SMALL_BYTES = 2**14
"""Gradients up to this size are moved together: one call each would cost more than the copy."""
_TOGETHER_BYTES = 2**16
"""The most bytes that wait to be moved together; they are still in a core's cache then."""


class Reducer:
    """Takes the gradients that autograd finishes, and averages them over the ranks.

    It runs for every gradient, where a call costs as much as a copy, so its state is plain
    attributes and lists, not objects with methods.

    Attributes:
        partial: The unreduced gradients and a view of each; ``None`` while there are none.
        filled: For each parameter, whether its gradient is, or will be, in :attr:`partial`.
        arrived: For each parameter, whether a gradient came in this backward pass.
        used: For each parameter, whether a gradient came since gradients were last installed.
        shard: The averaged gradients.
    """

    def __init__(self, pieces: Sequence[Piece], store: Store) -> None:
        self._pieces = pieces
        self._store = store
        self.partial: tuple[ReduceBuffer, list[Tensor]] | None = None
        self.filled = [False] * len(pieces)
        self.arrived = [False] * len(pieces)
        self.used = [False] * len(pieces)
        self.shard = GradShard(pieces, store)
        # What reductions under way hold, for :meth:`memory`.
        self._in_flight: list[Tensor] = []
        # Small gradients on their way to the partial buffer.
        self._taken: list[tuple[int, Tensor]] = []
        self._taken_bytes = 0
        self._reach = Reach.ALL
        # Gradients are divided while they are moved, as in DDP, where that costs nothing. A move
        # that casts cannot multiply too, so then the reduced shard is scaled, which is N times
        # smaller. The same goes for a rank's own gradients that are shown before they are reduced.
        casts = store.plan.grad.dtype != store.plan.weight.dtype
        self._usual_divisor = 1 if casts else store.comm.mesh.size
        # What the gradients in the partial buffer are divided by.
        self._divisor = self._usual_divisor

    # -- from autograd to the partial buffer -----------------------------------------------------

    def expect(self, reach: Reach) -> None:
        """Begin a backward pass whose gradients are averaged over ``reach``."""
        self.hide()
        stays = reach is Reach.RANK or (reach is Reach.COPY and self._store.has_copies)
        if stays or self.shard.is_of_copy:
            # Shown as they are until a later reduction, or added to such: the shard is divided.
            self._divisor = 1
        self._reach = reach
        self.arrived = [False] * len(self._pieces)

    def hide(self) -> None:
        """Clear the parameters for autograd's gradients; forget those that the user dropped."""
        for index, piece in enumerate(self._pieces):
            was_unsynced = piece.gradient.hide()
            if self.filled[index] and not was_unsynced:
                self.filled[index] = self.used[index] = False

    def take(self, index: int, grad: Tensor) -> None:
        """Take parameter ``index``'s new gradient, to be moved into the partial buffer."""
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
        self.filled[index] = self.arrived[index] = self.used[index] = True

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
        slots = self._store.layout.slots
        if last - first + 1 == len(taken):
            # Neighbours: scale them in one pass, and the zeros between them too.
            targets = [buffer.tensor[slots[first].offset : slots[last].stop]]
        for target in targets:
            target.mul_(1 / self._divisor)

    def _allocate_partial(self) -> tuple[ReduceBuffer, list[Tensor]]:
        layout = self._store.layout
        buffer = self._store.comm.transport.reduce_buffer(layout.numel, self._store.plan.grad.dtype)
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
        self.filled = [False] * len(self._pieces)
        target = self._store.reduced(partial.tensor)
        self._in_flight = [partial.tensor] if target is partial.tensor else [partial.tensor, target]
        work = self._store.reduce(target, partial, unit=unit, tag=tag)
        if self._store.plan.reduce_bits is not None:
            self._in_flight = [target]  # the partial buffer is encoded, and only the code is sent
        mesh = self._store.comm.mesh
        num_ranks = mesh.shard.size if self._reach is Reach.COPY else mesh.size
        # What is left of the division by the number of ranks, for the shard.
        late_scale, self._divisor = self._divisor / num_ranks, self._usual_divisor
        self.shard.is_of_copy = self._reach is Reach.COPY and self._store.has_copies
        add = functools.partial(self.shard.add, self._reach, late_scale, unit=unit, tag=tag)
        return functools.partial(self._finish, work, target, add)

    def _finish(
        self, work: Work, target: Tensor, add: Callable[[Tensor], None], *, is_wanted: bool = True
    ) -> None:
        """Wait for a reduction, let go of the buffers it needed, and add its result."""
        work.wait()
        self._in_flight = []
        if is_wanted:
            add(target)

    # -- from the shard to optimizer and user ----------------------------------------------------

    @property
    def has_grads(self) -> list[bool]:
        """For each parameter, whether it got a gradient or its piece keeps an earlier one."""
        return [
            is_used or piece.reduced is not None
            for is_used, piece in zip(self.used, self._pieces, strict=True)
        ]

    @property
    def awaits_copies(self) -> bool:
        """Return whether this pass has to sum gradients over the copies, even if none comes."""
        return self._reach is Reach.ALL and self.shard.is_of_copy

    def install(self, has_grads: Sequence[bool]) -> None:
        """End a backward pass: show optimizer and user the gradients that any rank has."""
        self.arrived = [False] * len(self._pieces)
        if self.shard.install(has_grads):
            self.used = [False] * len(self._pieces)

    def show_local(self) -> None:
        """End a backward pass whose gradients stay on this rank: show them, as DDP does."""
        self._move()
        _, views = self.partial or (None, [])
        for index, piece in enumerate(self._pieces):
            if self.filled[index]:
                piece.gradient.show_unsynced(views[index])
            elif piece.gradient.state is GradState.HIDDEN:
                piece.gradient.show_sharded()

    def drop(self) -> None:
        """Discard gradients that arrived or were reduced but are not shown to the optimizer yet."""
        self.partial, self._in_flight = None, []
        self._taken, self._taken_bytes = [], 0
        self.shard.drop()
        self._divisor = self._usual_divisor
        for piece in self._pieces:
            if piece.gradient.state.is_unsynced:
                piece.gradient.hide()
        for flags in (self.filled, self.arrived, self.used):
            flags[:] = [False] * len(flags)

    def memory(self) -> Counter[str]:
        """Return the bytes held now, by kind; see ``ShardedModel.memory``."""
        partial = self.partial[0].tensor.nbytes if self.partial is not None else 0
        rows = self.shard.memory()
        rows["unreduced"] += partial + sum(tensor.nbytes for tensor in self._in_flight)
        return rows
