"""The order in which all ranks reduce gradients, whatever each of them computes.

A rank waits for a unit's reduction before it starts that of the next, so that whole gradients of at
most two units are in memory. Waiting is safe only if every rank reduces the same units in the same
order: two ranks that reduced what is ready, one expert here and another there, would wait for each
other forever. So each backward pass has **turns**, the same on all ranks:

1. The order is the reverse of that in which rank 0 first ran the units. Units that it did not run
   come after these, and the root last.
2. A unit has a turn if it wants gradients and any rank ran it in this step.
3. When a unit's turn comes, a rank reduces it if its gradients are all there, or if this rank never
   ran it (it sends zeros). Otherwise the turn waits.
4. At the end of the backward pass, the remaining turns are taken. Then units are reduced again for
   which a gradient came after their turn on any rank.

At its beginning, autograd knows which gradients a pass will bring, except those of passes within
it, as checkpointing with ``use_reentrant=True`` runs. Each rank **announces** them. If all ranks
announce the same, namely all gradients of every unit that ran, none can come late, and no rank
waits for the others at the end. Otherwise they exchange there which gradients have come.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence

from lightning_zero.comm import Pending, SyncPoint, with_complements
from lightning_zero.engine.rank_check import ChangeCheck
from lightning_zero.engine.sharded_model import ShardedModel
from lightning_zero.engine.unit import Unit
from lightning_zero.tensors import runs_outside

_ANNOUNCEMENT = 9
"""The number of flags by which a rank announces its gradients."""


class ReductionOrder:
    """The reductions of a backward pass, in one order on all ranks."""

    def __init__(self, sharded: ShardedModel) -> None:
        self._units = units = sharded.units
        self._flats = sharded.flats
        self._control = sharded.comm.control
        num_parameters = sum(len(unit.parameters) for unit in units)
        at_begin = ChangeCheck.NUM_FLAGS + _ANNOUNCEMENT
        self._control.reserve(len(units) + max(num_parameters, at_begin))
        self._change_check = ChangeCheck(sharded)
        self._order: list[Unit] | None = None
        self._left: list[Unit] | None = None
        # At most one reduction and, behind it, one sum over the copies.
        self._under_way: list[Unit] = []
        self._has_copies = sharded.comm.mesh.replicate.size > 1
        self._work: Pending | None = None
        # This rank's announcement, and whether all ranks have made the same and nothing is open.
        self._announcement = b""
        self._is_settled = False

    def begin(self, forward_order: Iterable[int]) -> None:
        """Begin a backward pass, and start to exchange which units each rank ran.

        Rank 0's first ``forward_order`` sets the order of reductions.
        """
        if self._order is None:
            ran = [index for index in dict.fromkeys(forward_order) if index < len(self._units) - 1]
            agreed = self._control.broadcast_object(ran)
            rest = [unit.index for unit in self._units[:-1] if unit.index not in agreed]
            # The root runs from beginning to end.
            self._order = [self._units[index] for index in (*reversed(agreed), *reversed(rest), -1)]
        self._left = None
        have_run = [unit.calls.have_run for unit in self._units]
        self._announcement = self._announce(have_run)
        flags = [*self._change_check.flags(), *self._announcement, *have_run]
        self._work = self._control.call(SyncPoint.BEGIN, bytes(flags))
        if self._change_check.has_frozen:
            self._turns_left()  # now: this rank may have no gradients that would ask for it

    def _announce(self, have_run: Sequence[bool]) -> bytes:
        """Return flags of this rank's gradients: whether others may come, and a checksum."""
        may_come = True in [
            unit.announced != (unit.wants if ran else [False] * len(unit.wants))
            for unit, ran in zip(self._units, have_run, strict=True)
        ]
        announced = [comes for unit in self._units for comes in unit.announced]
        checksum = zlib.crc32(bytes([*announced, *self._has_grads()]))
        return bytes([may_come]) + with_complements(checksum.to_bytes(4, "big"))

    @runs_outside
    def advance(self) -> None:
        """Start the reductions whose turn has come."""
        left = self._left if self._left is not None else self._turns_left()
        while left and left[0].are_complete:
            self._reduce(left.pop(0))

    def _turns_left(self) -> list[Unit]:
        if self._left is None:
            assert self._order is not None
            assert self._work is not None
            maxima = self._work.wait()
            self._change_check.compare(maxima[: ChangeCheck.NUM_FLAGS])
            rest = maxima[ChangeCheck.NUM_FLAGS :]
            announcement, has_turn = rest[:_ANNOUNCEMENT], rest[_ANNOUNCEMENT:]
            self._is_settled = announcement == self._announcement and not announcement[0]
            self._left = [
                unit for unit in self._order if has_turn[unit.index] and True in unit.wants
            ]
        return self._left

    def _reduce(self, unit: Unit) -> None:
        # One reduction overlaps with the next unit's backward, as does one sum over the copies; two
        # would only hold memory.
        if self._under_way:
            self._under_way[-1].finish()
            if self._has_copies and len(self._under_way) > 1:
                for flat in self._under_way[0].flat_parameters:
                    flat.gradients.wait_for_copies()
        self._under_way = [*self._under_way[-1:], unit]
        unit.reduce()

    def finish(self) -> None:
        """Take the remaining turns and show the gradients to the optimizer.

        A parameter that no rank used gets no gradient, as in a plain loop.
        """
        left = self._turns_left()
        while left:
            self._reduce(left.pop(0))
        late = [True in [f.gradients.is_pending for f in u.flat_parameters] for u in self._units]
        if not self._is_settled:
            has_grads = self._agree(late)
        elif True in late:
            raise RuntimeError(
                f"Gradients of {self._units[late.index(True)].label!r} came from a backward pass"
                " that ran within this one, after they had been averaged. Use"
                " `torch.utils.checkpoint` with `use_reentrant=False`, and call `backward()`"
                " outside of hooks."
            )
        else:
            has_grads = self._has_grads()
        for unit in self._under_way[-1:]:
            unit.finish()
            # Behind all others: a host that waits for offloaded gradients waits once.
            for flat in reversed(unit.flat_parameters):
                flat.gradients.wait()
        self._under_way = []
        held = iter(has_grads)
        for flat in self._flats:
            flat.gradients.install(list(itertools.islice(held, len(flat.parameters))))

    def _has_grads(self) -> list[bool]:
        """Return for each parameter whether it has a gradient on this rank, or is to get one.

        Its piece may keep an earlier one.
        """
        return [
            is_used or piece.grad is not None
            for flat in self._flats
            for is_used, piece in zip(flat.gradients.used, flat.pieces, strict=True)
        ]

    def _agree(self, late: Sequence[bool]) -> list[bool]:
        """Reduce late gradients; return which parameters have a gradient on any rank."""
        flags = bytes([*late, *self._has_grads()])
        agreed = list(map(bool, self._control.call(SyncPoint.END, flags).wait()))
        for unit in itertools.compress(self._units, agreed):
            self._reduce(unit)
        return agreed[len(late) :]

    def abandon(self) -> None:
        """Drop a backward pass that an exception ended."""
        # Not waited for: the others may be gone, or be waiting for this rank.
        self._under_way, self._left, self._work = [], None, None
