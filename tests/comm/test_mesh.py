"""Axes of ranks."""

from __future__ import annotations

from lightning_zero.comm import Mesh


def test_neighbours_hold_the_shards_of_one_copy() -> None:
    mesh = Mesh(4, 6, num_shards=3)
    assert (mesh.shard.ranks, mesh.shard.rank, mesh.shard.size) == ([3, 4, 5], 1, 3)
    assert (mesh.replicate.ranks, mesh.replicate.rank, mesh.replicate.size) == ([1, 4], 1, 2)
    assert mesh.size == 6
    everyone = Mesh(4, 6)
    assert (everyone.shard.ranks, everyone.replicate.ranks) == ([*range(6)], [4])


def test_neighbours_hold_the_parts_of_one_tensor_parallel_group() -> None:
    mesh = Mesh(4, 6, tensor_size=2)
    assert mesh.tensor is not None
    assert (mesh.tensor.ranks, mesh.tensor.rank, mesh.tensor.size) == ([4, 5], 0, 2)
    assert (mesh.shard.ranks, mesh.shard.rank, mesh.shard.size) == ([0, 2, 4], 2, 3)
    assert (mesh.replicate.ranks, mesh.size) == ([4], 3)
    assert Mesh(4, 6).tensor is None
