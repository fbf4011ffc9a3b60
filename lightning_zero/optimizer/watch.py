"""How an optimizer is stepped: by the setting, by the table, or by a trial on toy parameters.

The trial tells whether an optimizer that the table does not know steps by element. A copy steps
small toy parameters under a dispatch mode that follows every value that comes from a toy. It passes
only if each operation on such values is known to be element-wise, takes values of one toy only, and
keeps its shape. The mode does not see an optimizer ask for a shape (decay of matrices
only, a rate that depends on the number of rows). So the first elements of each toy are stepped once
more, as a flat vector, and both must do the same operations with the same numbers. Anything
unknown, a value that is read on the host, a random number or an error means that it fails.
"""

from __future__ import annotations

import inspect
import random
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero.optimizer.attached import bare, options_of
from lightning_zero.optimizer.known import (
    CHOICES,
    Way,
    is_patched,
    known_class,
    known_way,
)
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
        if CHOICES[word] is not Way.ALL_AT_ONCE:
            _require_no_other(optimizer, word)
        _, waits = reason_against_elements(optimizer, master_of)
        return Verdict(CHOICES[word], f"is set to {word!r} by optimizer_step", waits)
    if is_patched(cls):
        return Verdict(Way.ALL_AT_ONCE, "has a `step` that was replaced", False)
    way = known_way(optimizer)
    if way in (Way.BY_PARAMETER, Way.ALL_AT_ONCE):
        of_one = way is Way.BY_PARAMETER
        return Verdict(way, f"mixes the elements of {'a parameter' if of_one else 'parameters'}")
    known = known_class(cls)
    if known is not None and known.package == "torch.optim":
        return Verdict(Way.BY_ELEMENT)
    if cls.state_dict is not Optimizer.state_dict:
        return Verdict(Way.ALL_AT_ONCE, "has a state_dict of its own", False)
    # Also one in the table: its package may have another version.
    reason, waits = reason_against_elements(optimizer, master_of)
    if reason:
        return Verdict(Way.ALL_AT_ONCE, reason, waits)
    return Verdict(Way.BY_ELEMENT, "", waits)


def _require_no_other(optimizer: Optimizer, word: str) -> None:
    if any(isinstance(one, Optimizer) for one in held_by_attributes(optimizer)):
        name = type(optimizer).__name__
        raise ValueError(
            f'optimizer_step={{"{name}": "{word}"}} is impossible, as {name} steps another'
            ' optimizer inside it. Use "model", or remove it.'
        )


def slowest(verdicts: Sequence[Verdict]) -> Verdict:
    """Return what all ranks can do, given the verdict of each."""
    order = list(Way)
    first = max(verdicts, key=lambda verdict: order.index(verdict.way))
    return first._replace(waits_for_closure=all(verdict.waits_for_closure for verdict in verdicts))


# -- the trial -------------------------------------------------------------------------------------


class Mixes(Exception):
    """The optimizer does something that is not known to be element-wise."""


def reason_against_elements(optimizer: Optimizer, master_of: MasterOf) -> tuple[str, bool]:
    """Return why an optimizer is not known to step by element, as the end of a sentence.

    Nothing of the user's own optimizer is called or changed.

    Returns:
        The reason, empty if it steps by element, and whether the optimizer touches nothing before
        it calls its closure.
    """
    waits = False
    try:
        whole = _Trial(optimizer, master_of)
        waits = whole.run()
        part = _Trial(optimizer, master_of, is_flat=True)
        part.run()
    except (Mixes, CannotCopy) as error:
        return str(error), waits
    for one, other in zip_longest(whole.watch.trace, part.watch.trace):
        if str(one) != str(other):
            where = f" (starting at {one[1]})" if one else ""
            return f"treats a part of a parameter differently from the whole{where}", waits
    return "", waits


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
_OVERWRITES = _names("copy_ fill_ zero_")
_SHAPED = _names("_unsafe_view expand reshape view")
_NEW = _names(
    "empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like"
    " zeros_like"
)
_NAMESPACES = _names("aten prims prim profiler")
# Reads on the host that a dispatch mode does not see.
_HOST_READS = frozenset(
    [
        Tensor.numpy,
        Tensor.tolist,
        Tensor.data_ptr,
        Tensor.untyped_storage,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.__reduce_ex__,
        Tensor.__deepcopy__,
    ]
)


def is_element_wise(func: Any) -> bool:
    """Return whether each result element depends only on operands' elements at its index."""
    name = func.overloadpacket.__name__.removesuffix("_")
    if name.startswith("_foreach_"):
        return name.removeprefix("_foreach_") in _FOREACH
    if torch.Tag.pointwise in func.tags or name in _COPIES:
        return True
    # Some in-place operations lack the tag of their out-of-place counterpart.
    out_of_place = getattr(getattr(torch.ops.aten, name, None), func._overloadname, None)
    return out_of_place is not None and torch.Tag.pointwise in out_of_place.tags


