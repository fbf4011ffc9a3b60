"""How an optimizer is stepped: by the setting, by the table, or by a trial on toy parameters.

The trial tells whether an optimizer that the table does not know steps by element. A copy steps
small toy parameters under a dispatch mode. It passes only if each operation on values that come
from a toy is known to be element-wise, takes values of one toy only, and keeps their shape. The
mode does not see an optimizer ask for a shape (decay of matrices only, a rate that depends on the
number of rows). So toys are stepped once more, as on one of several ranks: flat parts of some, and
nothing of others. They must go through the same operations with the same numbers. Anything
unknown, a value that is read on the host, a random number or an error means that it fails.
"""

from __future__ import annotations

import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_zero.optimizer.attached import bare, options_of
from lightning_zero.optimizer.known import CHOICES, Way, is_patched, known_way, may_step_in_batches
from lightning_zero.optimizer.pieces import parameter_of
from lightning_zero.optimizer.steppers import members
from lightning_zero.optimizer.toys import CannotCopy, copy_of, held_by_attributes, stepping_toys
from lightning_zero.parameters import are_views
from lightning_zero.tensors import can_wrap, internals

MasterOf = Callable[[Parameter], Tensor]
"""Returns a tensor of the dtype and on the device in which a parameter is stepped."""


class Verdict(NamedTuple):
    """The way in which an optimizer is stepped.

    Attributes:
        way: The way.
        reason: Why it is no finer one, as the end of a sentence.
        waits_for_closure: Whether the optimizer touches nothing before it has called its closure.
    """

    way: Way
    reason: str = ""
    waits_for_closure: bool = True


def verdict_of(
    optimizer: Any,
    master_of: MasterOf = lambda parameter: parameter,
    *,
    choices: Mapping[str, str] = MappingProxyType({}),
    by_unit: bool = False,
) -> Verdict:
    """Return how ``optimizer`` is stepped; nothing of it is called or changed.

    Args:
        optimizer: The user's optimizer.
        master_of: Returns a tensor of the dtype and on the device in which a parameter is stepped.
        choices: The setting ``optimizer_step``: a word by the class's name.
        by_unit: Raise unless it steps by element, as offload and stochastic rounding require.

    Raises:
        ValueError: The optimizer cannot be stepped as required.
    """
    original = bare(optimizer)
    name = type(original).__name__
    held = [one for one in held_by_attributes(original) if isinstance(one, Tensor)]
    users = map(parameter_of, members(original))
    if are_views([one for one in held if not isinstance(one, Parameter)], users):
        raise ValueError(
            f"{name} keeps views of parameters outside of its states, and these are sharded between"
            " steps. Let it keep the parameters themselves, or copies (`p.detach().clone()`), or"
            " use another optimizer or strategy='ddp'."
        )
    verdict = _verdict(original, master_of, choices)
    if by_unit and verdict.way is not Way.BY_ELEMENT:
        raise ValueError(
            f"{name} {verdict.reason}, but offload and stochastic_rounding step parts of"
            " parameters, so it gives other numbers when it steps unit by unit. Use an optimizer"
            " that steps by element, such as torch.optim.AdamW, or remove offload_optimizer,"
            " offload_weights and stochastic_rounding. If it does step by element, set"
            f' optimizer_step={{"{name}": "element"}}.'
        )
    return verdict


def _verdict(optimizer: Optimizer, master_of: MasterOf, choices: Mapping[str, str]) -> Verdict:
    cls = type(optimizer)
    word = choices.get(cls.__name__) or choices.get(f"{cls.__module__}.{cls.__qualname__}")
    if word is not None:
        way, name = CHOICES[word], cls.__name__
        is_around = any(isinstance(one, Optimizer) for one in held_by_attributes(optimizer))
        if is_around and way is not Way.ALL_AT_ONCE:
            raise ValueError(
                f'optimizer_step={{"{name}": "{word}"}} is impossible, as {name} steps another'
                ' optimizer inside it. Use "model", or remove it.'
            )
        _, waits = reason_against_elements(optimizer, master_of)
        return Verdict(way, f"is set to {word!r} by optimizer_step", waits)
    known_as = None if is_patched(cls) else known_way(optimizer)
    if known_as in (Way.BY_PARAMETER, Way.ALL_AT_ONCE):
        what = "a parameter" if known_as is Way.BY_PARAMETER else "parameters"
        return Verdict(known_as, f"mixes the elements of {what}")
    if may_step_in_batches(optimizer):
        return Verdict(Way.BY_ELEMENT)
    # Also one of another package in the table, which may be installed in another version.
    reason, waits = reason_against_elements(optimizer, master_of)
    return Verdict(Way.ALL_AT_ONCE if reason else Way.BY_ELEMENT, reason, waits)


