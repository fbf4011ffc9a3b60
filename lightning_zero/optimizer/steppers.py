"""Steppers of the optimizers that engines have adopted, what these show, and their states.

=============== ================================= ================================================
stepper         steps                             states on each rank
=============== ================================= ================================================
``Stepper``     all pieces in one call            of its pieces
``UnitStep``    pieces, one unit after the other  of its pieces, in memory or in files
``WholeStep``   whole parameters                  of those it owns, or of all
=============== ================================= ================================================

An optimizer shows one thing between its steps, and holds another within:

=============== ============================== ==================================================
                between steps                  in a step
=============== ============================== ==================================================
param groups    the module's own parameters    members: this rank's pieces, or whole parameters
                                               of which others are empty
``state``       :class:`WholeStates`           what this rank keeps, by member
=============== ============================== ==================================================

So code between steps, which goes through groups and states, finds what it does under DDP. An
optimizer that steps all at once has the module's parameters, and states as under DDP, at any time.
"""

from __future__ import annotations

import io
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_zero.comm import Communicator, SyncPoint
from lightning_zero.optimizer.attached import bare, with_inner
from lightning_zero.optimizer.known import Way
from lightning_zero.optimizer.pieces import (
    FindPiece,
    as_of_master,
    cut_state,
    held_by,
    is_of_elements,
    owned,
    put_members,
    with_entries,
)
from lightning_zero.parameters import Piece


