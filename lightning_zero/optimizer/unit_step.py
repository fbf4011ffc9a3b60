"""Steps of an optimizer unit by unit, on the host, where what is offloaded rests.

With states in files no more than one unit's are in memory of the process' own. Before the user's
own call of ``step`` goes through the param groups, they are narrowed to one unit after the other
and stepped; the call itself steps the last unit. Hooks, schedulers, counters and the closure see
one step::

    pre-hook    unit 0 | unit 1 | ...           groups hold one unit's members
    step        last unit                       the same
    post-hook                                   groups hold all members again

Behind each unit's step its states are kept where they rest (``states.py``).

An error amid the units leaves some stepped and others not. Such a step is **torn**: nothing may be
stepped or saved any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.optimizer.pieces import cut_state
from lightning_zero.optimizer.probe import ELEMENT_WISE
from lightning_zero.optimizer.states import States
from lightning_zero.parameters import Piece

_steps: weakref.WeakKeyDictionary[Optimizer, UnitStep] = weakref.WeakKeyDictionary()

Groups = list[list[Parameter]]
"""The members of each param group."""


def unit_step_of(optimizer: Optimizer) -> UnitStep | None:
    """Return what steps an optimizer unit by unit; ``None`` if it steps all at once."""
    return _steps.get(optimizer)


def require_whole_steps(optimizers: Iterable[Optimizer]) -> None:
    """Raise a ``RuntimeError`` if a step of one of them ended half-way."""
    for optimizer in optimizers:
        step = unit_step_of(optimizer)
        if step is not None:
            step.check()


class UnitStep:
    """Steps an optimizer unit by unit.

    Args:
        optimizer: The user's; one of torch's own that step by element.
        units: The pieces of each unit, in the order in which they are stepped.
        states: Where its states rest.

    Attributes:
        states: The same.
    """

    def __init__(
        self, optimizer: Optimizer, units: Sequence[Sequence[Piece]], states: States
    ) -> None:
        name = type(optimizer).__name__
        if type(optimizer) not in ELEMENT_WISE:
            known = ", ".join(sorted(cls.__name__ for cls in ELEMENT_WISE))
            raise ValueError(
                f"Offload steps an optimizer unit by unit, of which it is not known that {name}"
                f" gives the same numbers. Take one of torch.optim's ({known}), or leave"
                " offload_optimizer and offload_weights out."
            )
        self.states = states
        self._optimizer = optimizer
        self._num_units = len(units)
        self._number = {id(piece): n for n, unit in enumerate(units) for piece in unit}
        self._members: Groups | None = None
        self._last: Groups = []
        self._is_torn = False
        # Torch patches the class once, to call the hooks; below is the step itself.
        self._step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
        self._is_fused = self._fuse()
        _steps[optimizer] = self

    def _fuse(self) -> bool:
        """Let groups whose user left it open step by one pass over their memory.

        Torch's default on a CPU passes over it once for each operation.
        """
        is_fused = False
        if type(self._optimizer) not in _FUSED:
            return False
        for group in self._optimizer.param_groups:
            is_open = group.get("fused") is None and group.get("foreach") is None
            # Not every fused step takes a rate in a tensor, and none complex numbers.
            can_be = not group.get("differentiable") and not isinstance(group["lr"], Tensor)
            if is_open and can_be and all(map(torch.is_floating_point, group["params"])):
                group["fused"] = is_fused = True
        return is_fused

    def take(self, pieces: Iterable[Piece]) -> None:
        """Note the pieces that the optimizer holds."""
        self.states.take(pieces)

    def part_of(self, state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
        """Return this rank's part of a whole parameter's state, where states rest."""
        return self.states.kept(cut_state(state, piece), piece)

    # -- a step ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise a ``RuntimeError`` if a step ended half-way."""
        self.remove()
        if self._is_torn:
            raise RuntimeError(
                f"A step of {type(self._optimizer).__name__} ended half-way: some units are"
                " stepped, others not. Resume from the last checkpoint."
            )

    def remove(self) -> None:
        """Let the param groups hold all members, also behind a step that ended half-way."""
        if self._members is not None:
            self._is_torn = True
            self._narrow(self._members)
            self._members = None

    def begin(self) -> None:
        """Step all units but the last, and leave that one to the call that is under way."""
        self._fuse()
        *units, last = self._cut()
        self._members = [[*group["params"]] for group in self._optimizer.param_groups]
        for unit in units:
            self._narrow(unit)
            self._step(self._optimizer)
            self._keep(unit)
        self._narrow(last)
        self._last = last

    def end(self) -> None:
        """Let the param groups hold all members again."""
        self._keep(self._last)
        assert self._members is not None
        self._narrow(self._members)
        self._members = None

    def _keep(self, groups: Groups) -> None:
        self.states.keep(member for group in groups for member in group)

    def _cut(self) -> list[Groups]:
        """Return the members of the param groups unit by unit; what is in none comes last."""
        num_groups = len(self._optimizer.param_groups)
        units: list[Groups] = [[[] for _ in range(num_groups)] for _ in range(self._num_units + 1)]
        for index, group in enumerate(self._optimizer.param_groups):
            for member in group["params"]:
                units[self._number.get(id(member), -1)][index].append(member)
        return [unit for unit in units if any(unit)] or units[:1]

    def _narrow(self, groups: Groups) -> None:
        for group, members in zip(self._optimizer.param_groups, groups, strict=True):
            group["params"][:] = members

    def describe(self, _: str = "") -> str:
        """Return what is done, in a line."""
        name = type(self._optimizer).__name__
        fused = " fused=True was switched on, as nobody had said." if self._is_fused else ""
        return f"{name} steps unit by unit; its states rest in {self.states.place}.{fused}"


_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""What has a fused step on CPUs."""