def slowest(verdicts: Sequence[Verdict]) -> Verdict:
    """Return what all ranks can do, given the verdict of each."""
    order = list(Way)
    first = max(verdicts, key=lambda verdict: order.index(verdict.way))
    return first._replace(waits_for_closure=all(verdict.waits_for_closure for verdict in verdicts))


# -- the trial -------------------------------------------------------------------------------------


def reason_against_elements(optimizer: Optimizer, master_of: MasterOf) -> tuple[str, bool]:
    """Return why an optimizer is not known to step by element, as the end of a sentence.

    Nothing of the user's own optimizer is called or changed.

    Returns:
        The reason, empty if it steps by element, and whether the optimizer touches nothing before
        it calls its closure.
    """
    if type(optimizer).state_dict is not Optimizer.state_dict:
        return "has a state_dict of its own", False
    try:
        whole, part = (_Trial(optimizer, master_of, is_part=is_part) for is_part in (False, True))
    except CannotCopy as error:
        return str(error), False
    with stepping_toys(whole.toys):
        waits = whole.run()
        if not whole.watch.found:
            part.run()
    reason = whole.watch.found or part.watch.found
    if not reason and whole.shown() != part.shown():
        reason = "treats a part of a parameter differently from the whole"
    return reason, waits


class _Trial:
    """Steps of toys under a :class:`Watch`.

    Two toys stand for each kind of parameter in a param group: a lone one may meet another later.
    Of param groups that differ in nothing but their learning rates, one is tried.

    Args:
        optimizer: The user's optimizer.
        master_of: Returns what a parameter is stepped like.
        is_part: Step what one of several ranks has: a flat part of each first toy, and an empty one
            of each second.

    Attributes:
        toys: The toys, in pairs.
        watch: What the optimizer is seen to do.
    """

    def __init__(self, optimizer: Optimizer, master_of: MasterOf, *, is_part: bool) -> None:
        self._is_part = is_part
        self._numbers = itertools.count(is_part)  # so that parts are of other sizes
        held = members(optimizer)
        self._taken = {p.shape for p in (*held, *map(parameter_of, held))}
        toys: dict[int, list[tuple[Parameter, Parameter]]] = {}
        tried: set[str] = set()
        for index, group in enumerate(optimizer.param_groups):
            kinds: dict[tuple[int, bool, torch.dtype], list[Parameter]] = defaultdict(list)
            for p in group["params"]:
                shape = parameter_of(p).shape
                # Of numbers too, vectors are tried: a watch does not follow single numbers.
                for num_dims in {len(shape), max(len(shape), 1)}:
                    kinds[num_dims, shape.numel() >= _LARGE, master_of(p).dtype].append(p)
            own = {k: v for k, v in options_of(group).items() if k not in ("lr", "initial_lr")}
            key = str((sorted(kinds, key=str), own))
            if kinds and key not in tried:
                tried.add(key)
                toys[index] = [
                    (some[number % len(some)], self._toy(kind, number, master_of(some[0])))
                    for kind, some in kinds.items()
                    for number in (0, 1)
                ]
        if not toys:
            raise CannotCopy("has no parameters")
        self._copy: Any = copy_of(optimizer, toys)
        self.toys = [toy for pairs in toys.values() for _, toy in pairs]
        self.watch = Watch(self.toys, self._taken)

    def _toy(self, kind: tuple[int, bool, Any], number: int, master: Tensor) -> Parameter:
        """Return a toy of a shape that neither another one has nor a parameter."""
        num_dims, is_large, dtype = kind
        for index in self._numbers:
            is_large &= not self._is_part  # as parts may be small
            rows, columns = (128, 8 * index + 128) if is_large else (2, index + 50)
            shape: tuple[int, ...] = (rows, *[1] * (num_dims - 2), columns)
            if num_dims == 0:
                shape = (1,) if self._is_part else ()
            elif num_dims == 1 or self._is_part:
                shape = (rows * columns,)
            if num_dims == 0 or shape not in self._taken:
                break
        shape = (0,) if self._is_part and number else shape
        device = "cpu" if master.device.type == "meta" else master.device
        return Parameter(torch.ones(shape, dtype=dtype, device=device))

    def run(self) -> bool:
        """Take all steps; return whether none has touched toys before it called its closure."""
        waits = []
        try:
            for number in (*range(12), *_LATE):
                for entries in (*self._copy.param_groups, *self._copy.state.values()):
                    is_counted = isinstance(entries, dict) and "step" in entries
                    if number in _LATE and is_counted:
                        entries["step"] = entries["step"] * 0 + number
                waits.append(self._step(number))
        except Exception as error:
            what = f"fails to step a toy parameter ({type(error).__name__}: {error})"
            self.watch.found = self.watch.found or what
            return False
        return all(waits)

    def _step(self, number: int) -> bool:
        copied, watch, calls = self._copy, self.watch, list[bool]()
        grads = [
            torch.linspace(1, -2, toy.numel()).add(number + index).cos().to(toy).view(toy.shape)
            if toy.numel()
            else None
            for index, toy in enumerate(self.toys)
        ]

        def give() -> None:
            for toy, grad in zip(self.toys, grads, strict=True):
                toy.grad = grad

        def closure() -> Tensor:
            calls.append(watch.has_touched)
            give()
            return torch.empty((), device="meta")  # a loss that cannot be used: ranks have others

        give()
        places = [toy.data_ptr() for toy in self.toys]
        with watch, _HostReads(watch):
            for name in ("eval", "train")[number == 0 :]:
                if callable(change := getattr(copied, name, None)):
                    change()
            watch.has_touched = False
            takes = "closure" in inspect.signature(type(copied).step).parameters
            copied.step(closure) if takes else copied.step()
        if len(calls) > 1:
            watch.found = watch.found or "calls its closure more than once in a step"
        if places != [toy.data_ptr() for toy in self.toys]:
            watch.found = watch.found or "replaces the data of a parameter"
        return calls[:1] == [False]

    def shown(self) -> list[Any]:
        """Return what each first toy went through; of a single number, what became of it."""
        trace, first = self.watch.trace, self.toys[::2]
        return [trace.get(toy.shape, toy.detach().reshape(-1).tolist()) for toy in first]


