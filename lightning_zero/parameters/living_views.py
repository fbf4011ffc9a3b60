"""The living views of a parameter, which move when its data is replaced.

In plain torch ``p.data = x`` gives the parameter other memory, and the former ``p.data`` keeps its
value. A parameter on a flat buffer stays where it is, so its views must move instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.nn import Parameter

from lightning_zero.tensors import internals, lasting_tensors, properties


class LivingViews:
    """The views of one parameter that are still alive."""

    __slots__ = ("_refs",)

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Tensor]] = {}

    def add(self, view: Tensor) -> None:
        """Track ``view`` while it lives."""
        key, refs = id(view), self._refs
        refs[key] = weakref.ref(view, lambda _: refs.pop(key, None))

    def __iter__(self) -> Iterator[Tensor]:
        for ref in [*self._refs.values()]:
            if (view := ref()) is not None:
                internals.hold(view)
                yield view

    @property
    def places(self) -> set[int]:
        """The keys of the storages in which the views lie."""
        return set(map(internals.storage_key, self))

    def part(self, parameter: Parameter, elsewhere: Sequence[Tensor], name: str) -> None:
        """Move the views to a copy of the parameter's value now; they become ordinary tensors.

        Views in neither the parameter's memory nor ``elsewhere`` are snapshots already.

        Args:
            parameter: The parameter, readable and dense.
            elsewhere: The parameter's places in other buffers.
            name: The parameter's qualified name.

        Raises:
            RuntimeError: A view shows more digits than the parameter has now, has views that are
                not tracked, or is saved for a backward pass.
        """
        living = [*self]
        with lasting_tensors(), internals.as_plain_tensors():
            for place in (parameter, *elsewhere):
                key = internals.storage_key(place)
                lying = [view for view in living if internals.storage_key(view) == key]
                if not lying:
                    continue
                if place.dtype.itemsize > parameter.dtype.itemsize:
                    raise _unknown(name, "was taken between steps, at a higher precision")
                plain = [view for view in lying if type(view) is Tensor]
                if max(map(internals.num_uses, plain), default=1) > 1:
                    raise _unknown(name, "has views of its own, or is saved for a backward pass")
                flat = parameter.as_strided((parameter.numel(),), (1,))
                copied = flat.to(place.dtype, copy=True)
                for view in lying:
                    _move(view, place, copied)


def _move(view: Tensor, place: Tensor, copied: Tensor) -> None:
    """Move ``view``, if it lies in ``place``, to the same position in ``copied``, its copy."""
    size = view.dtype.itemsize
    start = view.storage_offset() * size - place.storage_offset() * place.dtype.itemsize
    if not 0 <= start < copied.nbytes:
        return  # a view of a neighbour in the buffer
    before = view.untyped_storage()
    moved = copied.new_empty(0, dtype=view.dtype)
    moved.set_(copied.untyped_storage(), start // size, view.size(), view.stride())
    moved = moved.conj() if view.is_conj() else moved
    properties.SET_DATA(view, moved._neg_view() if view.is_neg() else moved)
    if type(view) is not Tensor:
        view.__class__ = Tensor
        view.__dict__.clear()
    if not before.resizable():
        # A numpy array made from the view holds only the view, which must hold the memory.
        view.memory_of_arrays = before  # type: ignore[attr-defined]


def _unknown(name: str, why: str) -> RuntimeError:
    return RuntimeError(
        f"The data of parameter {name!r} cannot be replaced: a view of it that is still alive"
        f" {why}. Keep a copy instead: `p.data.clone()`"
    )
