"""Steps by element of masters or states that rest elsewhere: for offload and stochastic rounding.

Members are stepped in batches, as far as an optimizer's step changes nothing that they share;
otherwise the user's own call of ``step`` steps all of them. The call steps the first batch; behind
it, the step of the class is called for the others, one after the other. Hooks, schedulers, counters
and the closure see one step::

    pre-hook                              the groups hold stand-ins of one batch
    step        batch 0
    post-hook   batch 1 | batch 2 | ...   then they hold all members again

A **stand-in** is stepped in place of a part of a piece, with a gradient and a state of its own. All
members that no batch has are stepped with the first.

A batch is a unit, or what is read from files at once. In host memory a unit is stepped where it
rests, and then cast or sent to the device while the next one is stepped.

An error part way through the batches leaves some stepped and others not. Such a step is **torn**:
nothing may be stepped or saved any more.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.comm import Ledger
from lightning_zero.optimizer.known import may_step_in_batches
from lightning_zero.optimizer.pieces import is_of_elements, with_entries
from lightning_zero.optimizer.steppers import Stepper
from lightning_zero.parameters import Piece
from lightning_zero.tensors import numel_at_a_time

_HALF = frozenset([torch.bfloat16, torch.float16])
# Not SGD, whose fused step fails if some parameters have momentum and others do not yet.
_FUSED = frozenset([torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])


class Part(NamedTuple):
    """Elements ``[start, stop)`` of a piece: all, unless it is cut over several batches."""

    piece: Piece
    start: int
    stop: int

    @classmethod
    def all_of(cls, piece: Piece) -> Part:
        """Return the part that is all of a piece."""
        return cls(piece, 0, piece.numel())

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return self.stop - self.start

    def of(self, values: Tensor) -> Tensor:
        """Return the part's values, given those of its piece."""
        return values[self.start : self.stop]


