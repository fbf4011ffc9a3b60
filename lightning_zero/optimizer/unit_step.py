"""Steps of an optimizer unit by unit, where its states rest: for offload and stochastic rounding.

The user's own call of ``step`` steps all members. Classes of torch, whose steps change nothing that
members share, also step in batches, a unit or a part of a large one each. Before the user's call
goes through the param groups, the step of the class is called for all batches but the last, one
after the other; the call itself steps the last one. Hooks, schedulers, counters and the closure see
one step::

    pre-hook    others | batch 0 | batch 1 | ...   the groups hold one batch's members
    step        last batch
    post-hook                                      they hold all members again

The others are members in no batch: those that stay on a device, which steps them while the host
goes on, and those that belong to no engine.

Around each batch's step its states are fetched from where they rest, and flushed.

An error part way through the batches leaves some stepped and others not. Such a step is **torn**:
nothing may be stepped or saved any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.comm import Ledger
from lightning_zero.optimizer.known import may_be_fused
from lightning_zero.optimizer.pieces import is_of_elements, parameter_of, with_entries
from lightning_zero.optimizer.steppers import Stepper
from lightning_zero.parameters import Piece

_OTHERS = -1
"""Stands for the members in no batch."""

Groups = list[list[Parameter]]
"""The members of each param group."""
ParamGroups = list[dict[str, Any]]
"""The param groups of an optimizer."""

_NOT_BY_FUSED_SGD = frozenset([torch.bfloat16, torch.float16])


class UnitStep(Stepper):
    """Steps an optimizer whose states are left in host memory, where it makes them.

    Args:
        optimizer: The optimizer.
        batches: The pieces that may be stepped together, one batch after the other. A piece in
            several batches is stepped part by part.
        ledger: Counts the time of steps on the host; ``None`` for steps on the device.

    Attributes:
        is_torn: ``True`` during a step of several batches, and forever after one that ended
            half-way.
    """

    steps_before_call = True
    place = "host memory"

    def __init__(
        self,
        optimizer: Optimizer,
        batches: Sequence[Sequence[Piece]],
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(optimizer)
        self._ledger = ledger
        self._began = 0.0
        self._numbers: dict[int, list[int]] = {}
        for number, batch in enumerate(batches):
            for piece in batch:
                self._numbers.setdefault(id(piece), []).append(number)
        self._to_fuse: list[int] = []
        # What the groups hold outside of a step.
        self._members: Groups | None = None

    def step_at_once(self) -> None:
        """Step all members in the user's own call: batches may not give the same numbers."""
        self._numbers.clear()

    def _groups_to_fuse(self) -> list[int]:
        """Return the groups to step fused on the CPU: those that can be and are not set otherwise.

        That is one pass over their memory; torch's default on a CPU makes one per operation.
        """
        optimizer, found = self.optimizer, []
        groups = optimizer.param_groups if may_be_fused(optimizer) else ()
        for index, group in enumerate(groups):
            is_unset = group.get("fused") is None and group.get("foreach") is None
            # Not every fused step takes a learning rate in a tensor, and none complex numbers.
            can_be = not group.get("differentiable") and not isinstance(group["lr"], Tensor)
            stepped = [self.stepped_as(p) for p in group["params"] if id(p) in self._numbers]
            is_on_cpu = all(one.device.type == "cpu" for one in stepped)
            if is_unset and can_be and is_on_cpu and all(map(torch.is_floating_point, stepped)):
                found.append(index)
        return found

    @override
    def take(self, pieces: Iterable[Piece]) -> None:
        """Note the pieces that the optimizer holds.

        Raises:
            ValueError: Torch would step some of them wrongly on the host.
        """
        optimizer, pieces = self.optimizer, [*pieces]
        stepped = {id(piece.parameter): self.stepped_as(piece) for piece in pieces}
        for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
            own = [stepped.get(id(parameter_of(member))) for member in group["params"]]
            on_host = {one.dtype for one in own if one is not None and one.device.type == "cpu"}
            if group.get("fused") and on_host & _NOT_BY_FUSED_SGD:
                raise ValueError(
                    "These parameters are stepped on the CPU, where torch's SGD with fused=True"
                    " leaves most of a 16-bit parameter unchanged. Remove fused=True, or train in"
                    " mixed precision."
                )

    @override
    def kept(self, state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
        """Return a copy of a piece's state where states rest.

        Entries with a number per element get the piece's dtype, as torch loads them.
        """

        def rest(key: str, value: Any) -> Any:
            if is_of_elements(key, value, piece) and value.is_floating_point():
                value = value.to(piece.dtype) if piece.is_floating_point() else value
            return self.rest(key, value, piece)

        return with_entries(state, rest)

    def rest(self, key: str, value: Any, piece: Piece) -> Any:
        """Return a copy of an entry of a piece's state where it rests."""
        return value.clone() if isinstance(value, Tensor) else value

    # -- the states of a step --------------------------------------------------------------------

    def open(self, numbers: Sequence[int]) -> None:
        """Begin a step of the batches with these numbers, in this order."""

    def fetch(self, number: int, groups: ParamGroups) -> None:
        """Bring the states of a step's next batch to its members, or stand-ins, in ``groups``."""

    def flush(self) -> None:
        """Bring the states of the fetched batch back to rest, after its step."""

    def close(self) -> None:
        """End a step, even a failed one: bring all states to rest."""

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
    def abandon(self) -> None:
        if self._members is not None:
            self._restore()
            with contextlib.suppress(OSError):  # already raised by the step
                self.close()
        super().abandon()

    @override
    @torch.no_grad()
    def begin(self) -> None:
        """Step all batches but the last, and leave that one to the call under way."""
        self._began = perf_counter()
        optimizer, batches = self.optimizer, self._cut()
        # Not torn yet: if memory is lacking, the step may be tried again.
        self.open([*batches])
        self._to_fuse = self._groups_to_fuse()
        groups = optimizer.param_groups
        self._members, self.is_torn = [[*group["params"]] for group in groups], len(batches) > 1
        # Torch wraps the step of a class to call the hooks; unwrap it.
        step: Callable[[Any], Any] = type(optimizer).step
        step = getattr(step, "__wrapped__", step)
        for number, members in batches.items():
            if number != next(iter(batches)):
                step(optimizer)
                self.flush()
            self._narrow(members, fuses=number != _OTHERS)
            self._bring_counts()
            self.fetch(number, groups)

    def _bring_counts(self) -> None:
        """Bring counts of steps, as from a checkpoint, to where fused steps run."""
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            for member in group["params"] if group.get("fused") else ():
                count = state.get(member, {}).get("step")
                if isinstance(count, Tensor) and count.device != member.device:
                    state[member]["step"] = count.to(member.device, torch.float32)

    def _cut(self) -> dict[int, Groups]:
        """Return the members of the param groups by batch; those in none come first."""
        groups = self.optimizer.param_groups
        batches: dict[int, Groups] = {}
        for index, group in enumerate(groups):
            for member in group["params"]:
                for number in self._numbers.get(id(member), [_OTHERS]):
                    batches.setdefault(number, [[] for _ in groups])[index].append(member)
        return dict(sorted(batches.items())) or {_OTHERS: [[] for _ in groups]}

    def _narrow(self, members: Groups, *, fuses: bool) -> None:
        """Make the param groups hold only these members."""
        groups = self.optimizer.param_groups
        for group, some in zip(groups, members, strict=False):  # a group may be new
            group["params"][:] = some
        for index in self._to_fuse:
            groups[index]["fused"] = fuses or None

    def _restore(self) -> None:
        members, self._members = self._members, None
        assert members is not None
        self._narrow(members, fuses=False)

    @override
    def end(self) -> None:
        """End the step of the last batch, and restore the param groups."""
        self.flush()
        self.close()
        self._restore()
        self.is_torn = False
        if self._ledger is not None:
            self._ledger.spend("stepping", perf_counter() - self._began)

    @override
    def describe(self, reason: str) -> str:
        name = type(self.optimizer).__name__
        unset = " It is stepped with fused=True, as neither fused nor foreach is set."
        fused = unset if self._groups_to_fuse() else ""
        return f"{name}: element-wise, sharded; its states rest in {self.place}.{fused}"
