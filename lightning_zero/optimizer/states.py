"""Where the states of an optimizer rest that is stepped batch by batch: in memory, or in files.

An entry of a piece's state goes to files if it has a number for each element. Everything else, as
counts of steps, stays in memory. Between steps such an entry is mapped; in the step of its batch it
is a view of staging memory, where it was read to and from where it is written back.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.comm import Communicator, Scratch, StagedFile, in_pages
from lightning_zero.optimizer.batches import Part
from lightning_zero.optimizer.pieces import FindPiece, state_bytes
from lightning_zero.optimizer.staging import Block, Slot, Staging
from lightning_zero.parameters import Piece
from lightning_zero.tensors import lasting_tensors, span


class States:
    """The states of an optimizer in host memory, where it makes them.

    Args:
        optimizer: The user's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # Not the optimizer itself, which would live as long as what is known of it by weak keys.
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Optimizer:
        """The user's."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    @property
    def place(self) -> str:
        """Where they rest, for people."""
        return "host memory"

    def require_room(self, find_piece: FindPiece) -> None:
        """Raise on all ranks unless there is room for the states of new members of the groups."""

    def take(self, pieces: Iterable[Piece]) -> None:
        """Note the pieces that the optimizer holds."""

    def kept(self, state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
        """Return a piece's state in memory of its own, where states rest.

        Numbers of elements have the piece's dtype, as torch gives it to those that are loaded.
        """
        return {
            key: self._rest(key, _as_loaded(key, value, piece), piece)
            for key, value in state.items()
        }

    def _rest(self, key: str, value: Any, piece: Piece) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    def open(self, numbers: Sequence[int]) -> None:
        """Begin a step of the batches of these numbers, in this order."""

    def fetch(self, number: int) -> None:
        """Let the optimizer find the states of a batch, the next of the step."""

    def flush(self, number: int) -> None:
        """Let the states of a batch rest, which was fetched and stepped."""

    def close(self) -> None:
        """End a step, also one that failed: all states rest."""


class _Place(NamedTuple):
    """The place of a part's numbers in a block."""

    block: Block
    offset: int
    numel: int


class _Home(NamedTuple):
    """The place of an entry of a piece's state in a file: one after the other those of its parts.

    Attributes:
        places: Those of the parts, by the number of their batch.
    """

    file: StagedFile
    start: int
    numel: int
    dtype: torch.dtype
    places: dict[int, _Place]

    def mapped(self) -> Tensor:
        """Return a new view of it: whoever has an earlier one may have pointed it elsewhere."""
        with lasting_tensors():
            content = self.file.mapped[self.start : self.start + self.numel * self.dtype.itemsize]
            return content.view(self.dtype)

    def staged(self, slot: Slot, number: int) -> Tensor | None:
        """Return a view of the part in a batch, if it is in a slot."""
        block, offset, numel = self.places[number]
        if block not in slot.places:
            return None
        return slot.view(block, offset, numel, self.dtype)

    def is_shown_by(self, value: Tensor) -> bool:
        """Return whether ``value`` is a view of it."""
        return value.data_ptr() == self.file.mapped[self.start :].data_ptr()


