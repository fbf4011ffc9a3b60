"""Steps of an optimizer unit by unit, on the host, where what is offloaded rests.

With states in files no more than one unit's are in memory of the process' own. Before the user's
own call of ``step`` goes through the param groups, they are narrowed to one unit after the other
and stepped; the call itself steps the last unit. Hooks, schedulers, counters and the closure see
one step::

    pre-hook    unit 0 | unit 1 | ...           groups hold one unit's members
    step        last unit                       the same
    post-hook                                   groups hold all members again

There states that the optimizer makes or replaces, one number for each element, are moved to mapped
files behind each unit's step. From then on the optimizer finds and changes them there.

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

from lightning_zero.comm import Communicator, Scratch
from lightning_zero.optimizer.pieces import FindPiece, cut_state, state_bytes
from lightning_zero.optimizer.probe import ELEMENT_WISE
from lightning_zero.parameters import Piece
from lightning_zero.tensors import lasting_tensors

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
    """Steps an optimizer unit by unit, with its states in host memory or in files.

    Args:
        optimizer: The user's; one of torch's own that step by element.
        units: The pieces of each unit, in the order in which they are stepped.
        scratch: Where the files are; ``None`` keeps states where the optimizer makes them.
        comm: The ranks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        units: Sequence[Sequence[Piece]],
        scratch: Scratch | None,
        comm: Communicator,
    ) -> None:
        name = type(optimizer).__name__
        if type(optimizer) not in ELEMENT_WISE:
            known = ", ".join(sorted(cls.__name__ for cls in ELEMENT_WISE))
            raise ValueError(
                f"Offload steps an optimizer unit by unit, of which it is not known that {name}"
                f" gives the same numbers. Take one of torch.optim's ({known}), or leave"
                " offload_optimizer and offload_weights out."
            )
        self._optimizer = optimizer
        self._units = units
        self._number = {id(piece): n for n, unit in enumerate(units) for piece in unit}
        self._scratch = scratch
        self._control = comm.control
        self._homes: dict[tuple[str, torch.dtype], dict[int, Tensor]] = {}
        self._taken: set[int] = set()
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

    # -- states ----------------------------------------------------------------------------------

    def require_room(self, find_piece: FindPiece) -> None:
        """Raise on all ranks unless there is room for the states of new members of the groups."""
        if self._scratch is None:
            return
        nbytes = 0
        for group in self._optimizer.param_groups:
            found = [find_piece(p) for p in group["params"] if not isinstance(p, Piece)]
            new = [piece for piece in found if piece is not None and piece.requires_grad]
            for dtype in {piece.dtype for piece in new}:
                per_element = state_bytes(self._optimizer, group, dtype).per_element
                nbytes += per_element * sum(p.numel() for p in new if p.dtype is dtype)
        name = type(self._optimizer).__name__
        self._scratch.require(nbytes, self._control, f"the states of {name}")

    def take(self, pieces: Iterable[Piece]) -> None:
        """Note the pieces that the optimizer holds."""
        self._taken.update(map(id, pieces))

    def part_of(self, state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
        """Return this rank's part of a whole parameter's state, in files."""
        return self.kept(cut_state(state, piece), piece)

    def kept(self, state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
        """Return a piece's state with a number for each element in files, and the rest copied."""
        return {
            key: self._in_file(key, value, piece)
            if self._scratch is not None and _is_in_files(key, value, piece)
            else value.clone()
            if isinstance(value, Tensor)
            else value
            for key, value in state.items()
        }

    def _keep(self, groups: Groups) -> None:
        """Move the states of what was just stepped to files, unless they are there."""
        if self._scratch is None:
            return
        state = self._optimizer.state
        for piece in (member for group in groups for member in group):
            if not isinstance(piece, Piece) or piece not in state:
                continue
            for key, value in state[piece].items():
                if _is_in_files(key, value, piece):
                    state[piece][key] = self._in_file(key, value, piece)

    @torch.no_grad()
    def _in_file(self, key: str, value: Tensor, piece: Piece) -> Tensor:
        homes = self._homes.setdefault((key, value.dtype), {})
        if id(piece) not in homes:
            self._make_homes(homes, value.dtype, piece)
        home = homes[id(piece)]
        if value is not home:
            home.copy_(value)
        return home

    def _make_homes(self, homes: dict[int, Tensor], dtype: torch.dtype, piece: Piece) -> None:
        """Make a file for an entry of the states of a piece, and of others that step with it."""
        peers = [
            one
            for one in self._units[self._number[id(piece)]]
            if id(one) in self._taken and id(one) not in homes and one.dtype is piece.dtype
        ]
        new = [one for one in peers if one is piece or (one.requires_grad and one.numel())]
        sizes = [one.numel() for one in new]
        assert self._scratch is not None
        with lasting_tensors():
            parts = torch.split(self._scratch.tensor(sum(sizes), dtype), sizes)
        homes.update((id(one), part) for one, part in zip(new, parts, strict=True))

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

    def _cut(self) -> list[Groups]:
        """Return the members of the param groups unit by unit; what is in none comes last."""
        num_groups = len(self._optimizer.param_groups)
        units: list[Groups] = [[[] for _ in range(num_groups)] for _ in range(len(self._units) + 1)]
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
        place, memory = "host memory", ""
        if self._scratch is not None:
            place = f"files in {self._scratch.folder!r}"
            if self._scratch.is_memory:
                memory = " That folder is memory itself: name one on a disk as offload_path."
        return f"{name} steps unit by unit; its states rest in {place}.{memory}{fused}"


def _is_in_files(key: str, value: Any, piece: Piece) -> bool:
    """Return whether an entry of a piece's state has one number for each element."""
    return (
        isinstance(value, Tensor)
        and value.shape == piece.shape
        and key != "step"
        and value.numel() > 0
    )


_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""What has a fused step on CPUs."""
