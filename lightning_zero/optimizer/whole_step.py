"""Steps of whole parameters in their true shape, for optimizers that mix elements.

By parameter, each parameter has an owner, the only rank that keeps the optimizer's state for it.
All at once, every rank owns every parameter, as under DDP. What is stepped is

    owner       a plain parameter of the true shape, with the whole master and gradient in a step
    elsewhere   an empty parameter without a gradient, which optimizers skip
    all ranks   the module's own parameter, which holds its whole master and gradient in a step

One exchange brings pieces to the owners, another one back; all at once needs only the first. There
the optimizer may know parameters from elsewhere too: from a module that it holds, from a dictionary
by parameter or by ``id``, or from a closure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.comm import Axis, Communicator, SyncPoint
from lightning_zero.optimizer.known import Way
from lightning_zero.optimizer.pieces import owned
from lightning_zero.optimizer.steppers import Stepper
from lightning_zero.parameters import Lent, Piece, drop
from lightning_zero.plan import cut_of
from lightning_zero.tensors import lasting_tensors


class Whole:
    """One parameter of a step by parameter or all at once.

    Tensor parallelism may have cut it into parts, of which each rank then has a piece of one.

    Args:
        piece: This rank's part of the master.
        ranges: The first element of each rank's piece, and one past its last.
        owner: The rank that steps it; ``None`` if all do.
        axis: The ranks that have parts of the model; all numbers of ranks are along it.

    Attributes:
        member: What the optimizer steps: the module's own parameter if all ranks do.
        has_grad: Whether it has a gradient in this step.
    """

    _lent: Lent | None = None

    def __init__(
        self,
        piece: Piece,
        ranges: Sequence[tuple[int, int]],
        owner: int | None,
        axis: Axis,
    ) -> None:
        self.piece = piece
        self.ranges = ranges
        self.owner = owner
        self.is_here = owner in (None, axis.rank)
        self._cut = cut_of(piece.parameter)
        self.has_grad = False
        self.member: Parameter = piece.parameter
        if owner is not None:
            shape = (0,) * max(len(piece.whole_shape), 1)
            with lasting_tensors():
                nothing = torch.empty(shape, dtype=piece.dtype, device=piece.device)
                self.member = Parameter(nothing, requires_grad=False)

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes of what ``rank`` sends of the master, or of the gradient."""
        start, stop = self.ranges[rank]
        return (stop - start) * self.piece.element_size()

    def sent_grad(self) -> Tensor:
        """Return this rank's part of the gradient, which some rank has."""
        own, grad = self.piece.detach(), self.piece.grad
        return torch.zeros_like(own) if grad is None else grad.to(own.dtype)

    def assembled(self, parts: Iterable[Tensor]) -> Tensor:
        """Return the whole tensor of which each rank has sent a part, as bytes."""
        slot, like, cut = self.piece.range.slot, self.piece, self._cut
        shapes = [slot.shape]
        if cut is not None:
            shapes = [cut.part_shape(slot.shape, number) for number in range(cut.size)]
        flat = [
            torch.empty(math.prod(shape), dtype=like.dtype, device=like.device) for shape in shapes
        ]
        for number, (part, (start, stop)) in enumerate(zip(parts, self.ranges, strict=True)):
            flat[number % len(flat)][start:stop].view(torch.uint8).copy_(part)
        if cut is None:
            return flat[0].as_strided(slot.shape, slot.stride)
        return cut.whole_of([part.view(shape) for part, shape in zip(flat, shapes, strict=True)])

    def fill(self, data: Tensor, grad: Tensor | None) -> None:
        """Fill the parameter with its whole master and gradient."""
        if self.owner is not None:
            self.member.requires_grad_(self.piece.requires_grad)
        self._lent = Lent(self.member, data, grad)

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Return each rank's part of a whole tensor."""
        cut = self._cut
        if cut is None:
            flat = [self.piece.range.flat(whole)]
        else:
            flat = [cut.part_of(whole, number).reshape(-1) for number in range(cut.size)]
        ranges = enumerate(self.ranges)
        return [flat[number % len(flat)][start:stop] for number, (start, stop) in ranges]

    def require_intact(self) -> None:
        """Raise a ``RuntimeError`` if the parameter shows weights again, not what was stepped."""
        if self._lent is not None and not self._lent.is_intact:
            raise RuntimeError(
                f"Parameter {self.piece.range.slot.name!r} was shown anew while it was stepped: the"
                " optimizer's step has run a forward of the module, or used parameters that are not"
                " in its param groups. Give it all parameters of the module, and compute what it"
                " needs before the step."
            )

    def keep(self, rank: int) -> None:
        """Keep this rank's part of what all ranks have stepped, and of the gradient."""
        grad = self.member.grad
        self.piece.data.copy_(self.parts(self.member.detach())[rank])
        if grad is not None and self.piece.grad is not None:
            self.piece.grad.copy_(self.parts(grad)[rank])

    def release(self) -> None:
        """Free the memory of a step, if one is under way."""
        lent, self._lent = self._lent, None
        if lent is not None:
            is_dropped = self.owner is None and self.has_grad and self.member.grad is None
            lent.end()
            if is_dropped:
                drop([self.piece])


