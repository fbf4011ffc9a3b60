"""Steps of toy parameters that show what an optimizer does with them."""

from __future__ import annotations

import inspect
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from operator import gt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.optimizer.dataflow import CannotFollow, Dataflow, Way
from lightning_zero.optimizer.optimizer_copy import copy_of, stepping_toys, with_inner
from lightning_zero.optimizer.shared_state import Entries, options_of, shared_of
from lightning_zero.tensors import unwrapped

MasterOf = Callable[[Parameter], Tensor]
"""Returns a tensor of the dtype and on the device in which a parameter is stepped."""

Place = tuple[int, int, Any]
"""Where an entry is kept: in which of :func:`with_inner`, in which of :func:`shared_of`, and its
key."""


class Trial:
    """Steps of toys whose values are followed through operations.

    Args:
        optimizer: The user's optimizer.
        master_of: Returns what a parameter is stepped like.
        is_flat: Step only the first elements of each toy, as a vector.
        least_groups: The least number of param groups to try if there are more of equal options.
        answer: As for :class:`Dataflow`.

    Attributes:
        optimizer: The user's optimizer.
        master_of: As given.
        toys: Two for each kind of parameter, one after the other.
        dataflow: What was found.
        optimizer_copy: The copy of the optimizer that steps the toys.
        shared: What all toys share after each step, by its place.
        waits_for_closure: Whether the optimizer touches nothing before it has called its closure.
        calls_closure: Whether the optimizer ever calls its closure.
        drops_gradients: Whether a gradient was none or zero after a step but not before.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        master_of: MasterOf,
        *,
        is_flat: bool = False,
        least_groups: int = 1,
        answer: Callable[[int, Any], Any] = lambda bits, value: value,
    ) -> None:
        self.optimizer, self.master_of, self._least_groups = optimizer, master_of, least_groups
        self._is_flat = is_flat
        self._generator = torch.Generator().manual_seed(0)
        self._shapes: list[tuple[int, ...]] = []
        kept: list[int] = []
        stand_ins = []
        self.toys: list[Parameter] = []
        seen: dict[str, dict[_Kind, list[Parameter]]] = {}
        for index, group in enumerate(optimizer.param_groups):
            key = _options_key(group)
            if group["params"] and (key not in seen or len(kept) < least_groups):
                kept.append(index)
                seen[key] = self._toys_for(group)
                self.toys += [toy for pair in seen[key].values() for toy in pair]
            stand_ins.append(_stand_ins(group, seen.get(key, {}), self._kind))
        self.optimizer_copy = copy_of(optimizer, stand_ins, kept)
        users = (p for group in optimizer.param_groups for p in group["params"])
        self.dataflow = Dataflow(users, answer)
        self.shared: list[dict[Place, str]] = []
        self.waits_for_closure = True
        self.calls_closure = False
        self.drops_gradients = False

    def again(self, **how: Any) -> Trial:
        """Return a trial of the same optimizer with other arguments, those in ``how``."""
        return Trial(self.optimizer, self.master_of, **{"least_groups": self._least_groups, **how})

    def _toys_for(self, group: Mapping[str, Any]) -> dict[_Kind, list[Parameter]]:
        """Return two toys per kind of parameter in a group: a lone one may meet another later."""
        masters = {self._kind(p): self.master_of(p) for p in group["params"]}
        return {
            kind: [self._toy(shape, master) for shape in _shapes(kind)]
            for kind, master in masters.items()
        }

    def _kind(self, parameter: Parameter) -> _Kind:
        shape = _shape_of(parameter)
        is_large = len(shape) == 2 and min(shape) >= _LARGE
        return _Kind(len(shape), is_large, self.master_of(parameter).dtype)

    def _toy(self, shape: tuple[int, ...], master: Tensor) -> Parameter:
        device = "cpu" if master.device.type == "meta" else master.device
        self._shapes.append(shape)
        return Parameter(self._cut(self._draw(shape)).to(device, master.dtype))

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def _cut(self, whole: Tensor) -> Tensor:
        return whole.reshape(-1)[: (whole.numel() * 2 + 2) // 3].clone() if self._is_flat else whole

    def run(self, *, is_brief: bool = False) -> None:
        """Take all steps, but stop once steps by element and by parameter are ruled out."""
        copied, dataflow = self.optimizer_copy, self.dataflow
        for index, toy in enumerate(self.toys):
            dataflow.mark(toy, 1 << index)
            for name, value in copied.state.get(toy, {}).items():
                if isinstance(value, Tensor) and value.shape == toy.shape and name != "step":
                    dataflow.mark(value, 1 << index)
        for number in _numbers_of_steps(copied, is_brief=is_brief):
            if dataflow.way not in (Way.BY_ELEMENT, Way.BY_PARAMETER):
                return
            self._step(number)

    def _step(self, number: int) -> None:
        grads = [self._grad(number, index) for index in range(len(self.toys))]
        places = [toy.data_ptr() for toy in self.toys]
        before, num_calls = _random_states(), 0

        def closure() -> Tensor:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 1:
                self.waits_for_closure &= not self.dataflow.has_touched
            self._give(grads)
            _change_rates(self.optimizer_copy, number)
            loss = torch.ones(())
            self.dataflow.mark(loss, (1 << len(self.toys)) - 1)
            return loss

        try:
            self._give(grads)
            had_any = [grad is not None and bool(grad.any()) for grad in grads]
            with stepping_toys(), self.dataflow:
                for change in _changes(self.optimizer_copy, is_first=number == 0):
                    self._change(change)
                self.dataflow.has_touched = False
                self._step_copy(closure if _takes_closure(self.optimizer_copy) else None)
        except CannotFollow:
            return
        except Exception as error:
            self._find(f"fails to step a toy parameter ({type(error).__name__}: {error})")
            return
        finally:
            self.waits_for_closure &= num_calls > 0
            self.calls_closure |= num_calls > 0
        if num_calls > 1:
            self._find("calls its closure more than once in a step")
        if before != _random_states():
            self._find("draws random numbers")
        has_any = [toy.grad is not None and bool(toy.grad.any()) for toy in self.toys]
        self.drops_gradients |= any(map(gt, had_any, has_any))
        if places != [toy.data_ptr() for toy in self.toys]:
            self._find("replaces the data of a parameter")
        if self._has_kept_values():
            self._find("keeps values of parameters outside of their own state")
        self.shared.append(
            {
                (number, place, key): str(comparable(value))
                for number, places in enumerate(self._shared())
                for place, entries in enumerate(places)
                for key, value in entries.items()
            }
        )

    def _give(self, grads: Sequence[Tensor | None]) -> None:
        """Give the toys gradients, and mark these."""
        for index, (toy, grad) in enumerate(zip(self.toys, grads, strict=True)):
            toy.grad = grad
            if grad is not None:
                self.dataflow.mark(grad, 1 << index)

    def _change(self, method: Callable[[], Any]) -> None:
        """Call the copy's ``train`` or ``eval`` between steps."""
        method()

    def _step_copy(self, closure: Callable[[], Tensor] | None) -> None:
        self.optimizer_copy.step() if closure is None else self.optimizer_copy.step(closure)  # type: ignore[arg-type]

    def seen_of(self, bits: int) -> Any:
        """Return all that happened to the toys ``bits``, and what all share after each step."""
        trace = [one for one in self.dataflow.trace if one.bits & bits]
        states = [
            comparable([toy, holder.state.get(toy)])
            for index, toy in enumerate(self.toys)
            if bits & 1 << index
            for holder in with_inner(self.optimizer_copy)
        ]
        return str((trace, states)), self.shared

    def _shared(self) -> list[list[Entries]]:
        """Return what each optimizer keeps outside of the states of parameters."""
        return [shared_of(holder) for holder in with_inner(self.optimizer_copy)]

    def _find(self, what: str) -> None:
        self.dataflow.find(Way.ALL_AT_ONCE, what, is_running=False)

    def _grad(self, number: int, index: int) -> Tensor | None:
        """Return a gradient, at times one that may take a branch: zero, orthogonal, huge, none."""
        toy, value = self.toys[index], self._draw(self._shapes[index])
        if number % 7 == 3:
            value.zero_()
        if number % 7 == 4 and index % 2:
            return None
        if number % 7 == 5:
            value = value * 100
        grad = self._cut(value).to(toy.device, toy.dtype)
        if number % 7 == 6 and toy.dim() > 1:
            weight = toy.detach()
            grad = grad - weight * (grad * weight).sum() / (weight * weight).sum()
        return grad

    def _has_kept_values(self) -> bool:
        """Return whether values of parameters are kept outside of these parameters' states."""
        bits = {id(toy): 1 << index for index, toy in enumerate(self.toys)}
        if self.dataflow.bits(leaf for leaf in tree_leaves(self._shared()) if id(leaf) not in bits):
            return True
        return any(
            self.dataflow.bits(tree_leaves(entries)) & ~bits.get(id(key), 0)
            for holder in with_inner(self.optimizer_copy)
            for key, entries in holder.state.items()
        )


