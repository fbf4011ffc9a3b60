"""Tracking of a parameter's elements through the operations of an optimizer.

Each tensor marked by a parameter carries that parameter's bit, and whatever is computed from it
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
from functools import partial, reduce
from itertools import zip_longest
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero.optimizer.operations import Operation, leaves_of, operation_of
from lightning_zero.tensors import can_wrap, internals, is_wrapper, unwrapped


class Way(Enum):
    """The ways in which an optimizer may be stepped, by what its operations mix."""

    BY_ELEMENT = "by element"  # nothing: any part of a parameter alone
    BY_PARAMETER = "by parameter"  # elements of one parameter: each parameter alone
    ALL_AT_ONCE = "all at once"  # several parameters, or it cannot be known
    NOT_AT_ALL = "not at all"  # it keeps parameters' memory, or saves their values


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


Bits = dict[int, int]
"""The bits of tensors by their ids."""

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


class Dataflow(TorchDispatchMode):
    """A dispatch mode that tracks which parameters values come from.

    Args:
        strangers: Tensors that must not be touched: the user's own parameters.
        answer: Given a parameter's bit and a value of it that is read on the host, returns what the
            optimizer gets.

    Attributes:
        findings: The first for each way that is not by element.
        trace: The operations on marked values, in order.
        has_touched: Whether a marked value was an operand since this was last reset.
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
        self._alive: dict[int, Any] = {}
        self._host_reads = _HostReads(self)

    def __enter__(self) -> Dataflow:
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
        """Mark ``tensor`` and all that shares its memory."""
        for each in unwrapped(tensor) if bits else ():
            with internals.without_interception():
                storage = each.untyped_storage()
            key = storage._cdata
            self._bits[key] = self._bits.get(key, 0) | bits
            self._alive[key] = storage

    def bits(self, tensors: Iterable[Any]) -> int:
        """Return the parameters that ``tensors`` come from, one bit each."""
        return reduce(or_, self._bits_of([*tensors]).values(), 0)

    def _bits_of(self, leaves: Sequence[Any]) -> Bits:
        with internals.without_interception():
            return {
                id(leaf): reduce(or_, map(self._bits_of_plain, unwrapped(leaf)), 0)
                for leaf in leaves
                if isinstance(leaf, Tensor)
            }

    def _bits_of_plain(self, tensor: Tensor) -> int:
        return self._bits.get(tensor.untyped_storage()._cdata, 0)

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
        if wrapper := next(filter(can_wrap, types), None):
            self._find_wrapper(wrapper, leaves_of([*args, *(kwargs or {}).values()]))
            return NotImplemented  # so that the wrapper's own operations come here
        operation = operation_of(func)
        operands = operation.operands(args, kwargs or {})
        leaves = leaves_of(operands)
        self._find_compiled()
        self._check_may_run(operation, leaves)
        bits_of = self._bits_of(leaves)
        bits = reduce(or_, bits_of.values(), 0)
        self.has_touched |= bits > 0 or operation.is_on_lists
        call = partial(func, *args, **(kwargs or {}))
        if operation.is_on_lists:
            return self._run_on_lists(operation, operands, bits_of, call)
        if not bits or operation.is_new:
            return call()
        numbers = () if operation.is_shaped else _numbers(leaves, bits_of)
        self.trace.append(Traced(operation.text, numbers, bits))
        if operation.is_host_read and not bits & (bits - 1):
            read = f"reads values of a parameter on the host ({operation.name})"
            self.find(Way.BY_PARAMETER, read)
            self.read = self.read or read + _calling_line()
            return self._answer(bits, call())
        shapes = self._judge(operation, bits, operation.read(operands), bits_of)
        result = call()
        results, written = leaves_of([result]), operation.written(operands)
        has_tensors = written or any(isinstance(each, Tensor) for each in results)
        if not has_tensors or operation.is_data_sized:
            what = f"reads values of several parameters on the host ({operation.name})"
            self.find(Way.ALL_AT_ONCE, what)
        self._take(operation, bits, [*results, *written], shapes)
        return result

    def _find_wrapper(self, cls: type, leaves: Sequence[Any]) -> None:
        self.find(Way.BY_PARAMETER, f"keeps values in tensors of the class {cls.__name__}")
        if any(can_wrap(type(leaf)) and not is_wrapper(leaf) for leaf in leaves):
            what = f"keeps values in tensors of the class {cls.__name__}, which hides them"
            self.find(Way.ALL_AT_ONCE, what)

    def _find_compiled(self) -> None:
        """Note a call of compiled code: what it does may depend on sizes that no toy has."""
        if self.way is Way.BY_ELEMENT and internals.is_in_compiled_call():
            self.find(Way.BY_PARAMETER, "compiles its step")

    def _check_may_run(self, operation: Operation, leaves: Sequence[Any]) -> None:
        if not self._strangers.isdisjoint(map(id, leaves)):
            self.find(Way.ALL_AT_ONCE, "touches parameters outside of its param groups")
            raise CannotFollow
        if not operation.is_known:
            self.find(Way.ALL_AT_ONCE, f"calls {operation.text}, which cannot be traced")
            raise CannotFollow
        if operation.is_random:
            self.find(Way.ALL_AT_ONCE, f"draws random numbers ({operation.name})")

    def _judge(
        self, operation: Operation, bits: int, operands: Iterable[Any], bits_of: Bits
    ) -> set[torch.Size]:
        """Note what an operation on values of the parameters ``bits`` mixes.

        Returns:
            The shapes of those values, if the results must have the same.
        """
        name, shapes = operation.name, set[torch.Size]()
        if bits & (bits - 1):
            self.find(Way.ALL_AT_ONCE, f"combines values of several parameters ({name})")
        elif not operation.is_element_wise:
            self.find(Way.BY_PARAMETER, f"mixes the elements of a parameter ({name})")
        else:
            for operand in operands:
                if not isinstance(operand, Tensor):
                    continue
                if bits_of[id(operand)]:
                    shapes.add(operand.shape)
                elif operand.dim() and not _is_constant(operand):
                    self.find(Way.BY_PARAMETER, f"treats elements differently ({name})")
        return shapes

    def _take(
        self, operation: Operation, bits: int, results: Iterable[Any], shapes: set[torch.Size]
    ) -> None:
        """Mark what an operation on values of the parameters ``bits`` made or changed."""
        for result in {id(each): each for each in results}.values():
            if isinstance(result, Tensor):
                self.mark(result, bits)
                if shapes and {result.shape} != shapes:
                    what = f"reshapes or broadcasts a parameter's values ({operation.name})"
                    self.find(Way.BY_PARAMETER, what)

    def _run_on_lists(
        self, operation: Operation, operands: list[Any], bits_of: Bits, call: Callable[[], Any]
    ) -> Any:
        """Run an operation on lists, whose results depend only on operands at the same index."""
        lists, common = [], []
        counts: Sequence[Any] = ()
        for name, value in zip(operation.arguments, operands, strict=True):
            if not isinstance(value, (list, tuple)):
                common.append(value)
            elif name == "state_steps":
                counts = value
            elif value:
                lists.append(value)
        if any(bits_of.get(id(each)) for each in (*common, *counts)):
            what = f"uses a value of one parameter for all ({operation.name})"
            self.find(Way.ALL_AT_ONCE, what)
        judged = []
        for row in zip_longest(*lists):
            bits = reduce(or_, (bits_of.get(id(each), 0) for each in row), 0)
            if bits:
                numbers = _numbers([*row, *common], bits_of)
                self.trace.append(Traced(operation.text, numbers, bits))
            judged.append((bits, row, self._judge(operation, bits, row, bits_of)))
        result = call()
        written = {id(each) for each in operation.written(operands)}
        made = list(zip_longest(*_columns(result)))
        for index, (bits, row, shapes) in enumerate(judged):
            changed = (each for each in row if id(each) in written)
            results = [*changed, *(made[index] if index < len(made) else ())]
            if bits:
                self._take(operation, bits, results, shapes)
        return result


