"""Steps of an optimizer unit by unit, for offload and stochastic rounding.

A batch is a unit or a part of a large one. Before the user's own call of ``step`` goes through the
param groups, a stand-in of the optimizer steps all batches but the last, one after the other; the
call itself steps the last one, with groups narrowed to it. Hooks, schedulers, counters and the
closure see one step::

    pre-hook    others | batch 0 | batch 1 | ...   the stand-in's groups hold one batch's members
    step        last batch                         the optimizer's own groups do
    post-hook                                      they hold all members again

Each batch begins with the options of groups, and everything else that the optimizer keeps for all
members, as the closure left them; what the last batch leaves is kept (``shared_state.py``).

The others are members in no batch: those that stay on a device, which steps them while the host
goes on, and those that belong to no engine.

Around each batch's step its states are fetched from where they rest, and flushed (``states.py``).

An error part way through the batches leaves some stepped and others not. Such a step is **torn**:
nothing may be stepped or saved any more.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.comm import Ledger
from lightning_zero.optimizer.known import FUSED, is_known
from lightning_zero.optimizer.pieces import FindPiece
from lightning_zero.optimizer.shared_state import SharedState, shared_of
from lightning_zero.optimizer.states import States
from lightning_zero.optimizer.steppers import Call, Stepper
from lightning_zero.parameters import Piece

_OTHERS = -1
"""Stands for the members in no batch."""

Groups = list[list[Parameter]]
"""The members of each param group."""

_NOT_BY_FUSED_SGD = frozenset([torch.bfloat16, torch.float16])


class UnitStep(Stepper):
    """Steps an optimizer unit by unit.

    Args:
        batches: The pieces that are stepped together, one batch after the other. A piece in several
            batches is stepped part by part.
        states: The states of an optimizer that may be stepped unit by unit.
        ledger: Counts the time of steps on the host; ``None`` for steps on the device.

    Attributes:
        states: The optimizer's states.
        step: The ``step`` of the optimizer's class, without hooks.
        is_torn: ``True`` during a step, and for good after one that ended half-way.
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
        self._under_way: _UnderWay | None = None
        # Torch wraps the step of a class to call the hooks; unwrap it.
        kind = type(self.optimizer)
        self.step: Call = getattr(kind.step, "__wrapped__", kind.step)

    def _groups_to_fuse(self) -> list[int]:
        """Return the groups to step fused: those that can be and are not set otherwise.

        That is one pass over their memory; torch's default on a CPU makes one per operation.
        """
        optimizer, found = self.optimizer, []
        groups = optimizer.param_groups if type(optimizer) in FUSED else ()
        for index, group in enumerate(groups):
            is_unset = group.get("fused") is None and group.get("foreach") is None
            # Not every fused step takes a learning rate in a tensor, and none complex numbers.
            can_be = not group.get("differentiable") and not isinstance(group["lr"], Tensor)
            if is_unset and can_be and all(map(torch.is_floating_point, group["params"])):
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
        self._require_right_steps()
        self.states.take(pieces)

    def _require_right_steps(self) -> None:
        optimizer = self.optimizer
        for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
            pieces = (one for one in group["params"] if isinstance(one, Piece))
            stepped = map(self.stepped_as, pieces)
            on_host = {one.dtype for one in stepped if one.device.type == "cpu"}
            if group.get("fused") and on_host & _NOT_BY_FUSED_SGD:
                raise ValueError(
                    "These parameters are stepped on the CPU, where torch's SGD with fused=True"
                    " leaves most of a 16-bit parameter unchanged. Remove fused=True, or train in"
                    " mixed precision."
                )

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
        if self._under_way is not None:
            self._under_way.restore(self.optimizer)
            self._under_way = None
            with contextlib.suppress(OSError):  # already raised by the step
                self.states.close()
        super().abandon()

    @override
    def begin(self, call: Call | None = None) -> None:
        """Step all batches but the last, and leave that one to the call under way."""
        self._begin = perf_counter()
        batches = self._cut()
        # Not torn yet: if memory is lacking, the step may be tried again.
        self.states.open([*batches])
        step = _UnderWay(self.optimizer, self._groups_to_fuse())
        self._under_way, self.is_torn = step, True
        *others, last = batches.items()
        for number, members in others:
            self._step_batch(step, number, members, call or self.step)
        self._fetch(step, self.optimizer, *last)

    @override
    def end(self) -> None:
        """End the step of the last batch, and restore the param groups."""
        assert self._under_way is not None
        self.states.flush()
        self.states.close()
        self._under_way.restore(self.optimizer)
        self._under_way = None
        self.is_torn = False
        if self._ledger is not None:
            self._ledger.spend("stepping", perf_counter() - self._begin)

    @override
    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        assert self._under_way is not None
        with self._under_way.restored(self.optimizer):
            yield

    @torch.no_grad()
    def _step_batch(self, step: _UnderWay, number: int, members: Groups, call: Call) -> None:
        self._fetch(step, step.stand_in, number, members)
        shared = step.shared_state
        with contextlib.nullcontext() if shared is None else shared.lent_to(step.stand_in):
            call(step.stand_in)
        self.states.flush()

    def _fetch(self, step: _UnderWay, who: Optimizer, number: int, members: Groups) -> None:
        """Narrow ``who`` to a batch, fused where it may be, and fetch the states."""
        step.narrow(who, members, fuses=number != _OTHERS)
        _move_counts(who)
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

    @override
    def describe(self, reason: str) -> str:
        name = type(self.optimizer).__name__
        unset = " Units are stepped with fused=True, as neither fused nor foreach is set."
        fused = unset if self._groups_to_fuse() else ""
        return f"{name} steps unit by unit; its states rest in {self.states.place}.{fused}"


