"""Where the states of an optimizer that is stepped batch by batch rest: in memory or in files.

An entry of a piece's state goes to files if it has a number per element, also within a list or
dictionary. Everything else, such as step counts, stays in memory. Between steps, entries in files
are memory-mapped. While a batch is stepped they are views of staging memory, which they were read
to and are written back from. If only a part of a piece is in the batch, a stand-in is stepped in
its place, with views of the piece's values and gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.comm import Communicator, require_room
from lightning_zero.optimizer.pieces import FindPiece, is_of_elements, with_entries
from lightning_zero.optimizer.shared_state import OfOptimizer
from lightning_zero.optimizer.staging import Block, Part, Slot, Staging
from lightning_zero.optimizer.toys import state_bytes
from lightning_zero.parameters import Piece
from lightning_zero.tensors import Scratch, StagedFile, in_pages, lasting_tensors, span

ParamGroups = list[dict[str, Any]]
"""The param groups of an optimizer, or of a stand-in of it."""


class States(OfOptimizer):
    """The states of an optimizer, left in host memory where it makes them."""

    @property
    def place(self) -> str:
        """The place where states rest, in words."""
        return "host memory"

    def require_room(self, find_piece: FindPiece) -> None:
        """Raise on all ranks if there is no room for the states of new param group members."""

    def take(self, pieces: Iterable[Piece]) -> None:
        """Note the pieces that the optimizer holds."""

    def stepped_as(self, piece: Piece) -> Tensor:
        """Return a tensor with the dtype and on the device in which a piece is stepped."""
        return piece

    def kept(self, state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
        """Return a copy of a piece's state where states rest.

        Entries with a number per element get the piece's dtype, as torch loads them.
        """
        return with_entries(
            state, lambda key, value: self._rest(key, _as_loaded(key, value, piece), piece)
        )

    def _rest(self, key: str, value: Any, piece: Piece) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    def open(self, numbers: Sequence[int]) -> None:
        """Begin a step of the batches with these numbers, in this order."""

    def fetch(self, number: int, groups: ParamGroups) -> None:
        """Bring the states of a step's next batch to its members, or stand-ins, in ``groups``."""

    def flush(self) -> None:
        """Bring the states of the fetched batch back to rest, after its step."""

    def close(self) -> None:
        """End a step, even a failed one: bring all states to rest."""


class _Home(NamedTuple):
    """The place of an entry of a piece's state in a file, its parts one after the other.

    Attributes:
        blocks: The block read and written with each part, by the part's first byte in the piece.
    """

    file: StagedFile
    start: int
    numel: int
    dtype: torch.dtype
    blocks: dict[int, Block]

    def mapped(self) -> Tensor:
        """Return a new view of the entry: users may have made an earlier one point elsewhere."""
        with lasting_tensors():
            content = self.file.mapped[self.start : self.start + self.numel * self.dtype.itemsize]
            return content.view(self.dtype)

    def staged(self, slot: Slot, part: Part[Piece]) -> Tensor | None:
        """Return the view of a part in ``slot``, if it is there."""
        block = self.blocks[part.start]
        if block not in slot.places:
            return None
        first, last = _range(part)
        start = self.start + first * self.dtype.itemsize
        return slot.view(block, start - block.start, last - first, self.dtype)

    def is_shown_by(self, value: Tensor) -> bool:
        """Return whether ``value`` is a view of this place."""
        return value.data_ptr() == self.file.mapped[self.start :].data_ptr()