class Watch(TorchDispatchMode):
    """A dispatch mode that raises :class:`Mixes` before what is not known to be element-wise.

    Args:
        toys: The parameters whose values are followed.
        strangers: Tensors that must not be touched: the user's own parameters.

    Attributes:
        found: The first reason, in case the optimizer catches the exception.
        trace: The operations on followed values: the toy, the operation and its numbers.
        has_touched: Whether a followed value was an operand since this was last reset.
    """

    def __init__(self, toys: Sequence[Tensor], strangers: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = ""
        self.trace: list[tuple[int, str, tuple[Any, ...]]] = []
        self.has_touched = False
        self._shapes = [toy.shape for toy in toys]
        self._strangers = frozenset(map(id, strangers))
        # The toy that a storage's values come from; storages are kept, so that none gets the
        # address of another.
        self._owners: dict[int, tuple[int, Any]] = {}
        self._host_reads = _HostReads(self)
        for number, toy in enumerate(toys):
            self.follow(toy, number)

    def __enter__(self) -> Watch:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._host_reads.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._host_reads.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def follow(self, tensor: Tensor, number: int) -> None:
        """Note that the values of ``tensor`` come from the toy of this number."""
        with internals.without_interception():
            storage = tensor.untyped_storage()
        self._owners[storage._cdata] = number, storage

    def owner_of(self, value: Any) -> int | None:
        """Return the number of the toy that a value comes from, if any."""
        if not isinstance(value, Tensor) or can_wrap(type(value)):
            return None
        with internals.without_interception():
            found = self._owners.get(value.untyped_storage()._cdata)
        return None if found is None else found[0]

    def refuse(self, what: str) -> None:
        """Raise :class:`Mixes`, with the optimizer's line if it has a file."""
        self.found = self.found or what + _calling_line()
        raise Mixes(self.found)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        operands = [*args, *map((kwargs or {}).get, names[len(args) :])]
        self._check(func, types, operands)
        is_on_lists = func.overloadpacket.__name__.startswith("_foreach_")
        rows = self._rows(func, operands) if is_on_lists else [_Row.of(func, operands)]
        self.has_touched |= is_on_lists
        owners = [self._judge(func, row) for row in rows]
        result = func(*args, **(kwargs or {}))
        made = list(zip_longest(*_columns(result))) if is_on_lists else [leaves_of([result])]
        for index, (row, number) in enumerate(zip(rows, owners, strict=True)):
            if number is None:
                continue
            for one in (*row.written, *(made[index] if index < len(made) else ())):
                if isinstance(one, Tensor):
                    self._check_shape(func, one, number)
                    self.follow(one, number)
        return result

    def _check(self, func: Any, types: Sequence[type], operands: Sequence[Any]) -> None:
        if wrapper := next(filter(can_wrap, types), None):
            self.refuse(f"keeps values in tensors of the class {wrapper.__name__}")
        if not self._strangers.isdisjoint(map(id, leaves_of(operands))):
            self.refuse("touches parameters outside of its param groups")
        if func.namespace not in _NAMESPACES:
            self.refuse(f"calls {func}, which cannot be traced")
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.refuse(f"draws random numbers ({func.overloadpacket.__name__})")
        if internals.is_in_compiled_call():
            self.refuse("compiles its step")  # by sizes that no toy may have

    def _rows(self, func: Any, operands: Sequence[Any]) -> list[_Row]:
        """Return the operands of each index of an operation on lists."""
        lists, written, common = [], [], []
        for argument, value in zip(func._schema.arguments, operands, strict=True):
            if not isinstance(value, (list, tuple)):
                common.append(value)
            elif value:
                lists.append(value)
                written.append(_is_written(argument))
        if any(self.owner_of(one) is not None for one in common):
            self.refuse(f"uses a value of one parameter for all ({func.overloadpacket.__name__})")
        return [
            _Row([*row, *common], [one for one, is_it in zip(row, written, strict=True) if is_it])
            for row in zip_longest(*lists)
        ]

    def _judge(self, func: Any, row: _Row) -> int | None:
        """Return the toy that the results come from; refuse what is not element-wise."""
        name = func.overloadpacket.__name__
        owners = {self.owner_of(one) for one in (*row.read, *row.written)} - {None}
        self.has_touched |= bool(owners)
        if not owners or name.rstrip("_") in _NEW:
            return None
        if len(owners) > 1:
            self.refuse(f"combines values of several parameters ({name})")
        if not is_element_wise(func):
            self.refuse(f"mixes the elements of a parameter ({name})")
        (number,) = owners
        assert number is not None
        numbers: list[Any] = []
        for one in row.read:
            if isinstance(one, (int, float, complex)) and name not in _SHAPED:
                numbers.append(one)
            elif not isinstance(one, Tensor):
                continue
            elif self.owner_of(one) is not None:
                self._check_shape(func, one, number)
            elif one.numel():
                first = one.reshape(-1)[:1]
                if one.dim() and not bool((one == first).all()):
                    self.refuse(f"treats elements differently ({name})")
                numbers.append(first.item())
        self.trace.append((number, str(func), tuple(numbers)))
        return number

    def _check_shape(self, func: Any, value: Tensor, number: int) -> None:
        if value.shape != self._shapes[number]:
            name = func.overloadpacket.__name__
            self.refuse(f"reshapes or broadcasts a parameter's values ({name})")


class _Row(NamedTuple):
    """Operands that are used together: those whose values count, and those that are changed."""

    read: Sequence[Any]
    written: Sequence[Any]

    @classmethod
    def of(cls, func: Any, operands: Sequence[Any]) -> _Row:
        pairs = [*zip(func._schema.arguments, operands, strict=True)]
        written = leaves_of(value for argument, value in pairs if _is_written(argument))
        overwritten = 1 if func.overloadpacket.__name__ in _OVERWRITES else 0
        return cls(
            leaves_of(value for one, value in pairs[overwritten:] if not one.is_out), written
        )


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def leaves_of(values: Iterable[Any]) -> list[Any]:
    """Return the values of an operation's arguments, those in lists one by one."""
    leaves: list[Any] = []
    for value in values:
        leaves += value if isinstance(value, (list, tuple)) else [value]
    return leaves


def _columns(result: Any) -> list[list[Any]]:
    """Return the result lists of an operation on lists."""
    if not isinstance(result, list | tuple) or not result:
        return []
    return [list(result)] if isinstance(result[0], Tensor) else [list(each) for each in result]


class _HostReads(TorchFunctionMode):
    """A function mode that notices reads of followed values that a dispatch mode does not see."""

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
        if func in _HOST_READS and self._watch.owner_of(args[0]) is not None:
            name = getattr(func, "__name__", "numpy")
            self._watch.refuse(f"reads values of parameters on the host ({name})")
        return func(*args, **(kwargs or {}))


_TORCH = str(Path(torch.__file__).parent)
_OPTIM = str(Path(torch.optim.__file__).parent)
_OURS = str(Path(__file__).parents[1])


def _calling_line() -> str:
    """Return the line of the optimizer that called the current operation, if it has a file."""
    for frame in reversed(traceback.extract_stack()):
        name = frame.filename
        is_torch = name.startswith(_TORCH) and not name.startswith(_OPTIM)
        if is_torch or name.startswith(_OURS):
            continue
        if Path(name).exists():
            return f" at {'/'.join(Path(name).parts[-2:])}:{frame.lineno}: `{frame.line}`"
        break
    return ""


# -- steps of toys ---------------------------------------------------------------------------------


class _Trial:
    """Steps of toys under a :class:`Watch`.

    Two toys stand for each kind of parameter in a param group: a lone one may meet another later.
    Of param groups that differ in nothing but their learning rates, one is tried.

    Args:
        optimizer: The user's optimizer.
        master_of: Returns what a parameter is stepped like.
        is_flat: Step only the first elements of each toy, as a vector.
    """

    def __init__(self, optimizer: Optimizer, master_of: MasterOf, *, is_flat: bool = False) -> None:
        self._is_flat = is_flat
        self._generator = torch.Generator().manual_seed(0)
        self._whole: list[tuple[int, ...]] = []
        toys: dict[int, list[tuple[Parameter, Parameter]]] = {}
        tried: set[str] = set()
        for index, group in enumerate(optimizer.param_groups):
            kinds: dict[Any, list[Parameter]] = defaultdict(list)
            for p in group["params"]:
                shape = tuple(parameter_of(p).shape)
                is_large = len(shape) == 2 and min(shape) >= _LARGE
                kinds[len(shape), is_large, master_of(p).dtype].append(p)
            rates = ("lr", "initial_lr")
            own = {k: v for k, v in options_of(group).items() if k not in rates}
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
        self._toys = [toy for pairs in toys.values() for _, toy in pairs]
        self.watch = Watch(
            self._toys, (p for group in optimizer.param_groups for p in group["params"])
        )
        for number, toy in enumerate(self._toys):
            for name, value in self._copy.state.get(toy, {}).items():
                if isinstance(value, Tensor) and value.shape == toy.shape and name != "step":
                    self.watch.follow(value, number)

    def _toy(self, kind: tuple[int, bool, Any], number: int, master: Tensor) -> Parameter:
        num_dims, is_large, _ = kind
        shape = _SHAPES.get(num_dims, ((2,) * num_dims, (3,) + (2,) * (num_dims - 1)))[number]
        if is_large:
            # Multiples of the sizes of the blocks in which some keep states of large parameters.
            shape = _LARGE + 32, _LARGE + 16 * number
        self._whole.append(shape)
        device = "cpu" if master.device.type == "meta" else master.device
        return Parameter(self._cut(self._draw(shape)).to(device, master.dtype))

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def _cut(self, whole: Tensor) -> Tensor:
        return whole.reshape(-1)[: (whole.numel() * 2 + 2) // 3].clone() if self._is_flat else whole

    def run(self) -> bool:
        """Take all steps; return whether none has touched toys before it called its closure."""
        waits = True
        for number in _numbers_of_steps(self._copy):
            waits &= self._step(number)
        return waits

    def _step(self, number: int) -> bool:
        copied, num_calls, waits = self._copy, 0, True
        grads = [self._grad(number, index) for index in range(len(self._toys))]

        def closure() -> Tensor:
            nonlocal num_calls, waits
            num_calls += 1
            waits &= not self.watch.has_touched
            self._give(grads)
            for group in copied.param_groups:
                if isinstance(group.get("lr"), float):  # as closures may change rates
                    group["lr"] *= 2.0 if number % 2 else 0.5
            loss = torch.ones(())
            self.watch.follow(loss, -1)
            return loss

        self._give(grads)
        before = _drawn(), [toy.data_ptr() for toy in self._toys]
        try:
            with stepping_toys(self._toys):
                with self.watch:
                    for name in ("eval", "train")[number == 0 :]:
                        if callable(change := getattr(copied, name, None)):
                            change()
                    self.watch.has_touched = False
                    takes = "closure" in inspect.signature(type(copied).step).parameters
                    copied.step(closure) if takes else copied.step()
                after = _drawn(), [toy.data_ptr() for toy in self._toys]
        except Mixes:
            raise
        except Exception as error:
            what = f"fails to step a toy parameter ({type(error).__name__}: {error})"
            raise Mixes(self.watch.found or what) from error
        if self.watch.found:
            raise Mixes(self.watch.found)  # it has caught the exception
        if num_calls > 1:
            raise Mixes("calls its closure more than once in a step")
        if before[0] != after[0]:
            raise Mixes("draws random numbers")
        if before[1] != after[1]:
            raise Mixes("replaces the data of a parameter")
        return waits and num_calls > 0

    def _give(self, grads: Sequence[Tensor | None]) -> None:
        for index, (toy, grad) in enumerate(zip(self._toys, grads, strict=True)):
            toy.grad = grad
            if grad is not None:
                self.watch.follow(grad, index)

    def _grad(self, number: int, index: int) -> Tensor | None:
        """Return a gradient, at times one that may take a branch: zero, huge, none."""
        toy, value = self._toys[index], self._draw(self._whole[index])
        if number % 6 == 3:
            value.zero_()
        if number % 6 == 4 and index % 2:
            return None
        if number % 6 == 5:
            value = value * 100
        return self._cut(value).to(toy.device, toy.dtype)


def _numbers_of_steps(copied: Optimizer) -> Iterator[int]:
    """Yield the numbers of the steps, and move all counters ahead before late ones."""
    yield from range(12)
    for number, step in enumerate(_LATE, 12):
        entries: Any
        for entries in (*copied.param_groups, *copied.state.values()):
            value = entries.get("step") if isinstance(entries, Mapping) else None
            if isinstance(value, Tensor) and value.numel() == 1:
                value.fill_(step)
            elif isinstance(value, int | float):
                entries["step"] = step
        yield number


# Just before round numbers, at which optimizers do periodic work and late phases begin.
_LATE = (99, 499, 999, 1999, 9999)
# The size from which optimizers that factor matrices do so.
_LARGE = 128
_SHAPES: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
    0: ((), ()),
    1: ((7,), (4,)),
    2: ((6, 4), (3, 5)),
    3: ((2, 3, 4), (3, 2, 2)),
    4: ((2, 3, 2, 2), (3, 2, 1, 2)),
}


def _drawn() -> tuple[Any, ...]:
    """Return the states of the host's generators."""
    numpy = sys.modules.get("numpy")
    by_numpy = None if numpy is None else str(numpy.random.get_state())
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), by_numpy
