"""Where the states of an optimizer rest that is stepped batch by batch: in memory, or in files.

An entry of a piece's state goes to files if it has a number for each element. Everything else, as
counts of steps, stays in memory. Between steps such an entry is mapped; in the step of its batch it
is a view of staging memory, where it was read to and from where it is written back.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.comm import Communicator, Scratch, StagedFile, in_pages
from lightning_zero.optimizer.pieces import FindPiece, state_bytes
from lightning_zero.optimizer.staging import Block, Slot, Staging
from lightning_zero.parameters import Piece
from lightning_zero.tensors import lasting_tensors, span

_BATCH_BYTES = 32 * 2**20
"""From so many bytes of pieces on a batch is large enough for the disk to run at its speed."""


class HasBytes(Protocol):
    """A piece, or what stands for one."""

    @property
    def nbytes(self) -> int:
        """Its size."""


Sized = TypeVar("Sized", bound=HasBytes)


def batches_of(units: Iterable[Sequence[Sized]]) -> list[list[Sized]]:
    """Return the pieces of units in batches that are stepped together; large units in several."""
    batches: list[list[Sized]] = []
    for unit in units:
        nbytes = _BATCH_BYTES
        for piece in unit:
            if nbytes >= _BATCH_BYTES:
                batches.append([])
                nbytes = 0
            batches[-1].append(piece)
            nbytes += piece.nbytes
    return batches


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


class _Home(NamedTuple):
    """The place of an entry of a piece's state in a file."""

    block: Block
    offset: int
    numel: int
    dtype: torch.dtype

    def mapped(self) -> Tensor:
        """Return a new view of it: whoever has an earlier one may have pointed it elsewhere."""
        start = self.block.start + self.offset
        with lasting_tensors():
            content = self.block.file.mapped[start : start + self.numel * self.dtype.itemsize]
            return content.view(self.dtype)

    def staged(self, slot: Slot) -> Tensor | None:
        """Return a view of it in a slot, if it is there."""
        if self.block not in slot.places:
            return None
        return slot.view(self.block, self.offset, self.numel, self.dtype)

    def is_shown_by(self, value: Tensor) -> bool:
        """Return whether ``value`` is a view of it."""
        return (
            value.data_ptr() == self.block.file.mapped[self.block.start :].data_ptr() + self.offset
        )


class StateFiles(States):
    """The states of an optimizer in files.

    Args:
        optimizer: The user's.
        batches: The pieces that are stepped together.
        scratch: Where the files are.
        comm: The ranks.

    Attributes:
        label: The optimizer's name, in a profile.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        batches: Sequence[Sequence[Piece]],
        scratch: Scratch,
        comm: Communicator,
    ) -> None:
        super().__init__(optimizer)
        self._batches = batches
        self._number = {id(piece): n for n, batch in enumerate(batches) for piece in batch}
        self._scratch = scratch
        self._comm = comm
        self.label = type(optimizer).__name__
        self._homes: dict[tuple[str, torch.dtype], dict[int, _Home]] = {}
        self._taken: set[int] = set()
        self._staging = Staging(comm.transport.ledger)
        self._fetched: tuple[int, Slot] | None = None

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
            sizes: Counter[tuple[torch.dtype, int]] = Counter()
            for piece in found:
                if piece is not None and piece.requires_grad and id(piece) in self._number:
                    sizes[piece.dtype, self._number[id(piece)]] += piece.nbytes
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
        if not is_of_elements(key, value, piece) or id(piece) not in self._number:
            return super()._rest(key, value, piece)
        homes = self._homes.setdefault((key, value.dtype), {})
        if id(piece) not in homes:
            self._make_homes(homes, value.dtype, piece)
        home = homes[id(piece)]
        return value if home.is_shown_by(value) else home.mapped().copy_(value)

    def _home(self, key: str, value: Tensor, piece: Piece) -> _Home | None:
        """Return the home of an entry, if it has one."""
        return self._homes.get((key, value.dtype), {}).get(id(piece))

    def _make_homes(self, homes: dict[int, _Home], dtype: torch.dtype, piece: Piece) -> None:
        """Make a file for an entry of the states of a piece, and of all others that may have it."""
        new = [
            [
                one
                for one in batch
                if one is piece
                or (
                    id(one) in self._taken
                    and id(one) not in homes
                    and one.dtype is piece.dtype
                    # Who is frozen has states seldom, but then all others may too.
                    and (one.requires_grad or not piece.requires_grad)
                    and one.numel()
                )
            ]
            for batch in self._batches
        ]
        sizes = [in_pages(sum(one.numel() for one in batch) * dtype.itemsize) for batch in new]
        file, start = StagedFile(self._scratch, sum(sizes)), 0
        for batch, size in zip(new, sizes, strict=True):
            if not batch:
                continue
            block, offset = Block(file, start, size), 0
            for one in batch:
                homes[id(one)] = _Home(block, offset, one.numel(), dtype)
                offset += one.numel() * dtype.itemsize
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
        for state, key, value, piece in self._entries(number):
            home = self._home(key, value, piece)
            if home is None:
                continue
            found[home.block] = None
            if not home.is_shown_by(value):
                # It may show the home of another, which changes before its batch is stepped.
                state[key] = value.clone()
        return [*found]

    @override
    @span("fetch")
    @torch.no_grad()
    def fetch(self, number: int) -> None:
        slot = self._staging.fetch()
        self._fetched = number, slot
        for state, key, value, piece in self._entries(number):
            home = self._home(key, value, piece)
            if home is not None and (staged := home.staged(slot)) is not None:
                # Who has replaced it between steps has left the file behind.
                state[key] = staged if home.is_shown_by(value) else staged.copy_(value)

    @override
    @span("flush")
    @torch.no_grad()
    def flush(self, number: int) -> None:
        assert self._fetched is not None
        _, slot = self._fetched
        for state, key, value, piece in self._entries(number):
            home = self._home(key, value, piece)
            if home is None or (staged := home.staged(slot)) is None:
                state[key] = self._rest(key, value, piece)  # it is new
                continue
            if value.data_ptr() != staged.data_ptr():
                staged.copy_(value)
            state[key] = home.mapped()
        self._fetched = None
        self._staging.flush(slot)

    def _entries(self, number: int) -> Iterator[tuple[dict[str, Any], str, Tensor, Piece]]:
        """Yield the entries of a batch's states that rest in files."""
        states = self.optimizer.state
        for piece in self._batches[number] if number >= 0 else ():
            if piece in states:
                state = states[piece]
                for key, value in [*state.items()]:
                    if is_of_elements(key, value, piece):
                        yield state, key, value, piece

    @override
    def close(self) -> None:
        if self._fetched is not None:
            number, slot = self._fetched
            self._fetched = None
            for state, key, value, piece in self._entries(number):
                home = self._home(key, value, piece)
                if home is not None and home.staged(slot) is not None:
                    state[key] = home.mapped()
        self._staging.close()


def _as_loaded(key: str, value: Any, piece: Piece) -> Any:
    is_cast = is_of_elements(key, value, piece) and piece.is_floating_point()
    return value.to(piece.dtype) if is_cast and value.is_floating_point() else value


def is_of_elements(key: str, value: Any, piece: Piece) -> bool:
    """Return whether an entry of a piece's state has one number for each element."""
    return (
        isinstance(value, Tensor)
        and value.shape == piece.shape
        and key != "step"
        and value.numel() > 0
    )