class Stepper:
    """Steps an optimizer: here by element, all pieces in the user's own call.

    Copies of the optimizer have none. It refers to the optimizer weakly, so that this is freed
    without the garbage collector.

    Attributes:
        way: How the optimizer is stepped.
        is_torn: Whether some units are stepped and others not.
        comm: The ranks; ``None`` when the run has ended.
        pieces: This rank's pieces of all members so far.
        found: The pieces by the ids of their parameters, and of their members.
        hiding: The members by the ids of the parameters that they replace in a step.
        showing: The parameters by the ids of the members that they replace between steps.
        is_hidden: Whether the optimizer holds what it steps.
        is_lent: Whether :meth:`holding_parts` makes it do so, for code that wants these parts.
    """

    way = Way.BY_ELEMENT
    is_torn = False

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.comm: Communicator | None = None
        self.pieces: list[Piece] = []
        self.found: dict[int, Piece] = {}
        self.hiding: dict[int, Parameter] = {}
        self.showing: dict[int, Parameter] = {}
        self.is_hidden = self.is_lent = False
        self._states: WholeStates | None = None

    def __reduce__(self) -> Any:
        return type(None), ()

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    @property
    def is_whole(self) -> bool:
        """Return whether it steps whole parameters, which have whole states."""
        return self.way is not Way.BY_ELEMENT

    @property
    def has_own_format(self) -> bool:
        """Return whether only the optimizer itself knows the format of its state dict."""
        if self.way is not Way.ALL_AT_ONCE:
            return False
        state: Any = self.state_dict()
        return not (isinstance(state, Mapping) and {"state", "param_groups"} <= state.keys())

    def attach(self, comm: Communicator) -> None:
        """Become the optimizer's stepper; it then holds what it steps, as within a step."""
        self.comm = comm
        if self.way is not Way.ALL_AT_ONCE:
            self._states, self.is_hidden = WholeStates(self), True
        setattr(self.optimizer, _NAME, self)

    def member(self, piece: Piece) -> Parameter:
        """Return what is stepped in place of a piece's parameter, and is the key of its state."""
        return piece

    def stepped_as(self, piece: Piece) -> Tensor:
        """Return a tensor with the dtype and on the device in which a piece is stepped."""
        return piece

    def take(self, pieces: Sequence[Piece]) -> None:
        """Note the pieces that the optimizer holds; a collective."""

    # -- states ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict with what this rank keeps of the states."""
        with self.holding_parts():
            return self.optimizer.state_dict()

    def part_of(self, state: Mapping[str, Any], piece: Piece) -> Mapping[str, Any] | None:
        """Return a copy of the part of a parameter's state that this rank keeps, if any."""
        return self.kept(cut_state(state, piece), piece)

    def kept(self, state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
        """Return a copy of a piece's state where states rest."""
        return owned(state)  # type: ignore[no-any-return]

    def keeps_state_of(self, piece: Piece) -> bool:
        """Return whether this rank has the optimizer's state for a parameter, or a part of it."""
        return piece.numel() > 0 or not piece.range.slot.numel

    # -- what the optimizer shows ----------------------------------------------------------------

    def add(self, pieces: Mapping[Piece, Parameter]) -> None:
        """Take in the pieces of the members that the groups hold; a step is under way, or begins.

        The states of new ones are still those of their whole parameters.
        """
        new = {p: held for p, held in pieces.items() if id(p.parameter) not in self.found}
        self.pieces += new
        for piece in new:
            parameter, member = piece.parameter, self.member(piece)
            self.found |= {id(parameter): piece, id(member): piece}
            self.hiding[id(parameter)], self.showing[id(member)] = member, parameter
        # What is held may be the DTensor that a module returns for a parameter.
        held_now = {id(held): self.member(piece) for piece, held in new.items()}
        put_members(self.optimizer, self.hiding | held_now)
        self.take_states(new)

    def take_states(self, held: Mapping[Piece, Parameter]) -> None:
        """Replace states of whole parameters, by what is ``held``, with what this rank keeps.

        Tensors of the weight's dtype are cast to the master's first: an optimizer that made states
        before there were masters knew of no other dtype.
        """
        for holder in with_inner(self.optimizer):
            for piece, key in held.items():
                state = holder.state.pop(key, None)
                if state is None:
                    continue
                part = self.part_of(as_of_master(state, piece), piece)
                if part is not None:
                    holder.state[self.member(piece)] = part

    def show(self) -> None:
        """Begin the time between steps."""
        optimizer, states = self.optimizer, self._states
        if not self.is_hidden or states is None:
            return
        put_members(optimizer, self.showing)
        states.parts = optimizer.state  # torch makes a new dictionary when it loads states
        self._put(states.parts, states)
        self.is_hidden = False

    def hide(self) -> None:
        """Begin a step: the states that users have changed become those of this rank's parts."""
        optimizer, states = self.optimizer, self._states
        if self.is_hidden or states is None:
            return
        put_members(optimizer, self.hiding)
        self.is_hidden = True
        states.take_back()
        if optimizer.state is states:
            self._put(states, states.parts)
        else:  # the user has assigned a dictionary
            self.take_states({piece: piece.parameter for piece in self.pieces})

    def _put(self, old: Any, new: Any) -> None:
        own = vars(self.optimizer)  # which may have another name for its states
        own.update({name: new for name, value in own.items() if value is old})

    @contextmanager
    def holding_parts(self) -> Iterator[None]:
        """Enter a context in which the optimizer holds this rank's parts, as in a step."""
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
    def copied(self) -> Iterator[None]:
        """Enter a context in which states are whole copies, in plain dictionaries; a collective."""
        states = self._states
        assert states is not None
        copied = states.copied()
        self._put(states, copied)
        try:
            yield
        finally:
            self._put(copied, states)

    def require_run(self) -> Communicator:
        """Return the ranks.

        Raises:
            RuntimeError: The run has ended.
        """
        if self.comm is None:
            raise RuntimeError(ENDED.format(kind=type(self.optimizer).__name__))
        return self.comm

    # -- a step ----------------------------------------------------------------------------------

    def mean_of(self, loss: Any) -> Any:
        """Return a closure's loss as the optimizer sees it."""
        return loss

    def begin(self) -> None:
        """Prepare the members of param groups for the user's call of ``step``."""

    def end(self) -> None:
        """Store the results of that call."""

    def remove(self) -> None:
        """Restore the param groups after a run, or a step that an exception ended."""
        self.show()

    def check(self) -> None:
        """Clean up after a step that an exception ended; raise if it is torn."""
        self.remove()

    def describe(self, reason: str) -> str:
        """Return a line on how the optimizer is stepped, and the cost."""
        return f"{type(self.optimizer).__name__}: element-wise, sharded"


_NAME = "_lightning_zero_stepper"


def stepper_of(optimizer: Optimizer) -> Stepper:
    """Return what steps an optimizer, or did in a run that has ended."""
    found = vars(bare(optimizer)).get(_NAME)
    return found if isinstance(found, Stepper) else Stepper(optimizer)


def members(optimizer: Optimizer, find_piece: FindPiece | None = None) -> list[Parameter]:
    """Return the pieces, and parameters of no engine, that an optimizer steps, in order.

    With ``find_piece``, parameters that were added since its last step are pieces, too.
    """
    found = stepper_of(optimizer).found
    held = [found.get(id(member), member) for member in held_by(optimizer)]
    if find_piece is None:
        return held
    new = [None if isinstance(one, Piece) else find_piece(one) for one in held]
    return [one if piece is None else piece for one, piece in zip(held, new, strict=True)]


def pieces_of_groups(optimizer: Optimizer, find_piece: FindPiece) -> dict[Piece, Parameter]:
    """Return the pieces among :func:`members`, each with what the groups hold for it.

    Raises:
        ValueError: A parameter is in two groups.
    """
    found: dict[Piece, Parameter] = {}
    for piece, held in zip(members(optimizer, find_piece), held_by(optimizer), strict=True):
        if not isinstance(piece, Piece):
            continue
        if piece in found:
            name, kind = piece.range.slot.name, type(optimizer).__name__
            raise ValueError(
                f"Parameter {name!r} appears in more than one param group of {kind}. Put each"
                " parameter into one group."
            )
        found[piece] = held
    return found


def kept_states(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Any, Any]]:
    """Yield the states that this rank keeps, each with its piece or other key."""
    for optimizer in optimizers:
        states: Any = optimizer.state
        found: Mapping[int, Any] = stepper_of(optimizer).found
        for key, state in (states.parts if isinstance(states, WholeStates) else states).items():
            yield found.get(id(key), key), state


