"""Tracking of a parameter's elements through the operations of an optimizer.

Each tensor tainted by a parameter carries that parameter's bit, and whatever is computed from it
does too. Bits belong to whole storages, so views and in-place writes need no special care. While
only operations known to be element-wise have touched a bit, all its tensors have the parameter's
shape, and element ``i`` of each depends on no other element. An operation that is not known to be
element-wise is a finding.

Values read on the host are out of sight: Python may base any decision on them. The prober chooses
what a read of one parameter returns, and checks whether another parameter notices.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero.optimizer.operands import arguments_of, leaves_of, read_by, written_by
from lightning_zero.tensors import internals


class Way(Enum):
    """The ways in which an optimizer may be stepped, by what its operations mix."""

    BY_ELEMENT = "by element"  # nothing: any part of a parameter alone
    BY_PARAMETER = "by parameter"  # elements of one parameter: each parameter alone
    ALL_AT_ONCE = "all at once"  # several parameters, or it cannot be known
    NOT_AT_ALL = "not at all"  # it reaches past its param groups


class Finding(NamedTuple):
    """An operation that rules out a finer way to step, and the line that called it."""

    way: Way
    what: str


class Traced(NamedTuple):
    """An operation on values of the parameters ``bits``, with the numbers among its operands."""

    operation: str
    numbers: tuple[Any, ...]
    bits: int


class CannotFollow(Exception):
    """Ends the optimizer's step before an operation that must not even run."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The `_foreach_` operations that are element-wise; others (norm, max, mm) are not.
_FOREACH = _names(
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf"
    " erfc exp expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow"
    " reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero"
)
_FUSED = _names("adagrad adam adamw sgd")
# Element-wise without torch's tag for it, unless they change the shape.
_COPIES = _names(
    "_to_copy _unsafe_view alias clone copy detach expand fill lift_fresh masked_fill reshape view"
    " zero"
)
# The numbers among their operands are sizes.
_SHAPED = _names("_unsafe_view expand reshape view")
# They take only the shape of their operand, no values.
_NEW = _names(
    "empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like"
    " zeros_like"
)
# They read one value on the host.
_READS = _names("_local_scalar_dense equal")
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