# Just before round numbers, at which optimizers do periodic work and late phases begin.
_LATE = (99, 499, 999, 1999, 9999)
# The number of elements from which some factor matrices, or keep states in fewer bits.
_LARGE = 4096


# -- operations ------------------------------------------------------------------------------------


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The `_foreach_` operations that are element-wise; others (norm, max, mm) are not.
_FOREACH = _names(
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf"
    " erfc exp expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow"
    " reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero"
)
# Element-wise without torch's tag for it, unless they change the shape.
_COPIES = _names(
    "_to_copy _unsafe_view alias clone copy detach expand fill lift_fresh masked_fill reshape view"
    " zero"
)
_NEW = _names(
    "empty empty_like empty_strided full full_like new_empty new_empty_strided new_full new_ones"
    " new_zeros ones ones_like zeros zeros_like"
)


def is_element_wise(func: Any) -> bool:
    """Return whether each result element depends only on operands' elements at its index."""
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    name = func.overloadpacket.__name__.removesuffix("_")
    if name.startswith("_foreach_"):
        return name.removeprefix("_foreach_") in _FOREACH
    if torch.Tag.pointwise in func.tags or name in _COPIES:
        return True
    # Some in-place operations lack the tag of their out-of-place counterpart.
    out_of_place = getattr(getattr(torch.ops.aten, name, None), func._overloadname, None)
    return out_of_place is not None and torch.Tag.pointwise in out_of_place.tags


