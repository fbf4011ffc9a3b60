"""What an optimizer shows between its steps: the module's parameters, and their whole states.

=============== ============================== ==================================================
                between steps                  in a step
=============== ============================== ==================================================
param groups    the module's own parameters    this rank's pieces, or whole parameters of a step
``state``       :class:`WholeStates`           :class:`Parts`: what this rank keeps, by piece
=============== ============================== ==================================================

So code between steps, which goes through groups and states, finds what it does under DDP.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.comm import Communicator, SyncPoint
from lightning_zero.optimizer.pieces import cut_state, owned, put_members, take_state
from lightning_zero.optimizer.shared_state import OfOptimizer, is_equal, with_inner
from lightning_zero.optimizer.whole_state import Keeper, gather_state
from lightning_zero.parameters import Piece


class Shown(OfOptimizer):
    """Switches an optimizer between what it shows and what it steps.

    Attributes:
        keeper: The optimizer's stepper.
        comm: The ranks; ``None`` when the run has ended.
        pieces: This rank's pieces by the id of their parameters, in the order of the groups.
        is_hidden: Whether the optimizer holds what it steps.
        is_lent: Whether :meth:`hidden` makes it do so, for code that wants this rank's parts.
    """

    def __init__(self, optimizer: Optimizer, keeper: Keeper, comm: Communicator) -> None:
        super().__init__(optimizer)
        self.keeper = keeper
        self.comm: Communicator | None = comm
        self.pieces: dict[int, Piece] = {}
        self.is_hidden = True
        self.is_lent = False
        self._parameters: dict[int, Parameter] = {}
        self._names: dict[int, str] = {}
        self._states: list[WholeStates] = []

    def add(self, pieces: Sequence[Piece]) -> None:
        """Show the parameters of pieces in their place from now on."""
        self.pieces.update((id(piece.parameter), piece) for piece in pieces)
        self._parameters.update((id(piece), piece.parameter) for piece in pieces)
        self._names.update((id(piece.parameter), piece.range.slot.name) for piece in pieces)

    def show(self) -> None:
        """Begin the time between steps."""
        if not self.is_hidden:
            return
        optimizer = self.optimizer
        put_members(optimizer, self._parameters)
        known = {id(states.parts): states for states in self._states}
        found: dict[int, WholeStates] = {}
        for holder in with_inner(optimizer):
            raw = holder.state
            if id(raw) not in found:  # torch makes new dictionaries when it loads states
                found[id(raw)] = known.get(id(raw), WholeStates(Parts.of(raw), self))
        for states in found.values():
            if isinstance(states.parts, Parts):
                states.parts.names = self._names
        self._put(found)
        self._states, self.is_hidden = [*found.values()], False

    def hide(self) -> None:
        """Begin a step: the states that users have changed become those of this rank's pieces."""
        if self.is_hidden:
            return
        optimizer = self.optimizer
        put_members(optimizer, self.pieces)
        self.is_hidden = True
        self._put({id(states): states.parts for states in self._states})
        for states in self._states:
            states.take_back()
        kept = [states.parts for states in self._states]
        if not all(any(holder.state is one for one in kept) for holder in with_inner(optimizer)):
            # The user has assigned a dictionary.
            replaced = {piece: piece.parameter for piece in self.pieces.values()}
            take_state(optimizer, replaced, self.keeper.part_of)

    def _put(self, new: Mapping[int, Any]) -> None:
        # A wrapper may share dictionaries, under any name.
        for holder in with_inner(self.optimizer):
            own = vars(holder)
            own.update({name: new[id(value)] for name, value in own.items() if id(value) in new})

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Enter a context in which the optimizer holds what it steps."""
        was_hidden, was_lent = self.is_hidden, self.is_lent
        self.hide()
        self.is_lent = True
        try:
            yield
        finally:
            self.is_lent = was_lent
            if not was_hidden:
                self.show()

    @contextmanager
    def showing_members(self) -> Iterator[None]:
        """Enter a context, within a step, in which the groups hold the module's parameters."""
        put_members(self.optimizer, self._parameters)
        try:
            yield
        finally:
            put_members(self.optimizer, self.pieces)

    @contextmanager
    def copied(self) -> Iterator[None]:
        """Enter a context in which states are whole copies, in plain dictionaries; a collective."""
        copies = {id(states): states.copied() for states in self._states}
        self._put(copies)
        try:
            yield
        finally:
            self._put({id(copies[id(states)]): states for states in self._states})

    def require_run(self) -> Communicator:
        """Return the ranks.

        Raises:
            RuntimeError: The run has ended.
        """
        if self.comm is None:
            raise RuntimeError(ENDED.format(kind=type(self.optimizer).__name__))
        return self.comm


ENDED = (
    "{kind} belongs to a run that has ended and holds only this rank's parts of its states. Return"
    " it from `configure_optimizers` to another run of the same ranks with the same settings, or"
    " return a new one and load the whole states from a checkpoint."
    " Otherwise use it in `on_train_end` or earlier."
)


