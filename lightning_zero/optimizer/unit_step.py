"""Steps of an optimizer where its states rest, for offload and stochastic rounding.

The user's own call of ``step`` steps all members. Classes of torch, whose steps change nothing that
members share, also step in batches, a unit or a part of a large one each. Before the user's call
goes through the param groups, a stand-in of the optimizer steps all batches but the last, one after
the other; the call itself steps the last one, with groups narrowed to it. Hooks, schedulers,
counters and the closure see one step::

    pre-hook    others | batch 0 | batch 1 | ...   the stand-in's groups hold one batch's members
    step        last batch                         the optimizer's own groups do
    post-hook                                      they hold all members again

The others are members in no batch: those that stay on a device, which steps them while the host
goes on, and those that belong to no engine.

Around each batch's step its states are fetched from where they rest, and flushed (``states.py``).

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
from lightning_zero.optimizer.pieces import FindPiece
from lightning_zero.optimizer.states import States
from lightning_zero.optimizer.steppers import Stepper
from lightning_zero.parameters import Piece

_OTHERS = -1
"""Stands for the members in no batch."""

Groups = list[list[Parameter]]
"""The members of each param group."""

_NOT_BY_FUSED_SGD = frozenset([torch.bfloat16, torch.float16])


class UnitStep(Stepper):
    """Steps an optimizer where its states rest.

    Args:
        batches: The pieces that may be stepped together, one batch after the other. A piece in
            several batches is stepped part by part.
        states: The states of the optimizer.
        ledger: Counts the time of steps on the host; ``None`` for steps on the device.

    Attributes:
        states: The optimizer's states.
        is_torn: ``True`` during a step of several batches, and for good after one that ended
            half-way.
    """

    steps_before_call = True

    def __init__(
        self,
        batches: Sequence[Sequence[Piece]],
        states: States,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(states.optimizer)
        self.states = states
        self._ledger = ledger
        self._begin = 0.0
        self._numbers: dict[int, list[int]] = {}
        for number, batch in enumerate(batches):
            for piece in batch:
                self._numbers.setdefault(id(piece), []).append(number)
        self._to_fuse: list[int] = []
        # What the groups hold apart from a step.
        self._members: Groups | None = None
        self._names: dict[int, str] = {}

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
    def stepped_as(self, piece: Piece) -> Tensor:
        return self.states.stepped_as(piece)

    @override
    def require_room(self, find_piece: FindPiece) -> None:
        self.states.require_room(find_piece)

    @override
    def take(self, pieces: Iterable[Piece]) -> None:
        """Note the pieces that the optimizer holds.

        Raises:
            ValueError: Torch would step some of them wrongly on the host.
        """
        optimizer = self.optimizer
        for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
            own = (one for one in group["params"] if isinstance(one, Piece))
            stepped = map(self.stepped_as, own)
            on_host = {one.dtype for one in stepped if one.device.type == "cpu"}
            if group.get("fused") and on_host & _NOT_BY_FUSED_SGD:
                raise ValueError(
                    "These parameters are stepped on the CPU, where torch's SGD with fused=True"
                    " leaves most of a 16-bit parameter unchanged. Remove fused=True, or train in"
                    " mixed precision."
                )
        self.states.take(pieces)

    @override
    def kept(self, state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
        return self.states.kept(state, piece)

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
                self.states.close()
        super().abandon()

    @override
    @torch.no_grad()
    def begin(self) -> None:
        """Step all batches but the last, and leave that one to the call under way."""
        self._begin = perf_counter()
        optimizer, batches = self.optimizer, self._cut()
        # Not torn yet: if memory is lacking, the step may be tried again.
        self.states.open([*batches])
        self._to_fuse = self._groups_to_fuse()
        groups = optimizer.param_groups
        self._members, self.is_torn = [[*group["params"]] for group in groups], len(batches) > 1
        named = (zip(g["params"], g.get("param_names", ()), strict=False) for g in groups)
        self._names = {id(member): name for pairs in named for member, name in pairs}
        stand_in = _stand_in(optimizer)
        # Torch wraps the step of a class to call the hooks; unwrap it.
        step: Callable[[Any], Any] = type(optimizer).step
        step = getattr(step, "__wrapped__", step)
        *others, (last, members) = batches.items()
        for number, some in others:
            self._fetch(stand_in, number, some)
            step(stand_in)
            self.states.flush()
        self._fetch(optimizer, last, members)

    def _fetch(self, who: Optimizer, number: int, members: Groups) -> None:
        """Narrow ``who`` to a batch, fused where it may be, and fetch the states."""
        self._narrow(who, members, fuses=number != _OTHERS)
        for group in who.param_groups:  # counts from a checkpoint may not be where fused steps run
            for member in group["params"] if group.get("fused") else ():
                count = who.state.get(member, {}).get("step")
                if isinstance(count, Tensor) and count.device != member.device:
                    who.state[member]["step"] = count.to(member.device, torch.float32)
        self.states.fetch(number, who.param_groups)

    def _cut(self) -> dict[int, Groups]:
        """Return the members of the param groups by batch; those in none come first."""
        groups = self.optimizer.param_groups
        batches: dict[int, Groups] = {}
        for index, group in enumerate(groups):
            for member in group["params"]:
                for number in self._numbers.get(id(member), [_OTHERS]):
                    batches.setdefault(number, [[] for _ in groups])[index].append(member)
        return dict(sorted(batches.items())) or {_OTHERS: [[] for _ in groups]}

    def _narrow(self, who: Optimizer, members: Groups, *, fuses: bool) -> None:
        """Make the param groups of ``who`` hold only these members."""
        for group, some in zip(who.param_groups, members, strict=False):  # a group may be new
            group["params"][:] = some
            if "param_names" in group:
                group["param_names"][:] = [self._names[id(member)] for member in some]
        for index in self._to_fuse:
            who.param_groups[index]["fused"] = fuses or None

    def _restore(self) -> None:
        members, self._members = self._members, None
        assert members is not None
        self._narrow(self.optimizer, members, fuses=False)

    @override
    def end(self) -> None:
        """End the step of the last batch, and restore the param groups."""
        self.states.flush()
        self.states.close()
        self._restore()
        self.is_torn = False
        if self._ledger is not None:
            self._ledger.spend("stepping", perf_counter() - self._begin)

    @override
    def describe(self, reason: str) -> str:
        name = type(self.optimizer).__name__
        unset = " It is stepped with fused=True, as neither fused nor foreach is set."
        fused = unset if self._groups_to_fuse() else ""
        return f"{name} steps by element; its states rest in {self.states.place}.{fused}"


def _stand_in(optimizer: Optimizer) -> Optimizer:
    """Return an object with the optimizer's options and states, and groups of its own."""
    made: Optimizer = object.__new__(type(optimizer))
    # Not what is put in the place of its methods.
    own = {k: v for k, v in vars(optimizer).items() if not hasattr(type(optimizer), k)}
    vars(made).update(own)
    made.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    for group in made.param_groups:
        if "param_names" in group:
            group["param_names"] = []
    return made
