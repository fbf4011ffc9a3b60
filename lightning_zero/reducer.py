"""The gradients of a bundle on their way from autograd to the optimizer.

What autograd has finished is moved to the **partial** buffer, this rank's summand of the whole
bundle's gradients. Its reduction leaves the average of all ranks in the **shard**, of which every
piece shows its part::

    autograd -> take -> partial -> reduce -> shard -> install -> grad of pieces and parameters

A shard lives as long as a piece shows a part of it: what ``zero_grad`` drops is free at once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_zero.buffer import Buffer, lasting_tensors
from lightning_zero.comm import Comm, ReduceBuffer, Work
from lightning_zero.gradient import LocalGrad
from lightning_zero.layout import Layout
from lightning_zero.piece import Piece
from lightning_zero.plan import Plan


class Reducer:
    """Takes in what autograd finishes, and averages it over the ranks.

    Args:
        pieces: This rank's pieces of the bundle's parameters.
        layout: Where the parameters lie in the bundle's buffers.
        plan: The homes of weights, gradients and masters.
        comm: The ranks.

    Attributes:
        partial: Unreduced gradients; ``None`` while there are none.
        filled: For each parameter, whether :attr:`partial` holds a gradient of it.
        arrived: For each parameter, whether one came in this backward pass.
        used: For each parameter, whether one came since gradients were installed.
        fresh: The shard of reduced gradients that are not installed yet, if there are any.
    """

    def __init__(self, pieces: Sequence[Piece], layout: Layout, plan: Plan, comm: Comm) -> None:
        self._pieces = pieces
        self._layout = layout
        self._plan = plan
        self._comm = comm
        self.partial: ReduceBuffer | None = None
        self.fresh: Tensor | None = None
        self.filled = [False] * len(pieces)
        self.arrived = [False] * len(pieces)
        self.used = [False] * len(pieces)
        self._partial_views: list[Tensor] = []
        self._shown: weakref.ref[Tensor] | None = None
        self._places = [layout.piece_in_shard(i, comm.rank) for i in range(len(pieces))]
        self._in_flight: list[Tensor] = []
        self._is_unscaled = False
        # The average is taken in the pass that moves a gradient, as DDP does, when that costs
        # nothing. A pass that casts cannot multiply as well, so then the reduced shard is scaled,
        # which is N times smaller; as it is where a rank's own gradient is shown before that.
        casts = plan.grad.dtype != plan.weight.dtype
        self._early_scale = 1.0 if casts else 1 / comm.world_size

    # -- from autograd to the partial buffer -----------------------------------------------------

    def expect(self, *, is_local: bool) -> None:
        """Begin a backward pass; with ``is_local`` one whose gradients stay on this rank."""
        self.hide()
        self._is_unscaled |= is_local
        self.arrived = [False] * len(self._pieces)

    def hide(self) -> None:
        """Make room for autograd's gradients on the parameters; forget those that were dropped."""
        for index, piece in enumerate(self._pieces):
            piece.hide_grad()
            if piece.is_dropped:
                piece.is_dropped = False
                self.filled[index] = self.used[index] = False

    def take(self, index: int, grad: Tensor) -> None:
        """Move parameter ``index``'s new gradient into the partial buffer, cast on the way."""
        if self.partial is None:
            self._allocate_partial()
        view = self._partial_views[index]
        if grad.requires_grad:
            # Of a backward with create_graph. To turn gradients off costs more than all the rest.
            grad = grad.detach()
        if grad.is_sparse:
            grad = grad.to_dense()
        scale = 1.0 if self._is_unscaled else self._early_scale
        if self.filled[index]:
            view.add_(grad, alpha=scale)
        elif scale == 1.0:
            view.copy_(grad)
        else:
            torch.mul(grad, scale, out=view)
        self.filled[index] = self.arrived[index] = self.used[index] = True

    def _allocate_partial(self) -> None:
        dtype, device = self._plan.grad.dtype, self._plan.grad.device
        self.partial = self._comm.reduce_buffer(self._layout.numel, dtype)
        partial = Buffer(self._layout, dtype, device, self.partial.tensor)
        self._partial_views = partial.views
        for start, stop in self._layout.gaps:
            partial.tensor[start:stop].zero_()

    # -- from the partial buffer to the shard ----------------------------------------------------

    def reduce(self, unit: str, tag: int) -> Callable[[], None]:
        """Start to average the gradients over the ranks; the returned call ends it."""
        if self.partial is None:
            self._allocate_partial()
        assert self.partial is not None
        for view, is_filled in zip(self._partial_views, self.filled, strict=True):
            if not is_filled:
                view.zero_()
        partial = self.partial
        self.partial, self._partial_views = None, []
        self.filled = [False] * len(self._pieces)
        target = self._new_shard()
        self._in_flight = [partial.tensor, target]
        work = self._comm.reduce(partial, target, unit=unit, tag=tag)
        is_scaled = self._early_scale != 1.0 and not self._is_unscaled
        late_scale = 1.0 if is_scaled else 1 / self._comm.world_size
        self._is_unscaled = False
        return functools.partial(self._finish, work, target, late_scale)

    def _finish(self, work: Work, target: Tensor, late_scale: float) -> None:
        """Wait for a reduction; what it reads and writes had to live until then."""
        work.wait()
        self._in_flight = []
        if late_scale != 1.0:
            target.mul_(late_scale)
        earlier = self._earlier()
        self.fresh = target if earlier is None else earlier.add_(target)

    def _earlier(self) -> Tensor | None:
        """The shard of gradients to which new ones are added; ``None`` if there are none."""
        if self.fresh is not None:
            return self.fresh
        held = [piece.reduced for piece in self._pieces]
        if not [grad for grad in held if grad is not None]:
            return None
        shard = self._living_shard()
        if shard is None:
            shard = self._new_shard()
        # The user may have dropped or replaced some.
        for (start, stop), grad in zip(self._places, held, strict=True):
            part = shard[start:stop]
            if grad is None:
                part.zero_()
            elif grad.data_ptr() != part.data_ptr():
                part.copy_(grad)
        return shard

    def _living_shard(self) -> Tensor | None:
        """The shard of which pieces show parts, or are about to."""
        if self.fresh is not None:
            return self.fresh
        return self._shown() if self._shown is not None else None

    def _new_shard(self) -> Tensor:
        master = self._plan.master
        with lasting_tensors():
            return torch.empty(self._layout.shard_numel, dtype=master.dtype, device=master.device)

    # -- from the shard to optimizer and user ----------------------------------------------------

    @property
    def has_grads(self) -> list[bool]:
        """For each parameter, whether it got a gradient or its piece keeps an earlier one."""
        return [
            is_used or piece.reduced is not None
            for is_used, piece in zip(self.used, self._pieces, strict=True)
        ]

    def install(self, has_grads: Sequence[bool]) -> None:
        """End a backward pass: show the gradients that any rank has to optimizer and user."""
        self.arrived = [False] * len(self._pieces)
        fresh, self.fresh = self.fresh, None
        if fresh is None:
            for piece, has_grad in zip(self._pieces, has_grads, strict=True):
                if has_grad:
                    piece.show_grad()
            return
        self.used = [False] * len(self._pieces)
        self._shown = weakref.ref(fresh)
        for piece, (start, stop), has_grad in zip(
            self._pieces, self._places, has_grads, strict=True
        ):
            if has_grad:
                piece.install(fresh[start:stop])

    def show_local(self) -> None:
        """End a backward pass whose gradients stay on this rank: show them, as DDP does."""
        for index, piece in enumerate(self._pieces):
            if self.filled[index]:
                held = self._partial_views[index]
                piece.show_local(LocalGrad(piece, piece.parameter, held))
            elif piece.was_shown:
                piece.show_grad()

    def drop(self) -> None:
        """Forget what arrived or was reduced and is not shown to the optimizer yet."""
        self.partial, self._partial_views, self._in_flight = None, [], []
        self.fresh, self._is_unscaled = None, False
        for piece in self._pieces:
            if piece.local is not None:
                piece.hide_grad()
        for flags in (self.filled, self.arrived, self.used):
            flags[:] = [False] * len(flags)

    def memory(self) -> dict[str, int]:
        """Bytes held now, by kind; see ``Engine.memory``."""
        held = [piece.kept for piece in self._pieces]
        shard = self._living_shard()
        # What the user put in the place of a part of the shard has memory of its own.
        others = [
            grad.nbytes
            for grad in held
            if grad is not None and (shard is None or grad._base is not shard)
        ]
        partial = self.partial.tensor.nbytes if self.partial is not None else 0
        return {
            "gradients": (shard.nbytes if shard is not None else 0) + sum(others),
            "unreduced": partial + sum(tensor.nbytes for tensor in self._in_flight),
        }