# -- optimizers whose run has ended, in another run ------------------------------------------------


def take_over(
    optimizer: Optimizer, find_piece: FindPiece, stepper: Stepper, comm: Communicator
) -> None:
    """Give an optimizer's states of another run to this run's pieces.

    Its groups then hold the module's parameters. States were moved to the host when the run ended.

    Raises:
        ValueError: On any rank, its parts or the way in which it steps are not those of this run.
    """
    before = stepper_of(optimizer)
    held = [one for one in members(optimizer) if isinstance(one, Piece)]
    pairs = [(old, new) for old in held if (new := find_piece(old.parameter)) is not old]
    taken = [(old, new) for old, new in pairs if new is not None]
    if not pairs:
        return
    stepper.take([new for _, new in taken])
    is_alike = before.way is stepper.way and len(taken) == len(pairs)
    is_alike &= all(_part(before, old) == _part(stepper, new) for old, new in taken)
    if not all(comm.control.gather_objects(is_alike)):
        raise ValueError(ENDED.format(kind=type(optimizer).__name__))
    before.check()
    before.hide()
    put_members(optimizer, before.showing)
    for old, new in taken:
        state = optimizer.state.pop(before.member(old), None)
        device = stepper.stepped_as(new).device
        if isinstance(state, Mapping):
            moved = with_entries(state, partial(_moved, device))
            optimizer.state[stepper.member(new)] = stepper.kept(moved, new)


def _part(stepper: Stepper, piece: Piece) -> Any:
    return piece.range.start, piece.range.stop, piece.dtype, stepper.keeps_state_of(piece)


def _moved(device: torch.device, key: str, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) and key != "step" else value


# -- whole states ----------------------------------------------------------------------------------


ENDED = (
    "{kind} belongs to a run that has ended and holds only this rank's parts of its states. Return"
    " it from `configure_optimizers` to another run of the same ranks with the same settings, or"
    " return a new one and load the whole states from a checkpoint."
    " Otherwise use it in `on_train_end` or earlier."
)