class UnitStep(Stepper):
    """Steps an optimizer by element where its states rest.

    Args:
        optimizer: The optimizer.
        ledger: Counts the time of steps on the host; ``None`` for steps on the device.
        by_unit: Returns pieces by unit, in an order that all ranks share; by default these are not
            stepped one after the other.
        refresh: Called with each unit's pieces, in that order, once they have been stepped, also on
            ranks that have nothing of them.

    Attributes:
        batches: What is stepped together, one batch after the other; a piece that is cut is in
            several. Empty if all is stepped at once.
        is_torn: ``True`` in a step of several batches from the second on, and forever after one
            that ended half-way.
    """

    place = "host memory"

    def __init__(
        self,
        optimizer: Optimizer,
        ledger: Ledger | None = None,
        by_unit: Callable[[Sequence[Piece]], list[list[Piece]]] = lambda pieces: [],
        refresh: Callable[[list[Piece]], None] | None = None,
    ) -> None:
        super().__init__(optimizer)
        self.batches: list[list[Part]] = []
        self._ledger, self._by_unit, self._refresh = ledger, by_unit, refresh
        # Else batches may not give the same numbers.
        self._is_at_once = not may_step_in_batches(optimizer)
        self._under_way: Generator[None, None, None] | None = None

    def _to_fuse(self) -> list[tuple[dict[str, Any], bool]]:
        """Return the groups to step with another ``fused`` on the CPU, each with that.

        A fused step is one pass over memory; torch's default on a CPU makes one per operation.
        """
        optimizer, found = self.optimizer, []
        for group in optimizer.param_groups:
            held = [self.found.get(id(p), p) for p in group["params"] if p.requires_grad]
            stepped = [self.stepped_as(p) if isinstance(p, Piece) else p for p in held]
            on_host = {one.dtype for one in stepped if one.device.type == "cpu"}
            is_unset = group.get("fused") is None and group.get("foreach") is None
            # Not every fused step takes a learning rate in a tensor, and none complex numbers.
            can_be = not group.get("differentiable") and not isinstance(group.get("lr"), Tensor)
            can_be &= all(one.device.type == "cpu" and one.is_floating_point() for one in stepped)
            if type(optimizer) in _FUSED and is_unset and can_be:
                found.append((group, True))
            elif isinstance(optimizer, torch.optim.SGD) and group.get("fused") and on_host & _HALF:
                found.append((group, False))  # it would leave most of a 16-bit parameter unchanged
        return found

    @override
    def take(self, pieces: Sequence[Piece]) -> None:
        if not self._is_at_once:
            units = self._by_unit([p for p in pieces if p.plan.rests_on_host and not p.plan.stays])
            self.batches = [[Part.all_of(piece) for piece in unit] for unit in units]

    # -- states ----------------------------------------------------------------------------------

    @override
    def kept(self, state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
        """Return a copy of a piece's state where states rest."""
        return with_entries(state, partial(self.rest, piece=piece))

    def rest(self, key: str, value: Any, piece: Piece) -> Any:
        """Return a copy of an entry of a piece's state where it rests.

        Fused steps on the host take no counts of steps from a device, as from a checkpoint.
        """
        if not isinstance(value, Tensor):
            return value
        is_count = key == "step" and self.stepped_as(piece).device.type == "cpu"
        return value.to("cpu", copy=True) if is_count else value.clone()

    def lend(self, part: Part, values: Tensor, key: str | None = None) -> Tensor:
        """Return what is stepped for ``values`` of a piece, which have a number per element.

        They are its masters, its gradient or, with a ``key``, an entry of its state. Here they are
        stepped where they rest.
        """
        return values

    def rested(self, part: Part, stand_in: Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of what was stepped as it rests, and bring masters there."""
        return dict(state)

    def brought(self, batches: list[list[Part]]) -> Generator[list[Part], None, None]:
        """Yield each batch when its states are in memory, and bring them to rest behind it."""
        for number, batch in enumerate(batches):
            yield batch
            if self.batches:
                self.refresh(number)

    def refresh(self, number: int) -> None:
        """Bring weights up to date once their batch has been stepped, while others are not yet."""
        if self._refresh is not None:
            self._refresh([part.piece for part in self.batches[number]])

    # -- a step ----------------------------------------------------------------------------------

    @override
    def check(self) -> None:
        super().check()
        if self.is_torn:
            raise RuntimeError(
                f"A step of {type(self.optimizer).__name__} ended half-way: some units have"
                " been stepped, others not. Resume from the last checkpoint."
            )

    @override
    @torch.no_grad()
    def begin(self) -> None:
        """Leave the first batch to the call under way."""
        self._under_way = self._step()
        next(self._under_way)

    @override
    @torch.no_grad()
    def end(self) -> None:
        """Step all other batches, and restore the param groups."""
        assert self._under_way is not None
        next(self._under_way, None)

    @override
    def remove(self) -> None:
        if self._under_way is not None:
            with contextlib.suppress(OSError):  # already raised by the step
                self._under_way.close()
        super().remove()

    def _step(self) -> Generator[None, None, None]:
        """Step batch by batch, the first one while this generator waits."""
        began, optimizer = perf_counter(), self.optimizer
        groups, states = optimizer.param_groups, optimizer.state
        members = [[*group["params"]] for group in groups]
        fused = [(group, group["fused"], new) for group, new in self._to_fuse()]
        # What has no gradient is not stepped.
        batches = [[part for part in each if part.piece.grad is not None] for each in self.batches]
        batches = [batch for batch in batches if batch or self._refresh is not None] or [[]]
        batched = {part.piece for batch in batches for part in batch}
        # Torch wraps the step of a class to call the hooks; unwrap it.
        step: Callable[[Any], Any] = type(optimizer).step
        step = getattr(step, "__wrapped__", step)
        lent: dict[Parameter, Parameter] = {}
        try:
            for group, _, new in fused:
                group["fused"] = new
            with contextlib.closing(self.brought(batches)) as brought:
                for number, batch in enumerate(brought):
                    lent = {part.piece: self._stand_in(part) for part in batch}
                    for group, held in zip(groups, members, strict=False):
                        group["params"][:] = [
                            lent.get(one, one)
                            for one in held
                            if one in lent or (number == 0 and one not in batched)
                        ]
                    if number == 0:
                        yield
                    else:
                        step(optimizer)
                    self.is_torn |= len(batches) > 1
                    for part in batch:
                        self._take_back(part, lent.pop(part.piece))
            self.is_torn = False
        finally:
            for stand_in in lent.values():  # left by a step that failed
                states.pop(stand_in, None)
            for group, held in zip(groups, members, strict=False):  # a group may be new
                group["params"][:] = held
            for group, before, _ in fused:
                group["fused"] = before
        if self._ledger is not None:
            self._ledger.spend("stepping", perf_counter() - began)

    def _stand_in(self, part: Part) -> Parameter:
        """Return the parameter to step for a part, with its gradient and state.

        All parts of a piece take the same step: each counts it in copies.
        """
        piece, states = part.piece, self.optimizer.state
        stand_in = Parameter(self.lend(part, piece.detach()), requires_grad=False)
        assert piece.grad is not None
        stand_in.grad = self.lend(part, piece.grad)

        def entry(key: str, value: Any) -> Any:
            if is_of_elements(key, value, piece):
                return self.lend(part, value, key)
            return value.clone() if isinstance(value, Tensor) else value

        if piece in states:
            states[stand_in] = with_entries(states[piece], entry)
        return stand_in

    def _take_back(self, part: Part, stand_in: Parameter) -> None:
        """Bring what was stepped to rest; a piece has a new state once its last part has one."""
        states = self.optimizer.state
        state = self.rested(part, stand_in, states.pop(stand_in, {}))
        if state and part.stop == part.piece.numel():
            states[part.piece] = state

    @override
    def describe(self, reason: str) -> str:
        unset = " It is stepped with fused=True, as neither fused nor foreach is set."
        fused = unset if any(new for _, new in self._to_fuse()) else ""
        return f"{super().describe(reason)}; its states rest in {self.place}.{fused}"


# -- stochastic rounding ---------------------------------------------------------------------------


class RoundedStep(UnitStep):
    """Steps an optimizer in fp32, with weights and states that rest in bf16.

    Rounding to nearest, bf16 loses every change smaller than a 512th of the number: weights stand
    still at small learning rates, and means over a thousand steps never move. Stochastic rounding
    goes up or down at random, more likely to the nearer neighbour, so that the expected value is
    exact (Zamirai et al., *Revisiting BFloat16 Training*, 2020). One unit at a time is in fp32.
    """

    place = "bf16, stepped in fp32 with stochastic rounding"

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._num_steps: dict[str, int] = {}

    @override
    def stepped_as(self, piece: Piece) -> Tensor:
        is_rounded = piece.dtype is torch.bfloat16
        return torch.empty(0, device=piece.device) if is_rounded else piece

    @override
    def take(self, pieces: Sequence[Piece]) -> None:
        of_units: dict[int, list[Part]] = {}
        for piece in pieces:
            if piece.dtype is torch.bfloat16:
                unit = 0 if self._is_at_once else id(piece.gradients)
                of_units.setdefault(unit, []).append(Part.all_of(piece))
        self.batches = [*of_units.values()]

    @override
    def lend(self, part: Part, values: Tensor, key: str | None = None) -> Tensor:
        return values.float()

    @override
    def rested(self, part: Part, stand_in: Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        piece, noise = part.piece, self._noise(part.piece, state.get("step"))

        def entry(key: str, value: Any) -> Any:
            if not is_of_elements(key, value, piece):
                return value
            out = torch.empty_like(value, dtype=piece.dtype)
            round_by_chance(value, out, noise)
            return out

        found = with_entries(state, entry)
        round_by_chance(stand_in.detach(), piece.detach(), noise)
        return found

    def _noise(self, piece: Piece, step: Any) -> torch.Generator:
        """Return the noise for a step of a piece: the same in every run and all copies of it."""
        place = f"{piece.range.slot.name} {piece.range.start}"
        if place not in self._num_steps:
            # A resumed run continues the noise if the optimizer counts its steps.
            is_count = isinstance(step, int | float) or (torch.is_tensor(step) and not step.dim())
            self._num_steps[place] = int(step or 1) - 1 if is_count else 0
        self._num_steps[place] += 1
        seed = zlib.crc32(f"{place} {self._num_steps[place]}".encode())
        return torch.Generator(piece.device).manual_seed(seed)


def round_by_chance(source: Tensor, out: Tensor, noise: torch.Generator) -> None:
    """Write fp32 numbers to a bf16 tensor, rounded at random so that the expected value is exact.

    Numbers that bf16 can represent stay as they are, and so do infinities and NaN.
    """
    together = numel_at_a_time(source.device)
    for part, target in zip(torch.split(source, together), torch.split(out, together), strict=True):
        # bf16 is the upper half of fp32: noise added to the lower half carries at random.
        bits = torch.randint(
            2**16, part.shape, dtype=torch.int32, device=part.device, generator=noise
        )
        bits.add_(part.view(torch.int32)).bitwise_and_(-(2**16))
        target.copy_(torch.where(part.isfinite(), bits.view(torch.float32), part))
