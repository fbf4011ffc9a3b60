"""A rank's shard of the averaged gradients of one group of parameters.

With hybrid sharding the gradients of all microbatches but the last stay within their copy. Pieces
hold the average of the copy until the last microbatch, which sums over the copies. Values that are
equal in all copies may be averaged again, which leaves them unchanged.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum

from torch import Tensor

from lightning_zero.comm import Arrived, Then
from lightning_zero.parameters.piece import Piece, averages
from lightning_zero.parameters.stores import Store
from lightning_zero.tensors import Work


class Reach(Enum):
    """The ranks over which the gradients of a backward pass are averaged."""

    RANK = "rank"
    """None: they stay on their rank."""
    COPY = "copy"
    """The ranks of one copy (hybrid sharding)."""
    ALL = "all"
    """All ranks."""


class GradShard:
    """This rank's shard of the averaged gradients.

    Its memory lives while a piece holds a part of it, so that ``zero_grad`` frees it at once.

    Attributes:
        is_of_copy: Whether the average may be over this copy only, not over all ranks.
    """

    def __init__(self, pieces: Sequence[Piece], store: Store) -> None:
        self._pieces = pieces
        self._store = store
        self.is_of_copy = False
        # The shard while its gradients are not installed yet, and the work that fills it.
        self._fresh: tuple[Tensor, Work] | None = None
        self._sums_copies = False
        # The shard of which pieces hold parts, as long as they do.
        self._installed: Callable[[], Tensor | None] = _nothing

    def add(self, reach: Reach, scale: float, reduced: Tensor, *, unit: str, tag: int) -> None:
        """Start to move an average to where gradients rest, added to earlier ones not yet dropped.

        The average is ``scale`` times ``reduced``, or times the sum of ``reduced`` over the copies.
        """
        # From this same pass, if some gradients came after their unit's reduction.
        self.wait()
        store, earlier = self._store, self._earlier()
        sums = reach is Reach.ALL and store.has_copies

        def sum_up(total: Tensor) -> Work:
            work = store.sum_over_copies(total, unit=unit, tag=tag)
            return Then(work, functools.partial(total.mul_, scale) if scale != 1.0 else _nothing)

        if not sums and scale != 1.0:
            reduced.mul_(scale)
        elif sums and earlier is not None:
            earlier.mul_(1 / (scale * store.comm.mesh.replicate.size))
        self._fresh = store.accumulate(reduced, earlier, sum_up if sums else None, unit=unit)
        # Those that go to the host end on their way.
        self._sums_copies = sums and not store.plan.rests_on_host

    def wait_for_copies(self) -> None:
        """Wait until the sums over the copies have arrived, if they are under way."""
        if self._sums_copies:
            self.wait()

    def wait(self) -> None:
        """Wait until an average that is under way has arrived."""
        if self._fresh is not None:
            self._fresh[1].wait()
            self._fresh, self._sums_copies = (self._fresh[0], Arrived()), False

    def drop(self) -> None:
        """Discard gradients that are not installed yet."""
        is_on_host = self._store.plan.rests_on_host
        if is_on_host and self._fresh is not None and self._fresh[0] is self._installed():
            self._fresh[1].wait()  # what the user may change now would be written to later
        self._fresh = None

    def _earlier(self) -> Tensor | None:
        """Return the shard to which new gradients are added; ``None`` if there is none."""
        if self._fresh is not None:
            return self._fresh[0]
        held = averages(self._pieces)
        if not [grad for grad in held if grad is not None]:
            return None
        installed = self._installed()
        shard = self._store.gradients() if installed is None else installed
        # The user may have dropped or replaced some.
        for piece, grad in zip(self._pieces, held, strict=True):
            part = shard[piece.range.in_shard]
            if grad is None:
                part.zero_()
            elif grad.data_ptr() != part.data_ptr():
                part.copy_(grad)
        return shard

    def install(self, has_grads: Sequence[bool]) -> bool:
        """Give the pieces their parts where any rank has a gradient; return whether any is new."""
        fresh = None
        if self._fresh is not None:
            (fresh, work), self._fresh = self._fresh, None
            work.wait()
            self._installed = weakref.ref(fresh)
        for piece, has_grad in zip(self._pieces, has_grads, strict=True):
            if has_grad:
                reduced = None if fresh is None else fresh[piece.range.in_shard]
                piece.gradient.show_sharded(reduced, is_of_copy=self.is_of_copy)
        return fresh is not None

    def memory(self) -> Counter[str]:
        """Return the bytes of the shard, and of gradients that users put in place of its parts."""
        store, shard = self._store, self._installed() if self._fresh is None else self._fresh[0]
        rows = store.plan.rows({"gradients": 0 if shard is None else shard.nbytes})
        for piece in self._pieces:
            grad = piece.last_reduced
            if grad is not None and (shard is None or grad._base is not shard):
                rows[store.plan.row("gradients")] += grad.nbytes
        return rows


def _nothing() -> None:
    return None
