"""Axes of ranks.

Buffers are sharded over one axis, and each shard is replicated along the other. Consecutive ranks,
such as those of one host, hold the shards of one copy. Six ranks in two copies::

    shard      0 1 2 | 3 4 5
    replicate  0 3 | 1 4 | 2 5

With tensor parallelism, consecutive ranks have parts of the same parameters, and each part is
sharded over the others. Four ranks, two parts::

    shard   0 2 | 1 3
    tensor  0 1 | 2 3

Reductions run along the shard axis first and leave each rank its shard; then the shards are added
up along the other axis. Gathers run along the shard axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """The ranks along one axis of a mesh.

    Attributes:
        groups: All ranks, in groups along the axis.
        ranks: The group of this process, as global ranks.
        rank: This process's rank in its group.
        size: Number of ranks in a group.
    """

    groups: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    rank: int
    size: int

    @classmethod
    def of(cls, groups: Iterable[Iterable[int]], rank: int) -> Axis:
        """Return the axis with these groups for the global rank ``rank``."""
        every = tuple(tuple(group) for group in groups)
        own = next(group for group in every if rank in group)
        return cls(every, own, own.index(rank), len(own))


@dataclass(frozen=True)
class Mesh:
    """All ranks, arranged along axes.

    Attributes:
        shard: The axis over which buffers are sharded.
        replicate: The axis along which shards are replicated.
        data: The axis over which gradients are averaged: all ranks, or the data-parallel ones.
        tensor: The axis over which tensor parallelism cuts parameters, if it does.
        model: The axis of all ranks that have parts of one copy of the model.
    """

    shard: Axis
    replicate: Axis
    data: Axis
    model: Axis
    tensor: Axis | None = None

    @property
    def size(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return self.data.size

    def data_numbers(self, axis: Axis) -> tuple[int, ...]:
        """Return the data-parallel numbers of the ranks of an axis other than the tensor axis."""
        size = 1 if self.tensor is None else self.tensor.size
        return tuple(rank // size for rank in axis.ranks)

    @classmethod
    def of(
        cls,
        rank: int,
        world_size: int,
        num_shards: int | None = None,
        tensor_size: int = 1,
    ) -> Mesh:
        """Return the mesh with copies of ``num_shards`` data-parallel ranks; by default, of all.

        Raises:
            ValueError: The tensor-parallel ranks do not divide the ranks, or the shards the
                data-parallel ranks.
        """
        data_size = world_size // tensor_size
        num_shards = num_shards or data_size
        for what, number, whole in (
            ("tensor-parallel ranks", tensor_size, world_size),
            ("shards", num_shards, data_size),
        ):
            if whole % number:
                raise ValueError(
                    f"Expected a number of {what} that divides the {whole} ranks, got {number}."
                )
        ranks, data = range(world_size), range(data_size)

        def axis(groups: Iterable[Iterable[int]]) -> Axis:
            """Return the axis of groups of data-parallel ranks, once for each part of the model."""
            by_part = [
                [one * tensor_size + part for one in group]
                for group in groups
                for part in range(tensor_size)
            ]
            return Axis.of(by_part, rank)

        copies = [data[first : first + num_shards] for first in data[::num_shards]]
        models = [[one for one in ranks if one // tensor_size in copy] for copy in copies]
        of_tensor = [ranks[first : first + tensor_size] for first in ranks[::tensor_size]]
        return cls(
            shard=axis(copies),
            replicate=axis(data[first::num_shards] for first in data[:num_shards]),
            data=axis([data]),
            model=Axis.of(models, rank),
            tensor=Axis.of(of_tensor, rank) if tensor_size > 1 else None,
        )