class Parts(defaultdict[Any, Any]):
    """The states that this rank keeps, by piece; looking one up by a parameter raises.

    Otherwise the lookup would find nothing, and ``state[parameter]`` would make an empty state.

    Attributes:
        names: The names of the parameters that have pieces, by id; empty in a copy.
    """

    names: Mapping[int, str] = MappingProxyType({})

    @classmethod
    def of(cls, states: Any) -> Any:
        """Return an optimizer's states as this class, unless they are in one of its own."""
        return cls(states.default_factory, states) if type(states) is defaultdict else states

    def __missing__(self, key: Any) -> Any:
        self._refuse(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self._refuse(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of ``key``."""
        return super().get(key, default) if key in self else default

    def _refuse(self, key: object) -> bool:
        name = self.names.get(id(key))
        if name is None:
            return False
        raise RuntimeError(
            f"In a step, optimizer.state is keyed by this rank's piece of parameter {name!r}, not"
            " by the parameter. Look states up between steps, or by the members of the groups."
        )


class WholeStates(MutableMapping[Any, Any]):
    """An optimizer's states between steps: whole, by parameter; by piece, what this rank keeps.

    Looking a state up gathers it, so all ranks do so together. It is this rank's copy, whose
    changes become the optimizer's when the next step begins, or whatever else needs the states.
    Whoever keeps it longer keeps a copy of what it was.

    Attributes:
        parts: What the optimizer steps: what this rank keeps, by piece.
    """

    def __init__(self, parts: Any, shown: Shown) -> None:
        self.parts = parts
        self._shown = shown
        self._wholes: dict[int, tuple[Piece, Any]] = {}
        self._known: set[int] | None = None

    # -- lookups ---------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        piece = self._piece_of(key)
        if piece is None:
            return self.parts[key]
        if id(piece) not in self._wholes:
            self._sync()
            whole = self._gathered(piece)
            self._wholes[id(piece)] = piece, {} if whole is None else whole
        return self._wholes[id(piece)][1]

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of ``key`` if there is one."""
        return self[key] if key in self else default  # noqa: SIM401

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the state of ``key``, which is ``default`` if there was none."""
        if key not in self:
            self[key] = default
        return self[key]

    def __contains__(self, key: object) -> bool:
        piece = self._piece_of(key)
        if piece is None:
            return key in self.parts
        return id(piece) in self._wholes or id(piece) in self._on_any_rank()

    def __iter__(self) -> Iterator[Any]:
        if self._shown.is_hidden:
            yield from [*self.parts]
            return
        pieces = [*self._shown.pieces.values()]
        there = {*self._on_any_rank(), *self._wholes}
        yield from [piece.parameter for piece in pieces if id(piece) in there]
        own = set(map(id, pieces))
        yield from [key for key in self.parts if id(key) not in own]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _piece_of(self, key: Any) -> Piece | None:
        """Return the piece of a parameter; ``None`` if ``parts`` have what there is for a key."""
        if self._shown.is_hidden or isinstance(key, Piece):
            return None
        self._shown.require_run()
        return self._shown.pieces.get(id(key))

    def _on_any_rank(self) -> set[int]:
        """Return the pieces, by id, of the parameters that have a state; a collective."""
        if self._known is None:
            self._sync()
            pieces = [*self._shown.pieces.values()]
            own = bytes(piece in self.parts for piece in pieces)
            of_ranks = self._shown.require_run().control.gather_objects(own)
            flags = map(any, zip(*of_ranks, strict=True))
            self._known = {id(piece) for piece, flag in zip(pieces, flags, strict=True) if flag}
        return self._known

    def _sync(self) -> None:
        kind = type(self._shown.optimizer).__name__
        self._shown.require_run().control.call(SyncPoint.STATES, about=f"of {kind}").wait()

    def _gathered(self, piece: Piece) -> Any:
        """Return a copy of a parameter's whole state, ``None`` if it has none; a collective."""
        own, shown = self.parts.get(piece), self._shown
        return gather_state(own, piece, shown.keeper, shown.require_run())

    # -- changes ---------------------------------------------------------------------------------

    def __setitem__(self, key: Any, value: Any) -> None:
        piece = self._piece_of(key)
        if piece is None:
            self.parts[key] = value
        else:
            self._wholes[id(piece)] = piece, value

    def __delitem__(self, key: Any) -> None:
        piece = self._piece_of(key)
        if piece is None:
            del self.parts[key]
            return
        if key not in self:
            raise KeyError(key)
        self._wholes.pop(id(piece), None)
        self.parts.pop(piece, None)
        self._known = self._on_any_rank() - {id(piece)}

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove the state of ``key`` and return it."""
        if default and key not in self:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def clear(self) -> None:
        """Remove all states."""
        self.parts.clear()
        self._wholes.clear()
        self._known = None

    def take_back(self) -> None:
        """Take changes to whole states into ``parts``, and let go of the whole ones."""
        keeper = self._shown.keeper
        wholes, self._wholes, self._known = self._wholes, {}, None
        for piece, state in wholes.values():
            before = self.parts.get(piece)
            if not keeper.keeps_state_of(piece) or (before is None and not state):
                continue
            cut = state if keeper.is_whole else cut_state(state, piece)
            # An equal one stays, as it is where it rests, in the dtype that the optimizer chose.
            if before is None or not is_equal(before, cut):
                self.parts[piece] = keeper.part_of(state, piece)

    # -- copies ----------------------------------------------------------------------------------

    def copied(self) -> defaultdict[Any, Any]:
        """Return all states, which later steps do not change; a collective."""
        whole: defaultdict[Any, Any] = defaultdict(dict)
        self._sync()
        for piece in self._shown.pieces.values():
            kept = self._wholes.get(id(piece))
            state = self._gathered(piece) if kept is None else owned(kept[1])
            if state is not None:
                whole[piece.parameter] = state
        own = set(map(id, self._shown.pieces.values()))
        whole.update({key: value for key, value in self.parts.items() if id(key) not in own})
        return whole

    def _plain(self) -> Any:
        return self.parts if self._shown.is_hidden else self.copied()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        kind = type(self._shown.optimizer).__name__
        return f"States of {kind}, which are sharded over the ranks and gathered when looked up"


def kept_states(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Any, Any]]:
    """Yield the states that this rank keeps, each with its piece or other key."""
    for optimizer in optimizers:
        states: Any = optimizer.state
        yield from (states.parts if isinstance(states, WholeStates) else states).items()
