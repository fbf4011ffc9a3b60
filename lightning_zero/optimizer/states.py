"""Where the states of an optimizer rest that is stepped unit by unit: in memory, or in files.

An entry of a piece's state goes to files if it has a number for each element. Everything else, as
counts of steps, stays in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.comm import Control, Scratch
from lightning_zero.optimizer.pieces import FindPiece, state_bytes
from lightning_zero.parameters import Piece
from lightning_zero.tensors import lasting_tensors


class States:
    """The states of an optimizer in host memory, where it makes them.

    Args:
        optimizer: The user's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def place(self) -> str:
        """Where they rest, for people."""
        return "host memory"

    def require_room(self, find_piece: FindPiece) -> None:
        """Raise on all ranks unless there is room for the states of new members of the groups."""

    def take(self, pieces: Iterable[Piece]) -> None:
        """Note the pieces that the optimizer holds."""

    def kept(self, state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
        """Return a piece's state in memory of its own, where states rest."""
        return {key: self._rest(key, value, piece) for key, value in state.items()}

    def _rest(self, key: str, value: Any, piece: Piece) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    def keep(self, members: Iterable[Parameter]) -> None:
        """Let the states of what was just stepped rest."""


class StateFiles(States):
    """The states of an optimizer in mapped files, where it finds and changes them.

    What it makes or replaces is moved there behind each unit's step.

    Args:
        optimizer: The user's.
        units: The pieces of each unit.
        scratch: Where the files are.
        control: The ranks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        units: Sequence[Sequence[Piece]],
        scratch: Scratch,
        control: Control,
    ) -> None:
        super().__init__(optimizer)
        self._unit_of = {id(piece): unit for unit in units for piece in unit}
        self._scratch = scratch
        self._control = control
        self._homes: dict[tuple[str, torch.dtype], dict[int, Tensor]] = {}
        self._taken: set[int] = set()

    @property
    @override
    def place(self) -> str:
        is_memory = self._scratch.is_memory
        cure = ". That folder is memory itself: name one on a disk as offload_path"
        return f"files in {self._scratch.folder!r}{cure if is_memory else ''}"

    @override
    def require_room(self, find_piece: FindPiece) -> None:
        nbytes = 0
        for group in self._optimizer.param_groups:
            found = [find_piece(p) for p in group["params"] if not isinstance(p, Piece)]
            new = [piece for piece in found if piece is not None and piece.requires_grad]
            for dtype in {piece.dtype for piece in new}:
                per_element = state_bytes(self._optimizer, group, dtype).per_element
                nbytes += per_element * sum(p.numel() for p in new if p.dtype is dtype)
        name = type(self._optimizer).__name__
        self._scratch.require(nbytes, self._control, f"the states of {name}")

    @override
    def take(self, pieces: Iterable[Piece]) -> None:
        self._taken.update(map(id, pieces))

    @override
    def _rest(self, key: str, value: Any, piece: Piece) -> Any:
        is_in_file = _is_in_files(key, value, piece)
        return self._in_file(key, value, piece) if is_in_file else super()._rest(key, value, piece)

    @override
    def keep(self, members: Iterable[Parameter]) -> None:
        state = self._optimizer.state
        for piece in members:
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
            for one in self._unit_of[id(piece)]
            if id(one) in self._taken and id(one) not in homes and one.dtype is piece.dtype
        ]
        new = [one for one in peers if one is piece or (one.requires_grad and one.numel())]
        sizes = [one.numel() for one in new]
        with lasting_tensors():
            parts = torch.split(self._scratch.tensor(sum(sizes), dtype), sizes)
        homes.update((id(one), part) for one, part in zip(new, parts, strict=True))


def _is_in_files(key: str, value: Any, piece: Piece) -> bool:
    """Return whether an entry of a piece's state has one number for each element."""
    return (
        isinstance(value, Tensor)
        and value.shape == piece.shape
        and key != "step"
        and value.numel() > 0
    )
