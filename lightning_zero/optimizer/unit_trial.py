"""Steps of toys unit by unit, which must give what one step of all of them gives.

An optimizer that steps by element may still do so differently when some parameters are stepped
alone: it may count its calls, divide by the number of parameters, or take the first one's options
for all. So the toys of a trial are stepped once more, by the code that steps real units: in other
batches and another order in each step, in stand-ins, and with copies of their states, like states
that rest elsewhere. Every toy must see the same operations with the same numbers and end with the
same state, and what toys share must be the same after each step, to the bit.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_zero.optimizer.dataflow import Dataflow, Traced
from lightning_zero.optimizer.optimizer_copy import with_inner
from lightning_zero.optimizer.shared_state import Announced, SharedState, name_of, shared_of
from lightning_zero.optimizer.states import ParamGroups, States
from lightning_zero.optimizer.trial import Trial, comparable
from lightning_zero.optimizer.unit_step import UnitStep, call_as
from lightning_zero.tensors import internals


class UnitTrial(Trial):
    """A trial that steps toys batch by batch.

    Args:
        whole: The trial, which has ended, of the same toys stepped together.

    Attributes:
        changes_early: What a step changes for all toys before it has called its closure, if any.
    """

    def __init__(self, whole: Trial) -> None:
        super().__init__(whole.optimizer, whole.master_of, least_groups=2)
        self._waits_for_closure = whole.waits_for_closure
        self._random = random.Random(0)
        self._num_steps = 0
        self.changes_early = ""
        internals.hook_steps(type(self.optimizer_copy))

    @override
    def _change(self, method: Callable[[], Any]) -> None:
        step = self._new_step()
        step.begin(functools.partial(call_as, method))
        method()
        step.end()

    @override
    def _step_copy(self, closure: Callable[[], Tensor] | None) -> None:
        hooked: list[Any] = []
        hook = self.optimizer_copy.register_step_pre_hook(lambda *_: hooked.append(_))
        step = self._new_step()
        with _unseen():
            before = SharedState(self.optimizer_copy)
        if closure is None or not self._waits_for_closure:
            step.begin()
            super()._step_copy(closure)
        else:

            def closure_and_begin() -> Tensor:
                with _unseen():
                    self.changes_early = self.changes_early or before.changed(self.optimizer_copy)
                result = closure()
                step.begin()
                return result

            super()._step_copy(closure_and_begin)
        step.end()
        self._num_steps += 1
        hook.remove()
        if len(hooked) > 1:
            self._find("calls the step of a base class, with hooks")

    def _new_step(self) -> UnitStep:
        """Return a step of the toys in random order, in random batches or each alone.

        If some have no gradient, as in every seventh step, each toy is stepped alone, and those
        without one come last or first.
        """
        toys = self._random.sample(self.toys, len(self.toys))
        share = self._random.choice([0.0, 0.5, 0.8])
        if any(toy.grad is None for toy in toys):
            toys.sort(key=lambda toy: toy.grad is None, reverse=self._num_steps % 2 == 0)
            share = 0.0
        batches: list[list[Any]] = [toys[:1]]
        for toy in toys[1:]:
            if len(batches) == 1 or self._random.random() >= share:
                batches.append([])
            batches[-1].append(toy)
        return UnitStep(batches, _LentStates(self.optimizer_copy, self.dataflow))


class _LentStates(States):
    """States that a stand-in gets as copies, like states that rest elsewhere."""

    def __init__(self, optimizer: Optimizer, dataflow: Dataflow) -> None:
        super().__init__(optimizer)
        self._dataflow = dataflow
        self._lent: list[tuple[Parameter, Parameter]] = []

    @override
    def fetch(self, number: int, groups: ParamGroups) -> None:
        with _unseen():
            for group in groups:
                group["params"][:] = map(self._lend, group["params"])

    def _lend(self, toy: Parameter) -> Parameter:
        stand_in = Parameter(toy.detach(), requires_grad=toy.requires_grad)
        stand_in.grad = toy.grad
        self._lent.append((toy, stand_in))
        self._move(toy, stand_in)
        return stand_in

    @override
    def flush(self) -> None:
        with _unseen():
            for toy, stand_in in self._lent:
                self._move(stand_in, toy)
        self._lent.clear()

    def _move(self, source: Parameter, to: Parameter) -> None:
        state = self.optimizer.state.pop(source, None)
        if state is not None:
            self.optimizer.state[to] = tree_map_only(Tensor, self._copy, state)

    def _copy(self, value: Tensor) -> Tensor:
        copy = value.detach().clone()
        self._dataflow.mark(copy, self._dataflow.bits([value]))
        return copy


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Enter a context in which no dataflow sees operations."""
    with internals.without_modes(), internals.without_interception(), torch.no_grad():
        yield