class Taint(TorchDispatchMode):
    """A dispatch mode that tracks which parameters values come from.

    Args:
        strangers: Tensors that must not be touched: the user's own parameters.
        answer: Given a parameter's bit and a value of it that is read on the host, returns what the
            optimizer gets.

    Attributes:
        findings: The first for each way that is not by element.
        trace: The operations on tainted values, in order.
        has_touched: Whether a tainted value was an operand since this was last reset.
        read: The first read on the host of a value that comes from one parameter alone, in words.
    """

    def __init__(
        self,
        strangers: Iterable[Tensor],
        answer: Callable[[int, Any], Any],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.findings: list[Finding] = []
        self.trace: list[Traced] = []
        self.has_touched = False
        self.read = ""
        self._answer = answer
        self._strangers = frozenset(map(id, strangers))
        self._bits: dict[int, int] = {}
        # Keeps storages alive, so that none gets the address of another.
        self._alive: list[Any] = []
        self._host_reads = _HostReads(self)

    def __enter__(self) -> Taint:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._host_reads.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._host_reads.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @property
    def way(self) -> Way:
        """The finest way that the findings allow."""
        ways = [finding.way for finding in self.findings]
        return next((way for way in reversed(Way) if way in ways), Way.BY_ELEMENT)

    def mark(self, tensor: Tensor, bits: int) -> None:
        """Taint ``tensor`` and all that shares its memory."""
        with internals.without_interception():
            storage = tensor.untyped_storage()
        key = storage._cdata
        if bits and key not in self._bits:
            self._alive.append(storage)
        if bits:
            self._bits[key] = self._bits.get(key, 0) | bits

    def bits(self, tensors: Iterable[Any]) -> int:
        """Return the parameters that ``tensors`` come from, one bit each."""
        found = 0
        with internals.without_interception():
            for tensor in tensors:
                if isinstance(tensor, Tensor):
                    found |= self._bits.get(tensor.untyped_storage()._cdata, 0)
        return found

    def find(self, way: Way, what: str, *, is_running: bool = True) -> None:
        """Note the first finding of a way, with the optimizer's line if it is running."""
        if all(finding.way is not way for finding in self.findings):
            self.findings.append(Finding(way, what + (_calling_line() if is_running else "")))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        leaves = list(leaves_of((*args, *kwargs.values())))
        name = func.overloadpacket.__name__
        self._check_may_run(func, leaves)
        written = list(written_by(func, args, kwargs))
        if name.startswith(("_foreach_", "_fused_")):
            return self._run_on_lists(func, args, kwargs, written)
        bits = self.bits(leaves)
        self.has_touched |= bits > 0
        if not bits or name.rstrip("_") in _NEW:
            return func(*args, **kwargs)
        numbers = () if name in _SHAPED else _numbers(self, leaves)
        self.trace.append(Traced(str(func), numbers, bits))
        if name in _READS and not bits & (bits - 1):
            read = f"reads values of a parameter on the host ({name})"
            self.find(Way.BY_PARAMETER, read)
            self.read = self.read or read + _calling_line()
            return self._answer(bits, func(*args, **kwargs))
        shapes = self._judge(name, _is_element_wise(func), bits, read_by(func, args, kwargs))
        result = func(*args, **kwargs)
        results = list(leaves_of([result]))
        is_read = not written and not any(isinstance(each, Tensor) for each in results)
        if is_read or torch.Tag.dynamic_output_shape in func.tags:
            self.find(Way.ALL_AT_ONCE, f"reads values of several parameters on the host ({name})")
        self._take(name, bits, [*results, *written], shapes)
        return result

    def _check_may_run(self, func: Any, leaves: Sequence[Any]) -> None:
        if any(id(leaf) in self._strangers for leaf in leaves):
            self.find(Way.NOT_AT_ALL, "touches parameters past its param groups")
        elif func.namespace not in ("aten", "prims", "prim", "profiler"):
            self.find(Way.ALL_AT_ONCE, f"calls {func}, which cannot be followed")
        elif torch.Tag.nondeterministic_seeded in func.tags:
            self.find(Way.ALL_AT_ONCE, f"draws random numbers ({func.overloadpacket.__name__})")
            return
        else:
            return
        raise CannotFollow

    def _judge(
        self, name: str, is_element_wise: bool, bits: int, operands: Iterable[Any]
    ) -> set[torch.Size]:
        """Note what an operation on values of the parameters ``bits`` mixes.

        Returns:
            The shapes of those values, if the results must have the same.
        """
        shapes: set[torch.Size] = set()
        if bits & (bits - 1):
            self.find(Way.ALL_AT_ONCE, f"lets values of several parameters meet ({name})")
        elif not is_element_wise:
            self.find(Way.BY_PARAMETER, f"mixes the elements of a parameter ({name})")
        else:
            for operand in operands:
                if not isinstance(operand, Tensor):
                    continue
                if self.bits([operand]):
                    shapes.add(operand.shape)
                elif operand.dim() and not _is_constant(operand):
                    self.find(Way.BY_PARAMETER, f"treats elements differently ({name})")
        return shapes

    def _take(self, name: str, bits: int, results: Iterable[Any], shapes: set[torch.Size]) -> None:
        """Taint what an operation on values of the parameters ``bits`` made or changed."""
        for result in results:
            if isinstance(result, Tensor):
                self.mark(result, bits)
                if shapes and {result.shape} != shapes:
                    what = f"reshapes or broadcasts a parameter's values ({name})"
                    self.find(Way.BY_PARAMETER, what)

    def _run_on_lists(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Any]
    ) -> Any:
        """Run an operation on lists, whose results depend only on operands at the same index."""
        name = func.overloadpacket.__name__
        is_element_wise = _is_element_wise(func)
        self.has_touched = True
        lists, common = [], []
        for argument, value in arguments_of(func, args, kwargs):
            if not isinstance(value, list | tuple):
                common.append(value)
            elif value and argument.name != "state_steps":
                lists.append(value)
        if self.bits(leaves_of((*common, kwargs.get("state_steps")))):
            self.find(Way.ALL_AT_ONCE, f"takes a number for all from a parameter ({name})")
        judged = []
        for row in zip_longest(*lists):
            bits = self.bits(row)
            if bits:
                self.trace.append(Traced(str(func), _numbers(self, [*row, *common]), bits))
            judged.append((bits, row, self._judge(name, is_element_wise, bits, row)))
        result = func(*args, **kwargs)
        made = list(zip_longest(*_columns(result)))
        for index, (bits, row, shapes) in enumerate(judged):
            changed = (each for each in row if any(each is other for other in written))
            results = [*changed, *(made[index] if index < len(made) else ())]
            if bits:
                self._take(name, bits, results, shapes)
        return result


class _HostReads(TorchFunctionMode):
    """A function mode that notices reads of tainted values that a dispatch mode does not see."""

    def __init__(self, taint: Taint) -> None:
        super().__init__()
        self._taint = taint

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _HOST_READS and self._taint.bits(args[:1]):
            name = getattr(func, "__name__", "numpy")
            self._taint.find(Way.ALL_AT_ONCE, f"reads values of parameters on the host ({name})")
        return func(*args, **(kwargs or {}))


@cache
def _is_element_wise(func: Any) -> bool:
    """Return whether each result element depends only on operands' elements at its index."""
    name = func.overloadpacket.__name__.removesuffix("_")
    if name.startswith("_foreach_"):
        return name.removeprefix("_foreach_") in _FOREACH
    if name.startswith("_fused_"):
        return name.removeprefix("_fused_") in _FUSED
    if torch.Tag.pointwise in func.tags or name in _COPIES:
        return True
    # Some in-place operations lack the tag of their out-of-place counterpart.
    out_of_place = getattr(getattr(torch.ops.aten, name, None), func._overloadname, None)
    return out_of_place is not None and torch.Tag.pointwise in out_of_place.tags


def _columns(result: Any) -> list[list[Any]]:
    """Return the result lists of an operation on lists."""
    if not isinstance(result, list | tuple) or not result:
        return []
    return [list(result)] if isinstance(result[0], Tensor) else [list(each) for each in result]


def _is_constant(tensor: Tensor) -> bool:
    """Return whether all elements are equal."""
    first = tensor.reshape(-1)[:1]
    return not tensor.numel() or bool((tensor == first).all())


def _numbers(taint: Taint, leaves: Iterable[Any]) -> tuple[Any, ...]:
    """Return the numbers among the operands, and the first of each tensor without taint."""
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.numel() and not taint.bits([leaf]):
                found.append(leaf.reshape(-1)[0].item())
        elif isinstance(leaf, int | float | complex):
            found.append(leaf)
    return tuple(found)


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