class WholeStates(MutableMapping[Any, Any]):
    """An optimizer's states between steps: whole, by parameter; by piece, what this rank keeps.

    Looking a state up gathers it, so all ranks do so together. It is this rank's copy, whose
    changes become the optimizer's when the next step begins, or whatever else needs the states.
    Kept any longer, it is a stale copy.

    Attributes:
        parts: What this rank keeps, by what is stepped.
    """

    def __init__(self, stepper: Stepper) -> None:
        self.parts: Any = {}
        self._stepper = stepper
        self._wholes: dict[Piece, Any] = {}
        self._known: set[Piece] | None = None

    # -- lookups ---------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        piece = self._piece_of(key)
        if piece is None:
            return self.parts[key]
        if piece not in self._wholes:
            self._sync()
            whole = self._gathered(piece)
            self._wholes[piece] = {} if whole is None else whole
        return self._wholes[piece]

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
        return piece in self._wholes or piece in self._on_any_rank()

    def __iter__(self) -> Iterator[Any]:
        if self._stepper.is_hidden:
            yield from [*self.parts]
            return
        there = {*self._on_any_rank(), *self._wholes}
        yield from [piece.parameter for piece in self._stepper.pieces if piece in there]
        yield from [key for key in self.parts if id(key) not in self._stepper.found]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _piece_of(self, key: Any) -> Piece | None:
        """Return the piece of a parameter; ``None`` if ``parts`` have what there is for a key."""
        if self._stepper.is_hidden or isinstance(key, Piece):
            return None
        self._stepper.require_run()
        return self._stepper.found.get(id(key))

    def _part(self, piece: Piece) -> Any:
        return self.parts.get(self._stepper.member(piece))

    def _on_any_rank(self) -> set[Piece]:
        """Return the pieces of the parameters that have a state; a collective."""
        if self._known is None:
            self._sync()
            pieces, member = self._stepper.pieces, self._stepper.member
            own = bytes(member(piece) in self.parts for piece in pieces)
            of_ranks = self._stepper.require_run().control.gather_objects(own)
            flags = map(any, zip(*of_ranks, strict=True))
            self._known = {*itertools.compress(pieces, flags)}
        return self._known

    def _sync(self) -> None:
        kind = type(self._stepper.optimizer).__name__
        self._stepper.require_run().control.call(SyncPoint.STATES, about=f"of {kind}").wait()

    def _gathered(self, piece: Piece) -> Any:
        """Return a copy of a parameter's whole state, ``None`` if it has none; a collective."""
        stepper = self._stepper
        mine = self._part(piece) if stepper.keeps_state_of(piece) else None
        gather = _from_owner if stepper.is_whole else _from_parts
        return gather(mine, piece, stepper.require_run())

    # -- changes ---------------------------------------------------------------------------------

    def __setitem__(self, key: Any, value: Any) -> None:
        piece = self._piece_of(key)
        if piece is None:
            self.parts[key] = value
        else:
            self._wholes[piece] = value

    def __delitem__(self, key: Any) -> None:
        piece = self._piece_of(key)
        if piece is None:
            del self.parts[key]
            return
        if key not in self:
            raise KeyError(key)
        self._wholes.pop(piece, None)
        self.parts.pop(self._stepper.member(piece), None)
        self._known = self._on_any_rank() - {piece}

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
        stepper = self._stepper
        wholes, self._wholes, self._known = self._wholes, {}, None
        for piece, state in wholes.items():
            before = self._part(piece)
            if stepper.keeps_state_of(piece) and (state or before is not None):
                self.parts[stepper.member(piece)] = stepper.part_of(state, piece)

    # -- copies ----------------------------------------------------------------------------------

    def copied(self) -> defaultdict[Any, Any]:
        """Return all states, which later steps do not change; a collective."""
        whole: defaultdict[Any, Any] = defaultdict(dict)
        self._sync()
        for piece in self._stepper.pieces:
            kept = piece in self._wholes
            state = owned(self._wholes[piece]) if kept else self._gathered(piece)
            if state is not None:
                whole[piece.parameter] = state
        found = self._stepper.found
        whole.update({key: value for key, value in self.parts.items() if id(key) not in found})
        return whole

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.parts if self._stepper.is_hidden else self.copied()
        return plain.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        kind = type(self._stepper.optimizer).__name__
        return f"States of {kind}, which are sharded over the ranks and gathered when looked up"


def _from_owner(mine: Any, piece: Piece, comm: Communicator) -> Any:
    """Return a copy of the state that one rank of each copy has; a collective."""
    sent, here = io.BytesIO(), piece.parameter.device
    if mine is not None and comm.is_in_first_copy:
        torch.save(owned(mine), sent)
    found = [one for one in comm.control.gather_objects((sent.tell(), here)) if one[0]]
    if not found:
        return None
    ((size, there),) = found
    buffer = torch.zeros(size, dtype=torch.uint8, device=comm.device)
    if sent.tell():
        buffer.copy_(torch.frombuffer(sent.getbuffer(), dtype=torch.uint8))
    comm.control.sum(buffer, "an exchange of values")
    places: Any = {there: here, str(there): str(here)}  # of wrappers, and of what they wrap
    received = io.BytesIO(buffer.cpu().numpy().tobytes())
    return torch.load(received, map_location=places, weights_only=False)


def _from_parts(mine: Any, piece: Piece, comm: Communicator) -> Any:
    """Return a copy of the state of which ranks have parts; a collective.

    What has no number per element is a copy of this rank's, or else of another's.
    """
    slot, own = piece.range.slot, piece.detach()
    values: dict[str, Tensor] = {}

    def noted(key: str, value: Any) -> Any:
        is_empty = not slot.numel and key != "step" and isinstance(value, Tensor)
        if is_of_elements(key, value, own) or (is_empty and value.shape == own.shape):
            values[key] = value.detach().cpu().contiguous().view(torch.uint8)
            return value.dtype
        return value.detach().clone() if isinstance(value, Tensor) else value

    form = with_entries(mine, noted) if isinstance(mine, Mapping) else owned(mine)
    of_ranks = comm.control.gather_objects((tree_map_only(Tensor, Tensor.cpu, form), values))
    of_copy = [of_ranks[rank] for rank in comm.mesh.shard.ranks]
    if mine is None:
        form = next((other for other, _ in of_copy if other is not None), None)
    if not isinstance(form, Mapping):
        return form
    parts = [held for _, held in of_copy if held]

    def whole(key: str, value: Any) -> Any:
        if not parts or key not in parts[0]:
            return value
        flat = torch.cat([held[key] for held in parts]).to(piece.parameter.device)
        return flat.view(value).as_strided(slot.shape, slot.stride)

    return with_entries(form, whole)