class StateFiles(States):
    """The states of an optimizer in files.

    Args:
        optimizer: The user's.
        batches: The parts of pieces that are stepped together.
        scratch: Where the files are.
        comm: The ranks.

    Attributes:
        label: The optimizer's name, in a profile.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        batches: Sequence[Sequence[Part[Piece]]],
        scratch: Scratch,
        comm: Communicator,
    ) -> None:
        super().__init__(optimizer)
        self._batches = batches
        self._in_batches = {id(part.piece) for batch in batches for part in batch}
        self._scratch = scratch
        self._comm = comm
        self.label = type(optimizer).__name__
        self._homes: dict[tuple[str, torch.dtype], dict[int, _Home]] = {}
        self._taken: set[int] = set()
        self._staging = Staging(comm.transport.ledger)
        self._fetched: tuple[int, Slot] | None = None
        self._lent: tuple[Part[Piece], Parameter] | None = None

    @property
    @override
    def place(self) -> str:
        is_memory = self._scratch.is_memory
        cure = ". That folder is memory itself: name one on a disk as offload_path"
        return f"files in {self._scratch.folder!r}{cure if is_memory else ''}"

    @override
    def require_room(self, find_piece: FindPiece) -> None:
        nbytes = 0
        for group in self.optimizer.param_groups:
            found = [find_piece(p) for p in group["params"] if not isinstance(p, Piece)]
            new = {id(piece) for piece in found if piece is not None and piece.requires_grad}
            sizes: Counter[tuple[torch.dtype, int]] = Counter()
            for number, batch in enumerate(self._batches):
                for part in batch:
                    if id(part.piece) in new:
                        sizes[part.piece.dtype, number] += part.nbytes
            for dtype in {dtype for dtype, _ in sizes}:
                num_entries = state_bytes(self.optimizer, group, dtype).num_entries(dtype)
                pages = sum(in_pages(size) for (kind, _), size in sizes.items() if kind is dtype)
                nbytes += num_entries * pages
        self._scratch.require(nbytes, self._comm.control, f"the states of {self.label}")

    @override
    def take(self, pieces: Iterable[Piece]) -> None:
        self._taken.update(map(id, pieces))

    @override
    @torch.no_grad()
    def _rest(self, key: str, value: Any, piece: Piece) -> Any:
        if not is_of_elements(key, value, piece) or id(piece) not in self._in_batches:
            return super()._rest(key, value, piece)
        home = self._home_of(key, value.dtype, piece)
        return value if home.is_shown_by(value) else home.mapped().copy_(value)

    def _home_of(self, key: str, dtype: torch.dtype, piece: Piece) -> _Home:
        """Return the home of an entry, which is made if there is none."""
        homes = self._homes.setdefault((key, dtype), {})
        if id(piece) not in homes:
            self._make_homes(homes, dtype, piece)
        return homes[id(piece)]

    def _make_homes(self, homes: dict[int, _Home], dtype: torch.dtype, piece: Piece) -> None:
        """Make a file for an entry of the states of a piece, and of all others that may have it."""

        def may_have(one: Piece) -> bool:
            return one is piece or (
                id(one) in self._taken
                and id(one) not in homes
                and one.dtype is piece.dtype
                # Who is frozen has states seldom, but then all others may too.
                and (one.requires_grad or not piece.requires_grad)
                and one.numel() > 0
            )

        new = [[part for part in batch if may_have(part.piece)] for batch in self._batches]
        ratio = dtype.itemsize / piece.dtype.itemsize
        sizes = [in_pages(int(ratio * sum(part.nbytes for part in batch))) for batch in new]
        file, start = StagedFile(self._scratch, sum(sizes)), 0
        for number, (batch, size) in enumerate(zip(new, sizes, strict=True)):
            block, offset = Block(file, start, size), 0
            for part in batch:
                one, numel = part.piece, part.nbytes // part.piece.dtype.itemsize
                home = _Home(file, start + offset, one.numel(), dtype, {})
                home = homes.setdefault(id(one), home)
                home.places[number] = _Place(block, offset, numel)
                offset += numel * dtype.itemsize
            start += size

    # -- a step ----------------------------------------------------------------------------------

    @override
    def open(self, numbers: Sequence[int]) -> None:
        batches = [self._blocks_in_use(number) for number in numbers]
        nbytes = sum(block.nbytes for batch in batches for block in batch)
        self._staging.open(batches)
        for verb in ("read", "write"):
            self._comm.transport.ledger.note("optimizer", verb, nbytes, 1)

    def _blocks_in_use(self, number: int) -> list[Block]:
        """Return where the states of a batch rest; those that were replaced lie nowhere else."""
        found: dict[Block, None] = {}
        for part, state in self._states(number):
            for key, value, home in self._in_files(state, part.piece):
                found[home.places[number].block] = None
                if not home.is_shown_by(value) and not part.start:
                    # It may show the home of another, which changes before its batch is stepped.
                    state[key] = value.clone()
        return [*found]

    @override
    @span("fetch")
    @torch.no_grad()
    def fetch(self, number: int) -> None:
        slot = self._staging.fetch()
        self._fetched = number, slot
        for part, state in self._states(number):
            if not part.is_cut:
                state.update(self._staged(number, slot, part, state))
        for part in self._batch(number):
            if part.is_cut:
                self._lend(number, slot, part)

    def _staged(
        self, number: int, slot: Slot, part: Part[Piece], state: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Return those entries of a part's state in staging memory that are to be there."""
        found = {}
        for key, value, home in self._in_files(state, part.piece):
            if (staged := home.staged(slot, number)) is not None:
                # Who has replaced it between steps has left the file behind.
                is_home = home.is_shown_by(value)
                found[key] = staged if is_home else staged.copy_(_cut(value, part))
        return found

    def _lend(self, number: int, slot: Slot, part: Part[Piece]) -> None:
        """Let the optimizer step a part in the place of the piece, with its gradient and state."""
        piece, states = part.piece, self.optimizer.state
        grad = piece.grad
        stand_in = Parameter(_cut(piece.detach(), part), requires_grad=False)
        for group in self.optimizer.param_groups:
            for index, member in enumerate(group["params"]):
                if member is piece:
                    group["params"][index] = stand_in
                    self._lent = part, stand_in
        if self._lent is None or grad is None:
            return
        stand_in.grad = _cut(grad, part)
        if piece not in states:
            return
        staged, lent = self._staged(number, slot, part, states[piece]), states[stand_in]
        for key, value in states[piece].items():
            if is_of_elements(key, value, piece):
                # What came into memory since the last step has no place in the slot.
                lent[key] = staged[key] if key in staged else _cut(value, part).clone()
            else:
                # Each part takes the same step: all but the last count for themselves.
                is_own = isinstance(value, Tensor) and not part.is_last
                lent[key] = value.clone() if is_own else value

    @override
    @span("flush")
    @torch.no_grad()
    def flush(self, number: int) -> None:
        assert self._fetched is not None
        _, slot = self._fetched
        self._take_back(number, slot)
        for part, state in self._states(number):
            if not part.is_cut:
                for key, value in self._of_elements(state, part.piece):
                    state[key] = self._kept_in_file(number, slot, part, key, value)
        self._fetched = None
        self._staging.flush(slot)

    def _kept_in_file(
        self, number: int, slot: Slot, part: Part[Piece], key: str, value: Tensor
    ) -> Tensor:
        """Keep an entry of a part's state; returns the view of the piece's in its file."""
        home = self._home_of(key, value.dtype, part.piece)
        staged = home.staged(slot, number)
        if staged is None:  # it is new
            _cut(home.mapped(), part).copy_(value)
        elif value.data_ptr() != staged.data_ptr():
            staged.copy_(value)
        return home.mapped()

    def _take_back(self, number: int, slot: Slot) -> None:
        """Keep the state of a part that was lent; of the last one, what is the piece's."""
        if self._lent is None:
            return
        (part, stand_in), self._lent = self._lent, None
        state = self.optimizer.state.pop(stand_in, {})
        for key, value in self._of_elements(state, stand_in):
            state[key] = self._kept_in_file(number, slot, part, key, value)
        if state and part.is_last:
            own = self.optimizer.state[part.piece]
            own.clear()
            own.update(state)

    def _batch(self, number: int) -> Sequence[Part[Piece]]:
        """Return the parts in a batch; what is in none has one without."""
        return self._batches[number] if number >= 0 else ()

    def _states(self, number: int) -> Iterator[tuple[Part[Piece], dict[str, Any]]]:
        """Yield the states of a batch's pieces."""
        states = self.optimizer.state
        for part in self._batch(number):
            if part.piece in states:
                yield part, states[part.piece]

    def _of_elements(
        self, state: Mapping[str, Any], piece: Parameter
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the entries of a state that rest in files."""
        for key, value in [*state.items()]:
            if is_of_elements(key, value, piece):
                yield key, value

    def _in_files(
        self, state: Mapping[str, Any], piece: Piece
    ) -> Iterator[tuple[str, Tensor, _Home]]:
        """Yield the entries of a state that have a home."""
        for key, value in self._of_elements(state, piece):
            home = self._homes.get((key, value.dtype), {}).get(id(piece))
            if home is not None:
                yield key, value, home

    @override
    def close(self) -> None:
        if self._lent is not None:  # of a step that failed
            self.optimizer.state.pop(self._lent[1], None)
            self._lent = None
        if self._fetched is not None:
            number, slot = self._fetched
            self._fetched = None
            for part, state in self._states(number):
                for key, _, home in self._in_files(state, part.piece):
                    if not part.is_cut and home.staged(slot, number) is not None:
                        state[key] = home.mapped()
        self._staging.close()


def _cut(values: Tensor, part: Part[Piece]) -> Tensor:
    """Return the values of a part among those of its piece."""
    itemsize = part.piece.dtype.itemsize
    return values[part.start // itemsize : part.stop // itemsize]


def _as_loaded(key: str, value: Any, piece: Piece) -> Any:
    is_cast = is_of_elements(key, value, piece) and piece.is_floating_point()
    return value.to(piece.dtype) if is_cast and value.is_floating_point() else value


def is_of_elements(key: str, value: Any, piece: Tensor) -> bool:
    """Return whether an entry of a piece's state has one number for each element."""
    return (
        isinstance(value, Tensor)
        and value.shape == piece.shape
        and key != "step"
        and value.numel() > 0
    )
