"""Steps of an optimizer unit by unit, on the host, where what is offloaded rests.

A unit, or a part of a large one, is a batch. Before the user's own call of ``step`` goes through
the param groups, they are narrowed to one batch after the other and stepped; the call itself steps
the last. Hooks, schedulers, counters and the closure see one step::

    pre-hook    others | batch 0 | batch 1 | ...   groups hold one batch's members
    step        last batch                         the same
    post-hook                                      groups hold all members again

The others are in no batch: what stays on a device, which steps it while the host goes on, and what
belongs to no engine.

Around each batch's step its states are fetched from where they rest, and flushed (``states.py``).

While its closure runs, whoever knows that the gradients of a unit are final may let its batches be
stepped **ahead**, in an order that is set with the first. The pre-hook goes on from there.

An error amid the batches leaves some stepped and others not. Such a step is **torn**: nothing may
be stepped or saved any more.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.comm import Ledger
from lightning_zero.optimizer.pieces import cut_state, pieces_of
from lightning_zero.optimizer.probe import ELEMENT_WISE
from lightning_zero.optimizer.states import States
from lightning_zero.parameters import Piece

_OTHERS = -1
"""Stands for what is in no batch."""

Groups = list[list[Parameter]]
"""The members of each param group."""


class UnitStep:
    """Steps an optimizer unit by unit.

    Args:
        batches: The pieces that are stepped together, one batch after the other. One that is in
            several batches is stepped part by part.
        states: Where the states rest, of one of torch's own optimizers that step by element.
        ledger: Counts the time of steps on the host; ``None`` for those on the device.

    Attributes:
        states: The same.
        is_sure: Whether a step is under way that only waits for its closure.
        is_torn: Whether some units are stepped and others not: amid a step, and for ever behind one
            that ended half-way.
    """

    def __init__(
        self, batches: Sequence[Sequence[Piece]], states: States, ledger: Ledger | None = None
    ) -> None:
        optimizer = states.optimizer
        name = type(optimizer).__name__
        if type(optimizer) not in ELEMENT_WISE:
            known = ", ".join(sorted(cls.__name__ for cls in ELEMENT_WISE))
            raise ValueError(
                "Offload and stochastic_rounding step unit by unit, of which it is not known that"
                f" {name} gives the same numbers. Take one of torch.optim's ({known}), or leave"
                " offload_optimizer, offload_weights and stochastic_rounding out."
            )
        self.states = states
        self.is_sure = False
        self._ledger = ledger
        self._begin = 0.0
        self._numbers: dict[int, list[int]] = {}
        for number, batch in enumerate(batches):
            for piece in batch:
                self._numbers.setdefault(id(piece), []).append(number)
        self._members: Groups | None = None
        # Of the step under way; the first is the next, the last is the user's own call's.
        self._left: dict[int, Groups] = {}
        self._to_fuse: list[dict[str, Any]] = []
        self.is_torn = False
        # Torch patches the class once, to call the hooks; below is the step itself.
        self._step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)

    def _open_groups(self) -> list[dict[str, Any]]:
        """Return the groups that may step by one pass over their memory, if nobody has said.

        Torch's default on a CPU passes over it once for each operation.
        """
        optimizer, found = self.states.optimizer, []
        for group in optimizer.param_groups if type(optimizer) in _FUSED else ():
            is_open = group.get("fused") is None and group.get("foreach") is None
            # Not every fused step takes a rate in a tensor, and none complex numbers.
            can_be = not group.get("differentiable") and not isinstance(group["lr"], Tensor)
            if is_open and can_be and all(map(torch.is_floating_point, group["params"])):
                found.append(group)
        return found

    def take(self, pieces: Iterable[Piece]) -> None:
        """Note the pieces that the optimizer holds."""
        self.check()  # new ones cannot come into a step that was begun ahead
        self.states.take(pieces)

    def part_of(self, state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
        """Return this rank's part of a whole parameter's state, where states rest."""
        return self.states.kept(cut_state(state, piece), piece)

    # -- a step ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise a ``RuntimeError`` if a step ended half-way."""
        self.remove()
        if self.is_torn:
            raise RuntimeError(
                f"A step of {type(self.states.optimizer).__name__} ended half-way: some units are"
                " stepped, others not. Resume from the last checkpoint."
            )

    def remove(self) -> None:
        """Let the param groups hold all members, also behind a step that ended half-way."""
        if self._members is not None:
            self._narrow(self._members)
            self._members = None
            with contextlib.suppress(OSError):  # the step has raised it
                self.states.close()

    @torch.no_grad()
    def step_ahead(self, order: Sequence[Sequence[Piece]]) -> None:
        """Step the batches of the first of units, in whose order the whole step goes.

        Args:
            order: The pieces of units that are not stepped yet; others come behind them.
        """
        self._begin = time.perf_counter()
        if self._members is None:
            self._open([piece for unit in order for piece in unit])
        assert self._members is not None
        first = set(map(id, order[0]))
        while len(self._left) > 1 and first.issuperset(_ids(next(iter(self._left.values())))):
            self._step_next()
        self._narrow(self._members)
        self._spend()

    def begin(self) -> None:
        """Step all batches but the last, and leave that one to the call that is under way."""
        self._begin = time.perf_counter()
        if self._members is None:
            self._open([])
        while len(self._left) > 1:
            self._step_next()
        self._fetch_next()

    def end(self) -> None:
        """Let the param groups hold all members again."""
        assert self._members is not None
        self.states.flush()
        self.states.close()
        self._narrow(self._members)
        self._members = None
        self.is_torn = False
        self._spend()

    def _open(self, order: Sequence[Piece]) -> None:
        """Begin a step of all batches, first of those with pieces that come first in an order."""
        optimizer = self.states.optimizer
        batches = self._cut()
        if order:
            places = {id(piece): place for place, piece in enumerate(order)}

            def place_of(number: int) -> int:
                ids = _ids(batches[number])
                return min((places.get(one, len(places)) for one in ids), default=len(places))

            batches = {number: batches[number] for number in sorted(batches, key=place_of)}
        # Nothing is torn: who lacks the memory for it may try again.
        self.states.open([*batches])
        self._left, self._to_fuse = batches, self._open_groups()
        self._members = [[*group["params"]] for group in optimizer.param_groups]

    def _step_next(self) -> None:
        self._fetch_next()
        self._step(self.states.optimizer)
        self.states.flush()

    def _fetch_next(self) -> None:
        number = next(iter(self._left))
        self.is_torn = True
        self._narrow(self._left.pop(number), is_batch=number != _OTHERS)
        self._move_counts()
        self.states.fetch(number)

    def _spend(self) -> None:
        if self._ledger is not None:
            self._ledger.spend("stepping", time.perf_counter() - self._begin)

    def _cut(self) -> dict[int, Groups]:
        """Return the members of the param groups by batch; what is in none comes first."""
        groups = self.states.optimizer.param_groups
        batches: dict[int, Groups] = {}
        for index, group in enumerate(groups):
            for member in group["params"]:
                for number in self._numbers.get(id(member), [_OTHERS]):
                    batches.setdefault(number, [[] for _ in groups])[index].append(member)
        return dict(sorted(batches.items())) or {_OTHERS: [[] for _ in groups]}

    def _narrow(self, groups: Groups, *, is_batch: bool = False) -> None:
        """Let the param groups hold these members, and fuse the steps of batches alone."""
        for group, members in zip(self.states.optimizer.param_groups, groups, strict=True):
            group["params"][:] = members
        for group in self._to_fuse:
            group["fused"] = is_batch or None

    def _move_counts(self) -> None:
        """Let fused steps find counts where they step; those of a checkpoint may be elsewhere."""
        optimizer = self.states.optimizer
        fused = (group["params"] for group in optimizer.param_groups if group.get("fused"))
        for member in itertools.chain.from_iterable(fused):
            count = optimizer.state.get(member, {}).get("step")
            if isinstance(count, Tensor) and count.device != member.device:
                optimizer.state[member]["step"] = count.to(member.device, torch.float32)

    def describe(self, _: str = "") -> str:
        """Return what is done, in a line."""
        name = type(self.states.optimizer).__name__
        fused = (
            " They are stepped with fused=True, as nobody has said." if self._open_groups() else ""
        )
        pieces = pieces_of(self.states.optimizer)
        staying = sum(piece.numel() for piece in pieces if piece.stays)
        share = staying / max(1, sum(piece.numel() for piece in pieces))
        here = f" On this rank {share:.1%} of them stay on the device." if staying else ""
        return f"{name} steps unit by unit; its states rest in {self.states.place}.{here}{fused}"


def _ids(groups: Groups) -> list[int]:
    return [id(member) for members in groups for member in members]


_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""What has a fused step on CPUs."""