class StateFiles(States):
    """The states of an optimizer in files of a scratch folder, stepped batch by batch.

    Attributes:
        label: The optimizer's name, in profiles and errors.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        batches: Sequence[Sequence[Part[Piece]]],
        scratch: Scratch,
        comm: Communicator,
    ) -> None:
        super().__init__(optimizer)
        # By number. Members in no batch have a number that is not here.
        self._batches = dict(enumerate(batches))
        self._pieces = {id(part.piece): part.piece for batch in batches for part in batch}
        self._scratch = scratch
        self._comm = comm
        self.label = type(optimizer).__name__
        self._homes: dict[tuple[str, torch.dtype], dict[int, _Home]] = {}
        self._taken: set[int] = set()
        self._staging = Staging(comm.transport.ledger)
        # For each part of the fetched batch, what is stepped and the piece's state before.
        self._lent: list[tuple[Part[Piece], Parameter, dict[str, Any]]] = []

    @property
    @override
    def place(self) -> str:
        is_memory = self._scratch.is_memory
        cure = " (this folder is in memory; set offload_path to a folder on a disk)"
        return f"files in {self._scratch.folder!r}{cure if is_memory else ''}"

    @override
    def require_room(self, find_piece: FindPiece) -> None:
        nbytes = 0
        for group in self.optimizer.param_groups:
            found = [find_piece(p) for p in group["params"] if not isinstance(p, Piece)]
            new = [piece for piece in found if piece is not None and piece.requires_grad]
            for dtype in {piece.dtype for piece in new if id(piece) in self._pieces}:
                num_entries = state_bytes(self.optimizer, group, dtype).num_entries(dtype)
                parts = self._parts_of({id(piece) for piece in new if piece.dtype is dtype})
                nbytes += num_entries * sum(map(_bytes_in_file, parts))
        require_room(self._scratch, nbytes, self._comm.control, f"the states of {self.label}")

    @override
    def take(self, pieces: Iterable[Piece]) -> None:
        self._taken.update(id(piece) for piece in pieces if id(piece) in self._pieces)

    def _parts_of(self, pieces: set[int]) -> list[list[Part[Piece]]]:
        """Return the parts in each batch of pieces, given by id."""
        batches = self._batches.values()
        return [[part for part in batch if id(part.piece) in pieces] for batch in batches]

    @override
    @torch.no_grad()
    def _rest(self, key: str, value: Any, piece: Piece) -> Any:
        if not is_of_elements(key, value, piece) or id(piece) not in self._pieces:
            return super()._rest(key, value, piece)
        home = self._home_of(key, value.dtype, piece)
        return value if home.is_shown_by(value) else home.mapped().copy_(value)

    def _home_of(self, key: str, dtype: torch.dtype, piece: Piece) -> _Home:
        """Return the home of an entry; make it if there is none."""
        homes = self._homes.setdefault((key, dtype), {})
        if id(piece) not in homes:
            self._make_homes(homes, dtype, piece)
        return homes[id(piece)]

    def _make_homes(self, homes: dict[int, _Home], dtype: torch.dtype, piece: Piece) -> None:
        """Make a file for an entry of the states of a piece and all others that may have it."""

        def may_have(one: Piece) -> bool:
            # Frozen pieces rarely have states, but if this one has, all others may.
            is_alike = one.requires_grad or not piece.requires_grad
            return is_alike and one.dtype is piece.dtype and one.numel() > 0

        others = (key for key in self._taken - homes.keys() if may_have(self._pieces[key]))
        new = self._parts_of({id(piece), *others})
        ratio = dtype.itemsize / piece.dtype.itemsize
        sizes = [_bytes_in_file(parts, ratio) for parts in new]
        file, start = StagedFile(self._scratch, sum(sizes)), 0
        for parts, size in zip(new, sizes, strict=True):
            block, offset = Block(file, start, size), 0
            for part in parts:
                home = _Home(file, start + offset, part.piece.numel(), dtype, {})
                homes.setdefault(id(part.piece), home).blocks[part.start] = block
                offset += int(ratio * part.nbytes)
            start += size

    # -- a step ----------------------------------------------------------------------------------

    @override
    @torch.no_grad()
    def open(self, numbers: Sequence[int]) -> None:
        self._bring_home()
        batches = [self._blocks_in_use(number) for number in numbers]
        nbytes = sum(block.nbytes for batch in batches for block in batch)
        self._staging.open(batches, [self._masters_of(number) for number in numbers])
        for verb in ("read", "write"):
            self._comm.transport.ledger.note("optimizer", verb, nbytes, 1)

    def _bring_home(self) -> None:
        """Move entries that were added or replaced since the last step to their homes."""
        moved: list[tuple[Tensor, Tensor]] = []
        states = [self.optimizer.state.get(piece, {}) for piece in self._pieces.values()]
        at_home = [
            with_entries(state, partial(self._brought_home, piece, moved))
            for state, piece in zip(states, self._pieces.values(), strict=True)
        ]
        for home, value in moved:
            home.copy_(value)
        for state, new in zip(states, at_home, strict=True):
            state.update(new)

    def _brought_home(
        self, piece: Piece, moved: list[tuple[Tensor, Tensor]], key: str, value: Any
    ) -> Any:
        """Return an entry as it rests, and add what has to be copied there to ``moved``."""
        if not is_of_elements(key, value, piece):
            return value
        home = self._home_of(key, value.dtype, piece)
        if home.is_shown_by(value):
            return value
        # It may be a view of another entry's home, which is written to as well.
        is_in_file = value.untyped_storage().is_shared()
        moved.append((home.mapped(), value.clone() if is_in_file else value))
        return moved[-1][0]

    def _entries_of(self, piece: Piece) -> list[tuple[str, Tensor]]:
        """Return the entries of a piece's state that rest in files between steps."""
        found: list[tuple[str, Tensor]] = []

        def note(key: str, value: Any) -> None:
            if is_of_elements(key, value, piece):
                found.append((key, value))

        with_entries(self.optimizer.state.get(piece, {}), note)
        return found

    def _blocks_in_use(self, number: int) -> list[Block]:
        """Return the blocks in which the states of a batch rest."""
        found = {
            self._home_of(key, value.dtype, part.piece).blocks[part.start]: None
            for part in self._batches.get(number, ())
            for key, value in self._entries_of(part.piece)
        }
        return [*found]

    def _masters_of(self, number: int) -> list[Tensor]:
        """Return the values of a batch that its step changes, which may be in mapped files."""
        parts, states = self._batches.get(number, ()), self.optimizer.state
        return [_cut(part.piece.detach(), part) for part in parts if part.piece in states]

    @override
    @span("fetch")
    @torch.no_grad()
    def fetch(self, number: int, groups: ParamGroups) -> None:
        self._staging.fetch()
        parts = {id(part.piece): part for part in self._batches.get(number, ())}
        for group in groups:
            members = group["params"]
            for index, member in enumerate(members):
                if id(member) in parts:
                    members[index] = self._lend(parts[id(member)])

    def _lend(self, part: Part[Piece]) -> Parameter:
        """Return the parameter to step for a part, with its gradient and state.

        The state of a cut piece does not change until its last part has been stepped.
        """
        piece, states = part.piece, self.optimizer.state
        own = states.get(piece, {})
        stand_in: Parameter = piece
        if part.is_cut:
            stand_in = Parameter(_cut(piece.detach(), part), requires_grad=False)
            grad = piece.grad
            stand_in.grad = None if grad is None else _cut(grad, part)
        self._lent.append((part, stand_in, {**own}))
        if piece in states:
            lent = with_entries(own, partial(self._lent_entry, part))
            (states[stand_in] if part.is_cut else own).update(lent)
        return stand_in

    def _lent_entry(self, part: Part[Piece], key: str, value: Any) -> Any:
        """Return what a part is stepped with in place of an entry of its piece's state."""
        if not is_of_elements(key, value, part.piece):
            # All parts take the same step: all but the last count it in copies.
            is_own = isinstance(value, Tensor) and not part.is_last
            return value.clone() if is_own else value
        home = self._home_of(key, value.dtype, part.piece)
        staged = home.staged(self._staging.fetched, part)
        if staged is None or not home.is_shown_by(value):  # new in this step
            return _cut(value, part).clone()
        return staged

    @override
    @span("flush")
    @torch.no_grad()
    def flush(self) -> None:
        states = self.optimizer.state
        for part, stand_in, _ in self._lent:
            state = states.pop(stand_in, {}) if part.is_cut else states.get(stand_in, {})
            state.update(with_entries(state, partial(self._kept_in_file, part, stand_in)))
            if state and part.is_cut and part.is_last:
                states[part.piece].update(state)
        self._lent = []
        self._staging.flush()

    def _kept_in_file(self, part: Part[Piece], stand_in: Parameter, key: str, value: Any) -> Any:
        """Keep an entry of a part's state; return the piece's, in its file if it goes there."""
        if not is_of_elements(key, value, stand_in):
            return value
        home = self._home_of(key, value.dtype, part.piece)
        staged = home.staged(self._staging.fetched, part)
        if staged is None:  # it is new
            _cut(home.mapped(), part).copy_(value)
        elif value.data_ptr() != staged.data_ptr():
            staged.copy_(value)
        return home.mapped()

    @override
    def close(self) -> None:
        for part, stand_in, before in self._lent:  # left by a step that failed
            self.optimizer.state.pop(stand_in, None)
            if before and not part.is_cut:
                self.optimizer.state[part.piece] = before
        self._lent = []
        self._staging.close()


def _bytes_in_file(parts: Sequence[Part[Piece]], ratio: float = 1.0) -> int:
    """Return the bytes of an entry of ``parts`` with ``ratio`` times their size, in whole pages."""
    return in_pages(int(ratio * sum(part.nbytes for part in parts)))


def _cut(values: Tensor, part: Part[Piece]) -> Tensor:
    """Return a part's values, given those of its piece."""
    return values[slice(*_range(part))] if part.is_cut else values


def _range(part: Part[Piece]) -> tuple[int, int]:
    """Return a part's first element in its piece, and one past its last."""
    itemsize = part.piece.dtype.itemsize
    return part.start // itemsize, part.stop // itemsize


def _as_loaded(key: str, value: Any, piece: Piece) -> Any:
    is_cast = is_of_elements(key, value, piece) and piece.is_floating_point()
    return value.to(piece.dtype) if is_cast and value.is_floating_point() else value