class WholeStep(Stepper):
    """Steps an optimizer by parameter or all at once."""

    def __init__(self, optimizer: Optimizer, way: Way, comm: Communicator) -> None:
        assert way in (Way.BY_PARAMETER, Way.ALL_AT_ONCE)
        self.way = way
        super().__init__(optimizer)
        self._control, self._transport = comm.control, comm.transport
        self._axis = comm.mesh.model
        self._wholes: dict[int, Whole] = {}
        self._loads = [0] * self._axis.size

    @override
    def take(self, pieces: Sequence[Piece]) -> None:
        """Find owners for new parameters, the same on all ranks; a collective."""
        new = [piece for piece in pieces if id(piece) not in self._wholes]
        if not new:
            return
        of_ranks = self._control.gather_objects(
            [(piece.range.start, piece.range.stop) for piece in new]
        )
        of_copy = [of_ranks[rank] for rank in self._axis.ranks]
        ranges = list(zip(*of_copy, strict=True))
        shapes = [piece.whole_shape for piece in new]
        owners = owners_of(self.way, shapes, self._loads)
        for piece, own, owner in zip(new, ranges, owners, strict=True):
            self._wholes[id(piece)] = Whole(piece, own, owner, self._axis)
        self._control.reserve(len(self._wholes))

    @override
    def member(self, piece: Piece) -> Parameter:
        return self._wholes[id(piece)].member

    @override
    def keeps_state_of(self, piece: Piece) -> bool:
        return self._wholes[id(piece)].is_here

    @override
    def part_of(self, state: Mapping[str, Any], piece: Piece) -> Mapping[str, Any] | None:
        """Return what this rank keeps of a whole parameter's state: all or nothing."""
        return owned(state) if self.keeps_state_of(piece) else None

    @override
    def mean_of(self, loss: Any) -> Any:
        """Return the mean over the ranks of a closure's loss, so that all decide alike.

        All at once, every rank takes the whole step and keeps its parts of the result. If each went
        by its own loss, these would be parts of different steps.
        """
        if self.way is not Way.ALL_AT_ONCE or not isinstance(loss, (Tensor, float)):
            return loss
        dtype = loss.dtype if isinstance(loss, Tensor) else torch.float64
        total = torch.as_tensor(loss, dtype=dtype, device=self._transport.device).detach()
        total = total.to(torch.promote_types(dtype, torch.float32), copy=True)
        self._control.sum(total, "the mean of the closures' losses")
        mean = total / self._control.world_size
        return mean.to(loss) if isinstance(loss, Tensor) else mean.item()

    @override
    def begin(self) -> None:
        """Fill what is stepped; a collective."""
        wholes = list(self._wholes.values())
        have_grads = bytes([whole.piece.grad is not None for whole in wholes])
        maxima = self._control.call(SyncPoint.STEP, have_grads).wait()
        for whole, flag in zip(wholes, maxima, strict=True):
            whole.has_grad = bool(flag)
        with lasting_tensors(), torch.no_grad():
            masters = self._brought(wholes, lambda whole: whole.piece.detach())
            grads = self._brought([w for w in wholes if w.has_grad], Whole.sent_grad)
            for whole, data in masters.items():
                whole.fill(data, grads.get(whole))

    def _brought(
        self, wholes: Sequence[Whole], part_of: Callable[[Whole], Tensor]
    ) -> dict[Whole, Tensor]:
        """Return whole tensors of those that are stepped here; a collective."""
        ranks, here = range(self._axis.size), [whole for whole in wholes if whole.is_here]
        parts = [[part_of(whole) for whole in wholes if whole.owner in (None, n)] for n in ranks]
        received = self._send(parts, [[whole.sent_bytes(n) for whole in here] for n in ranks])
        return {whole: whole.assembled(map(next, received)) for whole in here}

    @override
    def end(self) -> None:
        """Bring the stepped parameters back to the pieces; a collective."""
        wholes = list(self._wholes.values())
        with lasting_tensors(), torch.no_grad():
            if self.way is Way.ALL_AT_ONCE:
                for whole in wholes:
                    whole.require_intact()
                for whole in wholes:
                    whole.keep(self._axis.rank)
            else:
                self._bring_back(wholes)
        for whole in wholes:
            whole.release()

    def _bring_back(self, wholes: Sequence[Whole]) -> None:
        ranks = range(self._axis.size)
        cut = [whole.parts(whole.member.detach()) for whole in wholes if whole.is_here]
        sizes = [[whole.piece.nbytes for whole in wholes if whole.owner == n] for n in ranks]
        received = self._send([[parts[n] for parts in cut] for n in ranks], sizes)
        for whole in wholes:
            whole.piece.data.view(torch.uint8).copy_(next(received[whole.owner or 0]))

    def _send(
        self, parts: Sequence[Sequence[Tensor]], sizes: Sequence[list[int]]
    ) -> list[Iterator[Tensor]]:
        """Send each rank its ``parts``; return those of every rank as bytes, given their sizes."""
        sent = [part.contiguous().view(torch.uint8) for each in parts for part in each]
        device = self._transport.device
        buffer = torch.cat(sent) if sent else torch.empty(0, dtype=torch.uint8, device=device)
        given = [sum(part.nbytes for part in each) for each in parts]
        totals = [*map(sum, sizes)]
        received = torch.split(self._transport.exchange(buffer, given, totals, self._axis), totals)
        return [iter(torch.split(each, own)) for each, own in zip(received, sizes, strict=True)]

    @override
    def remove(self) -> None:
        for whole in self._wholes.values():
            whole.release()
        super().remove()

    @override
    def describe(self, reason: str) -> str:
        """Return a one-line description of how the optimizer is stepped, and the cost."""
        name = type(self.optimizer).__name__
        if self.way is Way.BY_PARAMETER:
            return (
                f"{name} {reason}, so it steps by parameter: the rank that owns a parameter steps"
                " it whole and keeps its state."
            )
        nbytes = sum(
            math.prod(w.piece.whole_shape) * w.piece.element_size() for w in self._wholes.values()
        )
        return (
            f"{name} {reason}, so it steps all at once: every rank gathers all masters and"
            f" gradients for a step, with messages {4 * nbytes:,} bytes, and keeps the whole"
            " optimizer state, as under DDP. If it can step each parameter alone, set"
            f' optimizer_step={{"{name}": "parameter"}}.'
        )


def owners_of(way: Way, shapes: Sequence[Sequence[int]], loads: list[int]) -> Sequence[int | None]:
    """Return the rank that steps each parameter; ``None`` is every rank.

    From the most expensive on, each goes to the rank with the least load.

    Args:
        way: How the parameters are stepped.
        shapes: Their shapes.
        loads: The load of each rank so far; updated in place.
    """
    owners: list[int | None] = [None] * len(shapes)
    if way is Way.BY_PARAMETER:
        costs = [_cost(shape) for shape in shapes]
        for index in sorted(range(len(shapes)), key=lambda index: -costs[index]):
            owner = min(range(len(loads)), key=loads.__getitem__)
            owners[index] = owner
            loads[owner] += costs[index]
    return owners


def _cost(shape: Sequence[int]) -> int:
    """Return the cost of a step: products of a matrix with itself, or one pass over a vector."""
    numel = math.prod(shape)
    return numel * min(shape[0], numel // max(shape[0], 1)) if len(shape) > 1 else numel
