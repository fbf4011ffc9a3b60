"""Where the states of an optimizer that is stepped batch by batch rest: in memory or in files.

An entry of a piece's state goes to files if it has a number per element, also within a list or
dictionary. Everything else, such as step counts, stays in memory. An entry of elements is

=======  ===================================================  ====================================
at rest  a view of its place in a mapped file                 between steps
staged   a view of memory to which a block was read           while its batch is stepped
new      a tensor of whoever made it: an optimizer in its     until the batch is flushed, or the
         step, or a user between steps                        next step opens
=======  ===================================================  ====================================

The address of its memory tells at rest from new: ``.data`` may put other memory into a tensor.

If only a part of a piece is in the batch, a stand-in is stepped in its place, with views of the
piece's values and gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.comm import Communicator, require_room
from lightning_zero.optimizer.file_places import FilePlace, FilePlaces, Part, cut
from lightning_zero.optimizer.pieces import FindPiece, is_of_elements, with_entries
from lightning_zero.optimizer.shared_state import OfOptimizer
from lightning_zero.optimizer.staging import Staging
from lightning_zero.optimizer.toys import state_bytes
from lightning_zero.parameters import Piece
from lightning_zero.tensors import Scratch, span

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


class StateFiles(States):
    """The states of an optimizer in files of a scratch folder, stepped batch by batch.

    Attributes:
        label: The optimizer's name, in profiles and errors.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        batches: Sequence[Sequence[Part]],
        scratch: Scratch,
        comm: Communicator,
    ) -> None:
        super().__init__(optimizer)
        self._places = FilePlaces(batches, scratch)
        self._scratch, self._comm = scratch, comm
        self.label = type(optimizer).__name__
        self._staging = Staging(comm.transport.ledger)
        # For each part of the fetched batch, what is stepped and the piece's state before.
        self._lent: list[tuple[Part, Parameter, dict[str, Any]]] = []

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
            new = [piece for piece in new if id(piece) in self._places.pieces]
            for dtype in {piece.dtype for piece in new}:
                num_entries = state_bytes(self.optimizer, group, dtype).num_entries(dtype)
                of_dtype = (piece for piece in new if piece.dtype is dtype)
                nbytes += num_entries * self._places.nbytes(of_dtype)
        require_room(self._scratch, nbytes, self._comm.control, f"the states of {self.label}")

    @override
    def take(self, pieces: Iterable[Piece]) -> None:
        self._places.take(pieces)

    @override
    @torch.no_grad()
    def _rest(self, key: str, value: Any, piece: Piece) -> Any:
        if not is_of_elements(key, value, piece) or id(piece) not in self._places.pieces:
            return super()._rest(key, value, piece)
        place = self._places.of(key, value.dtype, piece)
        return value if place.holds(value) else place.mapped().copy_(value)

    # -- a step ----------------------------------------------------------------------------------

    @override
    @torch.no_grad()
    def open(self, numbers: Sequence[int]) -> None:
        places = self._bring_to_rest()
        batches = [
            [
                *{
                    place.blocks[part.start]: None
                    for part in parts
                    for place in places[id(part.piece)]
                }
            ]
            for parts in (self._places.batches.get(number, ()) for number in numbers)
        ]
        nbytes = sum(block.nbytes for batch in batches for block in batch)
        self._staging.open(batches, [self._masters_of(number) for number in numbers])
        for verb in ("read", "write"):
            self._comm.transport.ledger.note("optimizer", verb, nbytes, 1)

    def _bring_to_rest(self) -> dict[int, list[FilePlace]]:
        """Move entries that were added or replaced since the last step to their places.

        Returns:
            The places of each piece's entries, by the piece's id.
        """
        pieces, states = self._places.pieces, self.optimizer.state
        places: dict[int, list[FilePlace]] = {key: [] for key in pieces}
        moved: list[tuple[Tensor, Tensor]] = []

        def at_rest(piece: Piece, key: str, value: Any) -> Any:
            if not is_of_elements(key, value, piece):
                return value
            place = self._places.of(key, value.dtype, piece)
            places[id(piece)].append(place)
            if place.holds(value):
                return value
            # It may be a view of another entry's place, which is written to as well.
            is_in_file = value.untyped_storage().is_shared()
            moved.append((place.mapped(), value.clone() if is_in_file else value))
            return moved[-1][0]

        before = [states.get(piece, {}) for piece in pieces.values()]
        after = [
            with_entries(state, partial(at_rest, piece))
            for state, piece in zip(before, pieces.values(), strict=True)
        ]
        for mapped, value in moved:
            mapped.copy_(value)
        for state, new in zip(before, after, strict=True):
            state.update(new)
        return places

    def _masters_of(self, number: int) -> list[Tensor]:
        """Return the values of a batch that its step changes, which may be in mapped files."""
        parts, states = self._places.batches.get(number, ()), self.optimizer.state
        return [cut(part.piece.detach(), part) for part in parts if part.piece in states]

    @override
    @span("fetch")
    @torch.no_grad()
    def fetch(self, number: int, groups: ParamGroups) -> None:
        self._staging.fetch()
        parts = {id(part.piece): part for part in self._places.batches.get(number, ())}
        for group in groups:
            members = group["params"]
            for index, member in enumerate(members):
                if id(member) in parts:
                    members[index] = self._lend(parts[id(member)])

    def _lend(self, part: Part) -> Parameter:
        """Return the parameter to step for a part, with its gradient and state.

        The state of a cut piece does not change until its last part has been stepped.
        """
        piece, states = part.piece, self.optimizer.state
        own = states.get(piece, {})
        stand_in: Parameter = piece
        if part.is_cut:
            stand_in = Parameter(cut(piece.detach(), part), requires_grad=False)
            grad = piece.grad
            stand_in.grad = None if grad is None else cut(grad, part)
        self._lent.append((part, stand_in, {**own}))
        if piece in states:
            lent = with_entries(own, partial(self._lent_entry, part))
            (states[stand_in] if part.is_cut else own).update(lent)
        return stand_in

    def _lent_entry(self, part: Part, key: str, value: Any) -> Any:
        """Return what a part is stepped with as an entry of its state."""
        if not is_of_elements(key, value, part.piece):
            # All parts take the same step: all but the last count it in copies.
            is_own = isinstance(value, Tensor) and not part.is_last
            return value.clone() if is_own else value
        place = self._places.of(key, value.dtype, part.piece)
        staged = place.staged(self._staging.fetched, part)
        assert staged is not None
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
        if not self._lent:
            self._bring_to_rest()  # what was stepped in place
        self._lent = []
        self._staging.flush()

    def _kept_in_file(self, part: Part, stand_in: Parameter, key: str, value: Any) -> Any:
        """Keep an entry of a part's state; return the piece's, in its file if it goes there."""
        if not is_of_elements(key, value, stand_in):
            return value
        place = self._places.of(key, value.dtype, part.piece)
        staged = place.staged(self._staging.fetched, part)
        if staged is None:  # it is new
            cut(place.mapped(), part).copy_(value)
        elif value.data_ptr() != staged.data_ptr():
            staged.copy_(value)
        return place.mapped()

    @override
    def close(self) -> None:
        for part, stand_in, before in self._lent:  # left by a step that failed
            self.optimizer.state.pop(stand_in, None)
            if before and not part.is_cut:
                self.optimizer.state[part.piece] = before
        self._lent = []
        self._staging.close()


def _as_loaded(key: str, value: Any, piece: Piece) -> Any:
    is_cast = is_of_elements(key, value, piece) and piece.is_floating_point()
    return value.to(piece.dtype) if is_cast and value.is_floating_point() else value
