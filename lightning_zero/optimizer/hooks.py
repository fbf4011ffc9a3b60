"""Hooks on the user's optimizer that keep pieces in its groups and announce its steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.comm import Communicator, agreed
from lightning_zero.optimizer.attached import METHODS, put_around, with_inner
from lightning_zero.optimizer.known import Way
from lightning_zero.optimizer.pieces import FindPiece, held_by, is_whole_state
from lightning_zero.optimizer.steppers import Stepper, pieces_of_groups, stepper_of, take_over
from lightning_zero.optimizer.unit_step import UnitStep
from lightning_zero.optimizer.watch import Verdict, slowest, verdict_of
from lightning_zero.optimizer.whole_step import WholeStep
from lightning_zero.parameters import Piece, begin_step, drop, have_new
from lightning_zero.tensors import internals, runs_outside


class _Arguments(dict[str, Any]):
    """The keyword arguments of the user's call of ``step``, which torch holds until it ends."""


class _OfBase(dict[str, Any]):
    """The keyword arguments of a base class's step within it, for which torch calls hooks too."""


class OptimizerHooks:
    """The hooks that keep pieces in an optimizer's groups and announce its steps.

    Args:
        optimizer: The user's optimizer.
        find_piece: Returns this rank's piece of a parameter, ``None`` for one of no engine.
        comm: The ranks.
        changed: Called when members were added or replaced, before they are taken in.
        before: Called before the masters change, after the closure, if any.
        after: Called with the optimizer's pieces after a step.
        by_unit: The stepper if the optimizer steps where its states rest.
        choices: The setting ``optimizer_step``.

    Attributes:
        verdict: How the optimizer is stepped, and why.
        notice: A line on how the optimizer is stepped.
        handles: Remove them to uninstall the hooks.

    Raises:
        ValueError: The optimizer can be stepped in no way, a parameter is in two of its groups, or
            the optimizer belongs to another run, whose parts are not those of this one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        find_piece: FindPiece,
        comm: Communicator,
        *,
        changed: Callable[[], None],
        before: Callable[[], None],
        after: Callable[[list[Piece]], None],
        by_unit: UnitStep | None,
        choices: Mapping[str, str],
    ) -> None:
        internals.accept_hooks(optimizer)
        self._find_piece = find_piece
        self._changed, self._before, self._after = changed, before, after
        self._comm, self._choices = comm, choices
        self._stepper = by_unit or Stepper(optimizer)
        self.verdict = self._judge(optimizer)
        if self.verdict.way is not Way.BY_ELEMENT:
            self._stepper = WholeStep(optimizer, self.verdict.way, comm)
        take_over(optimizer, find_piece, self._stepper, comm)
        self._stepper.attach(comm)
        self._members: list[Parameter] = []
        self._pieces: list[Piece] = []
        # Whether masters may change, in the user's call of these arguments; an error may end it.
        self._is_begun = False
        self._closure: Callable[[], Any] | None = None
        self._arguments: Callable[[], _Arguments | None] = lambda: None
        self._point(optimizer)
        self.notice = self._stepper.describe(self.verdict.reason)
        functions: list[Callable[..., Any]] = [
            *(self.change, self.change, self._load, self._zero_grad),
            *(self._of_whole, self._of_whole, self._register),
        ]
        self.handles: list[Any] = [
            optimizer.register_step_pre_hook(self._before_step),
            # The user's hooks may read and change weights, so they run outside of the step.
            internals.hook_first(self._after_step, optimizer),
            *(
                put_around(holder, name, function, optimizer)
                for holder in with_inner(optimizer)
                for name, function in zip(METHODS, functions, strict=True)
                if callable(getattr(holder, name, None))
            ),
            self._stepper,
        ]

    def _register(
        self, optimizer: Optimizer, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Register a pre-hook, which may change rates or weights, to be called before our own."""
        handle = method(*args, **kwargs)
        internals.call_last(self._before_step, optimizer)
        return handle

    def _judge(self, optimizer: Optimizer) -> Verdict:
        """Return how the optimizer is stepped, the same on all ranks, or raise on all."""

        def master_of(parameter: Parameter) -> Tensor:
            found = parameter if isinstance(parameter, Piece) else self._find_piece(parameter)
            return parameter if found is None else self._stepper.stepped_as(found)

        control, by_unit = self._comm.control, isinstance(self._stepper, UnitStep)
        doing = f"Adopting {type(optimizer).__name__}"
        with agreed(control, doing), stepper_of(optimizer).holding_parts():
            found = verdict_of(optimizer, master_of, choices=self._choices, by_unit=by_unit)
        return slowest(control.gather_objects(found))

    @runs_outside
    def _point(self, optimizer: Optimizer) -> None:
        """Take in groups and parameters that were added since the last call."""
        members = held_by(optimizer)
        if len(members) == len(self._members) and all(map(is_, members, self._members)):
            return
        if self._members:
            self._changed()
        self._stepper.hide()
        try:
            if self._members:
                self._check_still_holds(optimizer)
            found = pieces_of_groups(optimizer, self._find_piece)
            self._pieces = [*found]
            self._stepper.take(self._pieces)
            self._stepper.add(found)
        finally:
            self._stepper.show()
        self._members = held_by(optimizer)

    def _check_still_holds(self, optimizer: Optimizer) -> None:
        if self.verdict.way is not Way.BY_ELEMENT:
            return
        way = self._judge(optimizer).way
        if way is not self.verdict.way:
            raise ValueError(
                f"{type(optimizer).__name__} is stepped {self.verdict.way.value}, but with the"
                f" added param group it can only be stepped {way.value}. Pass all param groups when"
                " you create the optimizer."
            )

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take in new groups, and make the closure run before masters may change."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        is_of_base = self._is_under_way if closure is None else closure is self._closure
        if is_of_base:
            return args, _OfBase(kwargs)
        self._stepper.check()
        self._is_begun, self._closure, self._arguments = False, None, lambda: None
        self._point(optimizer)
        if closure is not None:
            # What it takes from groups and states before it calls the closure it may use later.
            self._stepper.hide()
        if closure is None or not self.verdict.waits_for_closure:
            self._begin(optimizer)
        kept = _Arguments(kwargs)
        self._arguments = weakref.ref(kept)
        if closure is None:
            return args, kept

        def closure_and_begin() -> Any:
            self._end()
            result = self._stepper.mean_of(closure())
            # A step within this one may have had the closure, wrapped in another.
            if not self._is_begun:
                self._point(optimizer)
                self._begin(optimizer)
            return result

        self._closure = kept["closure"] = closure_and_begin
        return (args[0], *args[2:]), kept

    @property
    def _is_under_way(self) -> bool:
        """Return whether masters may change.

        Not after a step that an exception ended: torch has let go of its arguments, or, if somebody
        keeps the traceback, gradients have arrived since.
        """
        is_held = self._is_begun and self._arguments() is not None
        return is_held and not have_new(self._pieces)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        """End the user's call."""
        if not isinstance(kwargs, _OfBase):
            self._closure = None
            self._end()

    @runs_outside
    def _begin(self, optimizer: Optimizer) -> None:
        """Prepare for the optimizer to change masters."""
        begin_step(self._pieces, type(optimizer).__name__)
        self._before()
        self._stepper.hide()
        self._is_begun = True
        self._stepper.begin()

    @runs_outside
    def _end(self) -> None:
        """Refresh the weights, if the optimizer could have changed masters."""
        is_begun, self._is_begun = self._is_begun, False
        if is_begun:
            self._stepper.end()
        self._stepper.show()
        if is_begun:
            self._after(self._pieces)

    def change(
        self, optimizer: Optimizer, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call ``train`` or ``eval`` of a schedule-free optimizer, which swaps weights."""
        if self._is_under_way:
            return method(*args, **kwargs)
        self._stepper.check()
        self._point(optimizer)
        self._begin(optimizer)
        kept = _Arguments()
        self._arguments = weakref.ref(kept)
        result = method(*args, **kwargs)
        self._end()
        return result

    def _load(
        self, optimizer: Optimizer, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        """Load states, whole ones as from DDP or this rank's parts, and keep this rank's parts."""
        with self._stepper.holding_parts():
            method(*args, **kwargs)
            if self.verdict.way is Way.ALL_AT_ONCE:
                return
            members = {piece: self._stepper.member(piece) for piece in self._pieces}
            is_whole = self._stepper.is_whole
            self._stepper.take_states(
                {
                    piece: member
                    for piece, member in members.items()
                    if is_whole or is_whole_state(optimizer.state.get(member), piece)
                }
            )

    def _of_whole(
        self, optimizer: Optimizer, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call ``state_dict``, or what a copy is made of, with whole states."""
        is_whole = self.verdict.way is Way.ALL_AT_ONCE
        if is_whole or self._stepper.is_lent:  # saved by all ranks
            return method(*args, **kwargs)
        if self._stepper.is_hidden:
            raise RuntimeError(
                f"The states of {type(optimizer).__name__} are sharded and cannot be gathered while"
                " it steps. Ask for them between steps."
            )
        with self._stepper.copied():
            return method(*args, **kwargs)

    def _zero_grad(
        self, _: Optimizer, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call ``zero_grad``, after all pieces' gradients are dropped if it drops all.

        It then need not visit each parameter. Within a step it sees what is stepped here, but not
        what is stepped elsewhere.
        """
        drops = kwargs.get("set_to_none", args[0] if args else True)
        drops_all = getattr(method, "__func__", None) is Optimizer.zero_grad
        if self._is_under_way:
            drops_all = self.verdict.way is not Way.ALL_AT_ONCE
        if drops and drops_all:
            drop(self._pieces)
        return method(*args, **kwargs)