def comparable(tree: Any) -> list[Any]:
    """Return the values in a tree in a form that can be compared with another run's."""
    return list(map(_comparable, tree_leaves(tree)))


def _comparable(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return [each.detach().cpu().flatten().tolist() for each in unwrapped(leaf)]
    return leaf if isinstance(leaf, bool | int | float | complex | str) else type(leaf)


def _takes_closure(optimizer: Optimizer) -> bool:
    return "closure" in inspect.signature(type(optimizer).step).parameters


def _changes(optimizer: Any, *, is_first: bool) -> Iterator[Callable[[], Any]]:
    """Yield ``train``, without which some do not step; later ``eval`` before it."""
    for name in ("train",) if is_first else ("eval", "train"):
        change = getattr(optimizer, name, None)
        if callable(change):
            yield change


def _change_rates(optimizer: Optimizer, number: int) -> None:
    """Change the learning rates of param groups, as closures may."""
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), float):
            group["lr"] *= 2.0 if number % 2 else 0.5


def _numbers_of_steps(copied: Optimizer, *, is_brief: bool) -> Iterator[int]:
    """Yield the numbers of the steps, and move all counters ahead before late ones."""
    numbers = count()
    yield from itertools.islice(numbers, 6 if is_brief else 20)
    for step in _LATE:
        for holder in with_inner(copied):
            _move_counters(holder, step)
        yield from itertools.islice(numbers, 1 if is_brief else 2)