class _UnderWay:
    """A step of all batches that is under way.

    Args:
        optimizer: The user's optimizer.
        to_fuse: The groups whose batches are stepped fused.

    Attributes:
        stand_in: Steps all batches but the last. It has the optimizer's options and states, and
            groups of its own.
        shared_state: What the optimizer keeps for all members; ``None`` if no step changes it.
    """

    def __init__(self, optimizer: Optimizer, to_fuse: list[int]) -> None:
        self.shared_state = None if is_known(optimizer) else SharedState(optimizer)
        self._to_fuse = to_fuse
        groups = optimizer.param_groups
        self._members = [[*group["params"]] for group in groups]
        named = (zip(g["params"], g.get("param_names", ()), strict=False) for g in groups)
        self._names = {id(member): name for pairs in named for member, name in pairs}
        self.stand_in: Optimizer = object.__new__(type(optimizer))
        self.stand_in.__dict__.update(shared_of(optimizer)[0], state=optimizer.state)
        self.stand_in.param_groups = [{**group, "params": []} for group in groups]
        for group in self.stand_in.param_groups:
            if "param_names" in group:
                group["param_names"] = []

    def narrow(self, who: Optimizer, members: Groups, *, fuses: bool) -> None:
        """Make the param groups of ``who`` hold only these members."""
        for group, some in zip(who.param_groups, members, strict=False):  # a group may be new
            group["params"][:] = some
            if "param_names" in group:
                group["param_names"][:] = [self._names[id(member)] for member in some]
        for index in self._to_fuse:
            who.param_groups[index]["fused"] = fuses or None

    def restore(self, optimizer: Optimizer) -> None:
        """Restore the user's param groups."""
        self.narrow(optimizer, self._members, fuses=False)

    @contextlib.contextmanager
    def restored(self, optimizer: Optimizer) -> Iterator[None]:
        """Enter a context with the user's param groups."""
        groups = optimizer.param_groups
        members = [[*group["params"]] for group in groups]
        fuses = any(groups[index].get("fused") for index in self._to_fuse)
        self.restore(optimizer)
        try:
            yield
        finally:
            self.narrow(optimizer, members, fuses=fuses)


def call_as(method: Callable[..., Any], stand_in: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Call an optimizer's bound method on a stand-in of it.

    Raises:
        TypeError: It is no method but a function that was put on the user's own optimizer.
    """
    if not isinstance(method, MethodType):
        raise TypeError(
            f"{method} replaces a method of one {type(stand_in).__name__}, which cannot be called"
            " unit by unit. Override the method in a subclass."
        )
    return method.__func__(stand_in, *args, **kwargs)


def _move_counts(optimizer: Optimizer) -> None:
    """Move step counts to where fused steps run; those from a checkpoint may be elsewhere."""
    fused = (group["params"] for group in optimizer.param_groups if group.get("fused"))
    for member in itertools.chain.from_iterable(fused):
        count = optimizer.state.get(member, {}).get("step")
        if isinstance(count, Tensor) and count.device != member.device:
            optimizer.state[member]["step"] = count.to(member.device, torch.float32)
