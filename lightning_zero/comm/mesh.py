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

import torch
from torch import Tensor


class Axis:
    """The ranks along one axis of a mesh.

    Args:
        groups: All ranks, a row for each group along the axis.
        rank: This process, as a global rank.

    Attributes:
        groups: As given.
        ranks: The group of this process, as global ranks.
        rank: This process's rank in its group.
        size: Number of ranks in a group.
    """

    def __init__(self, groups: Tensor, rank: int) -> None:
        self.groups: list[list[int]] = groups.tolist()
        self.ranks = next(group for group in self.groups if rank in group)
        self.rank, self.size = self.ranks.index(rank), len(self.ranks)


class Mesh:
    """All ranks, arranged along axes.

    Args:
        rank: This process.
        world_size: Number of all ranks.
        num_shards: Data-parallel ranks of one copy, a divisor of their number; by default, all.
        tensor_size: Number of tensor-parallel ranks, a divisor of ``world_size``.

    Attributes:
        shard: The axis over which buffers are sharded.
        replicate: The axis along which shards are replicated.
        data: The axis over which gradients are averaged: all ranks, or the data-parallel ones.
        tensor: The axis over which tensor parallelism cuts parameters, if it does.
        model: The axis of all ranks that have parts of one copy of the model.
        size: Number of ranks over which gradients are averaged.
    """

    def __init__(
        self, rank: int, world_size: int, num_shards: int | None = None, tensor_size: int = 1
    ) -> None:
        self.size = world_size // tensor_size
        num_shards = num_shards or self.size
        grid = torch.arange(world_size, device="cpu").view(-1, num_shards, tensor_size)
        self.shard = Axis(grid.transpose(1, 2).flatten(0, 1), rank)
        self.replicate = Axis(grid.permute(1, 2, 0).flatten(0, 1), rank)
        self.data = Axis(grid.flatten(0, 1).T, rank)
        self.model = Axis(grid.flatten(1), rank)
        self.tensor = Axis(grid.flatten(0, 1), rank) if tensor_size > 1 else None
