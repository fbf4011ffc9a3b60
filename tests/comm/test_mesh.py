"""Axes of ranks, and what is gathered and added up along them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lightning_zero.comm import Communicator, Extent, Mesh, SyncPoint
from tests.oracle.projects import WAYS
from tests.oracle.ranks import Pools

CPU = torch.device("cpu")
NUMEL = 384


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


def test_ranks_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor-parallel ranks that divides the 6 ranks, got 4"):
        Mesh(0, 6, tensor_size=4)
    with pytest.raises(ValueError, match=r"shards that divides the 6 ranks, got 4"):
        Mesh(0, 6, num_shards=4)


def _summand(rank: int) -> torch.Tensor:
    """Whole numbers, whose sum has no rounding."""
    return torch.randint(100, (NUMEL,), generator=torch.Generator().manual_seed(rank)).float()


def _over_two_axes(way: str) -> list[dict[tuple[str, str], int]]:
    """Reduce and gather on a mesh of 2 x 2; returns what each axis sent."""
    comm = Communicator(CPU, num_shards=2, **WAYS[way])
    total = sum(_summand(rank) for rank in range(comm.mesh.size))
    assert isinstance(total, torch.Tensor)
    partial_sum = comm.transport.reduce_buffer(NUMEL, torch.float32)
    partial_sum.tensor.copy_(_summand(comm.control.rank))
    expected = total.chunk(2)[comm.mesh.shard.rank]
    out = torch.empty_like(expected)
    comm.transport.reduce(out, partial_sum, unit="gradients", tag=1).wait()
    comm.transports["replicate"].all_reduce(out, unit="gradients", tag=1).wait()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    master = next(comm.transport.share([Extent(NUMEL // 2, torch.float32)]))
    with comm.write_access(SyncPoint.EDIT):
        master.own.copy_(total.chunk(2)[comm.mesh.shard.rank])
    whole = torch.empty(NUMEL)
    comm.transport.gather(whole, master, unit="weights", tag=2).wait()
    torch.testing.assert_close(whole, total, rtol=0, atol=0)
    comm.fence(SyncPoint.REFRESH)
    sent = [
        {key: one.elements for key, one in transport.ledger.total.items()}
        for transport in comm.transports.values()
    ]
    for transport in comm.transports.values():
        transport.release()
    comm.control.leave()
    return sent


@pytest.mark.parametrize("way", list(WAYS))
def test_two_axes_give_a_plain_sum(ranks: Pools, way: str) -> None:
    for shard, replicate in ranks(4).run(partial(_over_two_axes, way)):
        assert shard["gradients", "reduce"] == shard["weights", "gather"] == NUMEL // 2
        assert replicate["gradients", "reduce"] == NUMEL // 4
        assert replicate["gradients", "gather"] == NUMEL // 4
        assert ("weights", "gather") not in replicate
