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
