"""Axes of ranks.

Buffers are sharded over one axis, and each shard is replicated along the other. Consecutive ranks,
such as those of one host, hold the shards of one copy. Six ranks in two copies::

    shard      0 1 2 | 3 4 5
    replicate  0 3 | 1 4 | 2 5

For backward passes, weights may be sharded over fewer ranks of one copy. Four ranks in one copy::

    shard      0 1 2 3
    backward   0 1 | 2 3

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
    """All ranks, arranged along two axes.

    Attributes:
        shard: The axis over which buffers are sharded.
        replicate: The axis along which shards are replicated.
        size: Number of ranks over which gradients are averaged: all, or the data-parallel ones.
        backward: The axis over which weights are sharded for a backward pass, if it is another.
        tensor: The axis over which tensor parallelism cuts parameters, if it does.
    """

    shard: Axis
    replicate: Axis
    size: int
    backward: Axis | None = None
    tensor: Axis | None = None

    @classmethod
    def of(
        cls,
        rank: int,
        world_size: int,
        num_shards: int | None = None,
        num_backward_shards: int | None = None,
        tensor_size: int = 1,
    ) -> Mesh:
        """Return the mesh with copies of ``num_shards`` ranks; one copy of all by default.

        With tensor parallelism over ``tensor_size`` ranks, there is one copy of each part.

        Raises:
            ValueError: The shards do not divide the ranks, or the backward shards the shards.
        """
        if tensor_size > 1:
            return cls._with_tensor_axis(rank, world_size, tensor_size)
        num_shards = num_shards or world_size
        num_backward = num_backward_shards or num_shards
        for what, number, whole, of in (
            ("shards", num_shards, world_size, ""),
            ("backward shards", num_backward, num_shards, " of a copy"),
        ):
            if whole % number:
                raise ValueError(
                    f"Expected a number of {what} that divides the {whole} ranks{of}, got {number}."
                )
        ranks = range(world_size)
        copies = [ranks[first : first + num_shards] for first in ranks[::num_shards]]
        same = [ranks[first::num_shards] for first in ranks[:num_shards]]
        parts = [ranks[first : first + num_backward] for first in ranks[::num_backward]]
        backward = Axis.of(parts, rank) if num_backward < num_shards else None
        return cls(Axis.of(copies, rank), Axis.of(same, rank), world_size, backward)

    @classmethod
    def _with_tensor_axis(cls, rank: int, world_size: int, tensor_size: int) -> Mesh:
        if world_size % tensor_size:
            raise ValueError(
                f"Expected a number of tensor-parallel ranks that divides the {world_size} ranks,"
                f" got {tensor_size}."
            )
        ranks = range(world_size)
        same_part = [ranks[first::tensor_size] for first in ranks[:tensor_size]]
        of_parts = [ranks[first : first + tensor_size] for first in ranks[::tensor_size]]
        return cls(
            Axis.of(same_part, rank),
            Axis.of([[one] for one in ranks], rank),
            world_size // tensor_size,
            tensor=Axis.of(of_parts, rank),
        )
