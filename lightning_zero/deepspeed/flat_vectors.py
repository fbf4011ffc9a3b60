"""The flat vectors in which DeepSpeed's ZeRO keeps masters and optimizer states.

At stages 1 and 2 the parameters of a param group lie end to end, and each rank has an equal part of
the whole. At stage 3 each rank has an equal part of every parameter, and its parts lie end to end::

    stage 1, 2   aaaaaaaabbbb|bbbccccc----        stage 3   aaaabbbbccc|aaaabbb-cc-
                    rank 0      rank 1                        rank 0      rank 1

Tensors are assembled only when they are written, one at a time.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zero.checkpoint import LazyTensor
from lightning_zero.deepspeed.files import CannotConvert

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Flat(ABC):
    """Parameters of one param group as a flat vector, divided over the ranks.

    Parameters are in the order of ``shapes``, each followed by ``paddings`` elements. ``masters``
    are the ranks' parts, ``[n]``. ``label`` names the vector in errors.
    """

    label: str
    shapes: Shapes
    paddings: Sequence[int]
    masters: Sequence[Tensor]

    @abstractmethod
    def check(self, parts: Sequence[Tensor], what: str) -> None:
        """Raise unless each rank's part has the size that the parameters need."""

    @abstractmethod
    def ranges(self, parts: Sequence[Tensor], name: str) -> Iterator[tuple[Tensor, int, int]]:
        """Yield the ranges of the ranks' parts that make up a parameter, without padding."""

    def master(self, name: str) -> LazyTensor:
        """Return a whole parameter in fp32."""
        return self._whole(self.masters, name, torch.float32)

    def states(self, ranks: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the states of whole parameters, by name, from the flat states of the ranks."""
        found: dict[str, dict[str, Any]] = {name: {} for name in self.shapes}
        for rank, state in enumerate(ranks):
            if set(state) != set(ranks[0]):
                raise ValueError(
                    f"{self.label}: the optimizer has states {sorted(state)} on rank {rank}, but"
                    f" {sorted(ranks[0])} on rank 0: the files do not belong together."
                )
        for key, value in ranks[0].items():
            if key != "step" and isinstance(value, Tensor) and value.dim():
                parts = self._parts(ranks, key)
                for name, entries in found.items():
                    entries[key] = self._whole(parts, name, value.dtype)
            else:
                for entries in found.values():
                    entries[key] = counter(value) if key == "step" else _own(value)
        return found

    def _parts(self, ranks: Sequence[Mapping[str, Any]], key: str) -> list[Tensor]:
        parts = [state[key] for state in ranks]
        if not all(isinstance(part, Tensor) and part.dim() == 1 for part in parts):
            raise CannotConvert(
                f"{self.label}: the optimizer's state {key!r} does not have one number per element,"
                " so it cannot be divided among the parameters. Convert only the weights with"
                " --weights-only."
            )
        self.check(parts, f"states {key!r}")
        return parts

    def _whole(self, parts: Sequence[Tensor], name: str, dtype: torch.dtype) -> LazyTensor:
        ranges = functools.partial(self.ranges, parts, name)
        return LazyTensor.joined(ranges, self.shapes[name], dtype)

    def _wrong(self, what: str, rank: int, expected: str, found: int) -> ValueError:
        return ValueError(
            f"{self.label}: the {what} of rank {rank} should have {expected} elements for"
            f" {len(self.shapes)} parameters, but have {found}. The files do not belong together,"
            " or are damaged."
        )


def counter(step: Any) -> Tensor:
    """Return a number of steps as torch's optimizers store it."""
    return torch.tensor(float(step))


def _own(value: Any) -> Any:
    """Return a separate tensor for each parameter, since optimizers change these in place."""
    return value.clone() if isinstance(value, Tensor) else value


class EndToEnd(Flat):
    """Stages 1 and 2: parameters lie end to end, and the whole is cut into equal parts."""

    @functools.cached_property
    def starts(self) -> dict[str, int]:
        """Return where each parameter begins."""
        sizes = (prod(s) + p for s, p in zip(self.shapes.values(), self.paddings, strict=True))
        return dict(zip(self.shapes, accumulate(sizes, initial=0), strict=False))

    @functools.cached_property
    def numel(self) -> int:
        """Return one past the last element of the last parameter."""
        return max((self.starts[n] + prod(s) for n, s in self.shapes.items()), default=0)

    @functools.cached_property
    def part_numel(self) -> int:
        """Return the size of a rank's part; stored masters lack the padding at the end."""
        first, *others = self.masters
        return first.numel() if any(part.numel() for part in others) else self.most

    @property
    def most(self) -> int:
        """The largest part that the parameters can need, including padding."""
        alignment = 2 * len(self.masters)
        return -(-self.numel // alignment) * 2

    @override
    def check(self, parts: Sequence[Tensor], what: str) -> None:
        for rank, part in enumerate(parts):
            least = min(max(self.numel - rank * self.part_numel, 0), self.part_numel)
            if not least <= part.numel() <= self.most:
                raise self._wrong(what, rank, f"{least} to {self.most}", part.numel())
        if self.part_numel * len(parts) < self.numel:
            raise self._wrong(what, 0, f"{self.most}", self.part_numel)

    @override
    def ranges(self, parts: Sequence[Tensor], name: str) -> Iterator[tuple[Tensor, int, int]]:
        start = self.starts[name]
        stop = start + prod(self.shapes[name])
        for rank, part in enumerate(parts):
            before = rank * self.part_numel
            first, last = max(start - before, 0), min(stop - before, self.part_numel)
            if first < last:
                yield part, first, last


class EachCut(Flat):
    """Stage 3: every parameter is cut into equal parts, and a rank's parts lie end to end."""

    @functools.cached_property
    def starts(self) -> dict[str, int]:
        """Return where each parameter's part begins within a rank's vector."""
        world = len(self.masters)
        sizes = (part_numel(shape, world) for shape in self.shapes.values())
        return dict(zip(self.shapes, accumulate(sizes, initial=0), strict=False))

    @override
    def check(self, parts: Sequence[Tensor], what: str) -> None:
        needed = sum(part_numel(shape, len(self.masters)) for shape in self.shapes.values())
        for rank, part in enumerate(parts):
            if part.numel() != needed:
                raise self._wrong(what, rank, str(needed), part.numel())

    @override
    def ranges(self, parts: Sequence[Tensor], name: str) -> Iterator[tuple[Tensor, int, int]]:
        start, left = self.starts[name], prod(self.shapes[name])
        size = part_numel(self.shapes[name], len(self.masters))
        for part in parts:
            taken = min(left, size)
            if taken:
                yield part, start, start + taken
            left -= taken


def part_numel(shape: Sequence[int], world_size: int) -> int:
    """Return how many elements of a parameter each rank has at stage 3, including padding."""
    return -(-prod(shape) // world_size)