def reason_against(whole: Trial, part: Trial) -> str:
    """Return why steps unit by unit are not proved to give what one step does; ``""`` if they are.

    Args:
        whole: The trial of toys stepped together, by element.
        part: The trial of a part of each of them.
    """
    if found := _kept_otherwise(whole):
        return found
    states, others = whole.optimizer_copy.state, part.optimizer_copy.state
    for toy, cut in zip(whole.toys, part.toys, strict=True):
        entries = _of_no_element(states.get(toy, {}), toy)
        if toy.dim() and entries != _of_no_element(others.get(cut, {}), cut):
            return "keeps different numbers for a part of a parameter than for the whole"
    by_unit = UnitTrial(whole)
    by_unit.run()
    if by_unit.changes_early:
        return f"changes {by_unit.changes_early} before calling its closure"
    if by_unit.dataflow.findings:
        what = by_unit.dataflow.findings[0].what
        return f"{what}, when only some of its parameters are stepped"
    for index in range(len(whole.toys)):
        if found := _difference(whole, by_unit, 1 << index):
            return found
    return _difference_of_shared(whole, by_unit)


def _kept_otherwise(whole: Trial) -> str:
    """Return what rules out steps by unit before any is tried, if anything."""
    optimizer, copied = whole.optimizer, whole.optimizer_copy
    if len([*with_inner(copied)]) > 1:
        return "steps another optimizer inside it"
    if whole.calls_closure and not whole.waits_for_closure:
        return "touches parameters before calling its closure"
    if whole.drops_gradients:
        return "clears gradients in its step"
    for name, value in vars(optimizer).items():
        is_put_there = name == "step" or isinstance(value, Announced)  # by a scheduler or an engine
        if callable(value) and hasattr(type(optimizer), name) and not is_put_there:
            return f"has its own {name!r} instead of its class's"
    for number, entries in enumerate(shared_of(copied)):
        for key, value in entries.items():
            for leaf in tree_leaves(value):
                if isinstance(leaf, Parameter) or not isinstance(leaf, _FOLLOWED):
                    return f"keeps a {type(leaf).__name__} as {name_of(number, key)}"
    for toy in whole.toys:
        for key, value in copied.state.get(toy, {}).items():
            for leaf in tree_leaves(value):
                if not isinstance(leaf, _FOLLOWED):
                    return f"keeps a {type(leaf).__name__} as {key!r} in a state"
                if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape != toy.shape:
                    return f"keeps {key!r} in a state in a shape other than its parameter's"
    return _list_by_parameter(optimizer)


_FOLLOWED = (
    Tensor,
    bool, int, float, complex, str, bytes, type(None), type, Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    FunctionType, BuiltinFunctionType, MethodType, functools.partial,
)  # fmt: skip
"""Types of values that are copied or cannot change."""


def _list_by_parameter(optimizer: Optimizer) -> str:
    """Return which list seems to have an entry per parameter, which toys need not show."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    for number, entries in enumerate(shared_of(optimizer)):
        num = sizes[number - 2] if number > 1 else sum(sizes)
        for key, value in entries.items():
            if isinstance(value, list) and len(value) == num > 1:
                return f"keeps {name_of(number, key)}, a list with one entry per parameter"
    return ""


def _of_no_element(state: Mapping[str, Any], toy: Tensor) -> list[Any]:
    """Return the values in a state that are not one number per element."""
    return [
        comparable(leaf)
        for leaf in tree_leaves({**state})
        if not isinstance(leaf, Tensor) or leaf.shape != toy.shape
    ]


def _difference(whole: Trial, by_unit: Trial, bits: int) -> str:
    """Return how the steps of the toys ``bits`` differ, if they do."""
    if whole.seen_of(bits)[0] == by_unit.seen_of(bits)[0]:
        return ""
    one, other = (_of(trial.dataflow.trace, bits) for trial in (whole, by_unit))
    first = next((a for a, b in zip(one, other, strict=False) if str(a) != str(b)), None)
    where = f" (starting at {first.operation})" if first else ""
    return f"steps a parameter differently when others are stepped before or after it{where}"


def _of(trace: Sequence[Traced], bits: int) -> list[Traced]:
    return [traced for traced in trace if traced.bits & bits]


def _difference_of_shared(whole: Trial, by_unit: Trial) -> str:
    """Return which of the things that toys share differs, if any."""
    for one, other in zip(whole.shared, by_unit.shared, strict=True):
        for _, place, key in [at for at in {**one, **other} if one.get(at) != other.get(at)]:
            return f"changes {name_of(place, key)} depending on the parameters it steps"
    return ""