# Just before round numbers, at which optimizers do periodic work and late phases begin.
_LATE = (24, 49, 99, 199, 499, 999, 1999, 9999)


def _move_counters(optimizer: Optimizer, step: int) -> None:
    for entries in (*optimizer.param_groups, *optimizer.state.values()):
        value = entries.get("step") if isinstance(entries, dict) else None
        if isinstance(value, Tensor) and value.numel() == 1:
            value.fill_(step)
        elif isinstance(value, int | float):
            entries["step"] = step


def _options_key(group: Mapping[str, Any]) -> str:
    """Return a key that is equal for param groups that differ only in their learning rate."""
    ranks = sorted({len(_shape_of(parameter)) for parameter in group["params"]})
    rates = ("lr", "initial_lr")
    return str((ranks, {k: v for k, v in options_of(group).items() if k not in rates}))


class _Kind(NamedTuple):
    """A kind of parameters, which an optimizer may treat alike."""

    num_dims: int
    is_large: bool
    dtype: torch.dtype


def _stand_ins(
    group: Mapping[str, Any],
    toys: Mapping[_Kind, list[Parameter]],
    kind_of: Callable[[Parameter], _Kind],
) -> dict[Parameter, list[Parameter]]:
    """Return the toys of each parameter: both of its kind if it is alone, else one of them."""
    kinds = [kind_of(parameter) for parameter in group["params"]]
    total, used = Counter(kinds), Counter[_Kind]()
    stand_ins = {}
    for parameter, kind in zip(group["params"], kinds, strict=True):
        number = used[kind] % 2
        stand_ins[parameter] = toys[kind][number : number + 1] if total[kind] > 1 else toys[kind]
        used[kind] += 1
    return stand_ins


def _shape_of(parameter: Any) -> tuple[int, ...]:
    """Return the shape of a parameter, even if its piece is in the group already."""
    return tuple(getattr(parameter, "parameter", parameter).shape)


# The size from which optimizers that factor matrices do so.
_LARGE = 128
_SHAPES: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
    0: ((), ()),
    1: ((7,), (4,)),
    2: ((6, 4), (3, 5)),
    3: ((2, 3, 4), (3, 2, 2)),
    4: ((2, 3, 2, 2), (3, 2, 1, 2)),
}


def _shapes(kind: _Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
    first, second = _SHAPES.get(
        kind.num_dims, ((2,) * kind.num_dims, (1, 2) + (1,) * (kind.num_dims - 2))
    )
    # Multiples of the sizes of the blocks in which some keep the states of large parameters.
    return (_LARGE + 32, _LARGE + 16) if kind.is_large else first, second


def _random_states() -> tuple[Any, Any]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate()