class Watch(TorchDispatchMode):
    """A dispatch mode that raises an error before what is not known to be element-wise.

    Toys have shapes of their own, and so has each value that comes from one. Single numbers, and
    tensors of other shapes, come from none: no element-wise operation makes them.

    Args:
        toys: The parameters whose values are followed, if they have several elements.
        outside: The shapes of tensors that must not be touched: the user's own parameters.

    Attributes:
        found: The first reason, in case the optimizer catches the error.
        trace: The operations on each toy's values, with the numbers that they use, by its shape.
        has_touched: Whether there was one since this was last reset.
    """

    def __init__(self, toys: Iterable[Tensor], outside: set[torch.Size]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outside = {shape for shape in outside if shape.numel() > 1}
        self.found = ""
        self.trace: dict[torch.Size, list[str]] = {t.shape: [] for t in toys if t.numel() > 1}
        self.has_touched = False

    def refuse(self, what: str) -> None:
        """Raise a ``RuntimeError``."""
        self.found = self.found or what
        raise RuntimeError(self.found)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        operands = [*args, *kwargs.values()]
        lists = [value for value in operands if isinstance(value, (list, tuple))]
        common = [value for value in operands if not isinstance(value, (list, tuple))]
        is_on_lists = name.startswith("_foreach_")
        tensors = [one for each in lists for one in each if isinstance(one, Tensor)]
        for row in zip_longest(*lists) if is_on_lists else [tensors]:
            self._judge(func, name, [*row, *common])
        if wrapper := next(filter(can_wrap, types), None):
            self.refuse(f"keeps values in tensors of the class {wrapper.__name__}")
        result = func(*args, **kwargs)
        if not is_on_lists and name not in _NEW:
            shapes = _shapes_of([*common, *tensors, *tree_leaves(result)])
            is_same = len(shapes) == 1 and is_element_wise(func)
            if shapes & self.trace.keys() and not is_same:
                self.refuse(f"reshapes or broadcasts a parameter's values ({name})")
        return result

    def _judge(self, func: Any, name: str, row: Sequence[Any]) -> None:
        """Refuse what is not element-wise, given operands that are used together."""
        shapes = _shapes_of(row)
        if shapes & self._outside:
            self.refuse("touches parameters outside of its param groups")
        if not shapes & self.trace.keys():
            return
        self.has_touched = True
        if len(shapes) > 1:
            self.refuse(f"combines values of several parameters ({name})")
        elif name not in _NEW and not is_element_wise(func):
            self.refuse(f"mixes the elements of a parameter ({name})")
        elif internals.is_in_compiled_call():
            self.refuse("compiles its step")  # by sizes that no toy may have
        elif name not in _NEW:
            numbers = [
                value.item() if isinstance(value, Tensor) else value
                for value in row
                if not isinstance(value, Tensor) or value.numel() == 1
            ]
            self.trace[shapes.pop()].append(f"{func} {numbers}")


def _shapes_of(values: Iterable[Any]) -> set[torch.Size]:
    """Return the shapes of the tensors that have several elements."""
    return {one.shape for one in values if isinstance(one, Tensor) and one.numel() > 1}


class _HostReads(TorchFunctionMode):
    """A function mode that notices reads of values that a dispatch mode does not see."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _HOST_READS and args[0].numel() > 1:
            name = getattr(func, "__name__", "numpy")
            self._watch.refuse(f"reads values of parameters on the host ({name})")
        return func(*args, **(kwargs or {}))


_HOST_READS = frozenset(
    [
        Tensor.numpy,
        Tensor.tolist,
        Tensor.data_ptr,
        Tensor.untyped_storage,
        Tensor.__array__,
        Tensor.__dlpack__,
    ]
)