class _HostReads(TorchFunctionMode):
    """A function mode that notices reads of marked values that a dispatch mode does not see."""

    def __init__(self, dataflow: Dataflow) -> None:
        super().__init__()
        self._dataflow = dataflow

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _HOST_READS and self._dataflow.bits(args[:1]):
            name = getattr(func, "__name__", "numpy")
            self._dataflow.find(Way.ALL_AT_ONCE, f"reads values of parameters on the host ({name})")
        return func(*args, **(kwargs or {}))


def _columns(result: Any) -> list[list[Any]]:
    """Return the result lists of an operation on lists."""
    if not isinstance(result, list | tuple) or not result:
        return []
    return [list(result)] if isinstance(result[0], Tensor) else [list(each) for each in result]


def _is_constant(tensor: Tensor) -> bool:
    """Return whether all elements are equal."""
    first = tensor.reshape(-1)[:1]
    return not tensor.numel() or bool((tensor == first).all())


def _numbers(leaves: Iterable[Any], bits_of: Bits) -> tuple[Any, ...]:
    """Return the numbers among the operands, and the first of each tensor without a mark."""
    found: list[Any] = []
    for leaf in leaves:
        bits = bits_of.get(id(leaf))
        if bits is None:
            if isinstance(leaf, (int, float, complex)):
                found.append(leaf)
        elif not bits and leaf.numel():
            found.append(leaf.reshape(-1)[0].item())
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
