"""A tensor in a loaded checkpoint that is not read yet: its shape, and where its values lie."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_zero.checkpoint.values.boxes import Box, boxes_in_memory, dense_stride, memory_order
from lightning_zero.checkpoint.values.places import InOneRow
from lightning_zero.checkpoint.values.read_on_use import ReadOnUse, call_with_values
from lightning_zero.tensors import PartlyRead, internals, lasting_tensors, properties

_CPU = torch.device("cpu")


class Place(Protocol):
    """The place of the values of a box of a tensor."""

    @property
    def box(self) -> Box:
        """Which of the tensor's elements."""

    def check(self, name: str) -> None:
        """Raise a ``ValueError`` if the values are damaged; ``name`` is the tensor's."""

    def read(self, name: str, region: Box, out: Tensor, *, checks: bool) -> None:
        """Copy ``region``, counted from the box's first element, to ``out`` of its shape."""


class LazyTensor(ReadOnUse, PartlyRead):
    """A tensor of whole shape that is read on use, and only as far as it is used.

    A rank that takes its own range of it reads only that range. Any other use reads the whole, so a
    hook that computes with it or edits it sees an ordinary tensor. What is read is checked against
    the checksums that the file has of it.

    Attributes:
        label: Its name in the checkpoint, for errors.
        places: Where the boxes that make up the tensor lie.
        is_checked: Whether all of it was found intact, so that reads need not check.
    """

    label: str
    places: tuple[Place, ...]
    is_checked: bool

    @staticmethod
    def of(
        places: Iterable[Place],
        shape: Iterable[int],
        dtype: torch.dtype,
        stride: Iterable[int] | None = None,
    ) -> LazyTensor:
        """Return the tensor whose boxes lie at ``places``."""
        size = torch.Size(shape)
        with lasting_tensors():
            strides = torch.empty(size, device="meta").stride() if stride is None else tuple(stride)
            lazy = internals.make_wrapper(
                LazyTensor, size, strides=strides, dtype=dtype, device=_CPU
            )
        assert isinstance(lazy, LazyTensor)
        lazy.label, lazy.places, lazy.value, lazy.is_checked = (
            "a tensor",
            tuple(places),
            None,
            False,
        )
        return lazy

    @staticmethod
    def joined(
        ranges: Callable[[], Iterable[tuple[Tensor, int, int]]],
        shape: Iterable[int],
        dtype: torch.dtype,
    ) -> LazyTensor:
        """Return the tensor whose values are ``ranges`` of others, concatenated and cast.

        Each range is a tensor, whose elements are counted in memory order, a start and a stop.
        """
        return LazyTensor.of([_Joined(Box.whole(tuple(shape)), ranges)], shape, dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer calls for metadata without reading, read a range for a range, else the whole."""
        kwargs, first = kwargs or {}, args[0] if args else None
        if func in properties.FACTS and isinstance(first, LazyTensor):
            if first.value is not None and func is not Tensor.__hash__:
                return func(first.value, *args[1:], **kwargs)
            with internals.as_plain_tensors():
                return func(*args, **kwargs)
        if func is Tensor.copy_ and type(first) is Tensor and args[1].can_fill(first):
            flat = first.view(-1)
            args[1].read_to(flat, 0)
            flat[:0].zero_()  # as any change, it raises the version
            return first
        if func is Tensor.detach and not args[0].requires_grad:
            return args[0]
        if isinstance(first, LazyTensor) and first.value is None:
            if func is Tensor.to and first._is_alike(args[1:], kwargs):
                return first
            if func is Tensor.clone and not kwargs:
                return first.read()
        result, wholes = call_with_values(func, args, kwargs)
        # What returns the tensor itself returns the lazy one.
        return next((lazy for lazy, whole in wholes if whole is result), result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return call_with_values(func, args, kwargs or {})[0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.read() if self.value is None else self.value.clone()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyTensor({self.label!r}, shape={tuple(self.shape)}, {self.dtype})"

    @property
    def version(self) -> int:
        """A number that grows whenever the values may have been changed."""
        return 0 if self.value is None else 1 + internals.version_of(self.value)

    @override
    def laid_out(self, stride: Sequence[int]) -> LazyTensor:
        if self.value is not None or tuple(stride) == self.stride():
            return self
        other = LazyTensor.of(self.places, self.shape, self.dtype, stride)
        other.label, other.is_checked = self.label, self.is_checked
        return other

    @override
    def part(self, start: int, stop: int, stride: Sequence[int]) -> Tensor:
        if self.value is not None:
            with lasting_tensors():
                flat = self.value.new_empty(self.value.numel())
                flat.as_strided(self.shape, tuple(stride)).copy_(self.value)
                return flat[start:stop]
        whole = self.laid_out(stride)
        part = LazyTensor.joined(lambda: [(whole, start, stop)], [stop - start], self.dtype)
        part.label = self.label
        return part

    @override
    def narrowed(self, dim: int, start: int, length: int) -> Tensor:
        sizes, offsets = [*self.shape], [0] * self.dim()
        sizes[dim], offsets[dim] = length, start
        within = Box(tuple(offsets), tuple(sizes))
        narrowed = LazyTensor.of([_Within(Box.whole(sizes), self, within)], sizes, self.dtype)
        narrowed.label = self.label
        return narrowed

    # -- reading -----------------------------------------------------------------------------------

    @override
    def read(self) -> Tensor:
        if self.value is not None:
            return self.value
        # Modes that intercept the caller's functions must not see these.
        with internals.without_interception(), lasting_tensors():
            whole = torch.empty_strided(
                tuple(self.shape), self.stride(), dtype=self.dtype, device=_CPU
            )
            self.fill(Box.whole(self.shape), whole)
        return whole

    def can_fill(self, out: Tensor) -> bool:
        """Return whether all values can be read into ``out`` as they come."""
        with internals.as_plain_tensors():
            is_alike = out.shape == self.shape and self.stride() == out.stride()
            is_seen = out.requires_grad or out.is_meta
            return self.value is None and is_alike and out.is_contiguous() and not is_seen

    @override
    def read_to(self, out: Tensor, start: int) -> None:
        with internals.without_interception(), lasting_tensors():
            if self.value is not None:
                flat = self.value.permute(memory_order(self.value.shape, self.value.stride()))
                out.copy_(flat.reshape(-1)[start : start + out.numel()])
                return
            if (row := self._row) is not None and row.dtype is out.dtype and out.device == _CPU:
                row.read_row(self.label, start, out, checks=not self.is_checked)
                return
            order, position = memory_order(self.shape, self.stride()), 0
            for box in boxes_in_memory(self.shape, self.stride(), start, start + out.numel()):
                flat = out[position : position + box.numel]
                self.fill(box, flat.as_strided(box.sizes, dense_stride(box.sizes, order)))
                position += box.numel

    def fill(self, box: Box, out: Tensor) -> None:
        """Read a box into ``out`` of its shape."""
        for place, shared in self._overlaps(box):
            target = out[shared.seen_from(box).slices]
            region = shared.seen_from(place.box)
            place.read(self.label, region, target, checks=not self.is_checked)

    @override
    def check(self) -> None:
        if not self.is_checked and self.value is None:
            for place in self.places:
                place.check(self.label)
        self.is_checked = True

    # -- repeated reads ----------------------------------------------------------------------------

    @functools.cached_property
    def _row(self) -> InOneRow | None:
        """The place of all elements, if a file has them in a row in the tensor's memory order."""
        place = self.places[0] if len(self.places) == 1 else None
        if not isinstance(place, InOneRow) or place.box.sizes != self.shape:
            return None
        order = memory_order(self.shape, self.stride())
        is_same = dense_stride(self.shape, order) == dense_stride(self.shape, place.order)
        return place if is_same else None

    @override
    def offset(self, dtype: torch.dtype) -> int | None:
        row = self._row
        return row.offset(0) if row is not None and row.dtype is dtype else None

    # -- parts -------------------------------------------------------------------------------------

    def _overlaps(self, box: Box) -> Iterator[tuple[Place, Box]]:
        for place in self.places:
            shared = place.box.overlap(box)
            if shared is not None:
                yield place, shared

    def _is_alike(self, args: Any, kwargs: Any) -> bool:
        """Return whether ``to`` with these arguments returns the tensor itself."""
        if "memory_format" in kwargs:
            return False
        with internals.without_interception():
            probe = torch.empty((), dtype=self.dtype, device=_CPU)
            return probe.to(*args, **kwargs) is probe


@dataclass(frozen=True)
class _Joined:
    """A place of values that are ranges of other tensors, one after another."""

    box: Box
    ranges: Callable[[], Iterable[tuple[Tensor, int, int]]]

    def check(self, name: str) -> None:
        """Check the other tensors."""
        for value, _, _ in self.ranges():
            if isinstance(value, LazyTensor):
                value.check()

    def read(self, name: str, region: Box, out: Tensor, *, checks: bool) -> None:
        """Copy ``region`` to ``out`` of its shape; a range of the box is read without the rest."""
        is_all = region == self.box and out.is_contiguous()
        whole = out if is_all else torch.empty(self.box.sizes, dtype=out.dtype, device=_CPU)
        flat, position = whole.view(-1), 0
        for value, start, stop in self.ranges():
            target = flat[position : position + stop - start]
            if isinstance(value, LazyTensor):
                value.read_to(target, start)
            else:
                target.copy_(value.view(-1)[start:stop])
            position += stop - start
        if position != flat.numel():
            raise ValueError(f"{name!r} has {position} stored elements; expected {flat.numel()}")
        if not is_all:
            out.copy_(whole[region.slices])


@dataclass(frozen=True)
class _Within:
    """A place of values that are a box ``within`` another tensor."""

    box: Box
    value: LazyTensor
    within: Box

    def check(self, name: str) -> None:
        """Check the other tensor."""
        self.value.check()

    def read(self, name: str, region: Box, out: Tensor, *, checks: bool) -> None:
        """Copy ``region`` to ``out`` of its shape."""
        offsets = zip(self.within.offsets, region.offsets, strict=True)
        box = Box(tuple(map(sum, offsets)), region.sizes)
        if self.value.value is None:
            self.value.fill(box, out)
        else:
            out.copy_(self.value.value[box.slices])


def in_memory(value: Tensor) -> Tensor:
    """Return ``value`` in memory; a lazy one is read without keeping what was read."""
    return value.read() if isinstance(value, LazyTensor) else value


def make_ordinary(module: nn.Module) -> None:
    """Replace lazy tensors that a hook has made parameters or buffers of a module."""
    made: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, value in child._parameters.items():
            if isinstance(value, LazyTensor):
                ordinary = nn.Parameter(value.read().detach(), value.requires_grad)
                child._parameters[name] = made.setdefault(id(value), ordinary)
        for name, buffer in child._buffers.items():
            if isinstance(buffer, LazyTensor):
                child._buffers[name] = buffer.read()
