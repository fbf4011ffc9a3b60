"""Sync points: in how many hops all ranks know the maximum of their flags."""

from __future__ import annotations

from math import log2

import pytest
import torch

from lightning_zero.comm import Communicator, Control, Shards, SyncPoint
from lightning_zero.comm.control import hops
from tests.oracle.ranks import Pools


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 16, 24, 64, 100, 128, 256, 511, 512])
def test_all_ranks_know_of_all_after_few_hops(size: int) -> None:
    """Each message waits for the one before: a hop. Gloo's all-reduce takes 2 (size - 1)."""
    known = [{rank} for rank in range(size)]
    ways = [[*hops(rank, size)] for rank in range(size)]
    number = len(ways[0])
    assert number <= 2 * log2(size)
    for hop in range(number):
        before = [set(one) for one in known]
        for rank, way in enumerate(ways):
            target, source = way[hop]
            assert ways[target][hop][1] == rank, "what one sends, the other receives"
            known[rank] |= before[source]
    assert all(len(one) == size for one in known)


def _maxima(number: int) -> list[bytes]:
    """Sync points of which every other one is begun ahead of the next, with flags of all ranks."""
    control = Control()
    found = []
    for _ in range(number):
        own = bytes([control.rank, 100 - control.rank])
        ahead = control.call(SyncPoint.BEGIN, own)
        found.append(control.call(SyncPoint.STEP, own).wait())
        found.append(ahead.wait())
    control.call(SyncPoint.BEGIN, own)  # abandoned, as after an exception: the others' still ends
    found.append(control.call(SyncPoint.END, own).wait())
    control.watchdog.leave()
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_ranks_get_the_maxima(ranks: Pools, world: int) -> None:
    expected = [bytes([world - 1, 100])] * 21
    assert ranks(world).run(_maxima, 10) == [expected] * world


def _train_after_an_exception() -> None:
    """One rank has begun a sync point and a gather that the other did not come to."""
    cpu = torch.device("cpu")
    left = Communicator(cpu, reads_peers=False)
    if left.control.rank:
        left.control.call(SyncPoint.FORWARD)
        left.transport.gather(torch.empty(4), Shards(torch.ones(2)), unit="a", tag=1)
    left.control.watchdog.leave()
    comm = Communicator(cpu, reads_peers=False)
    whole = torch.empty(4)
    comm.transport.gather(whole, Shards(torch.full((2,), 3.0)), unit="a", tag=1).wait()
    assert whole.tolist() == 4 * [3.0]
    ahead = comm.control.call(SyncPoint.BEGIN)
    comm.control.call(SyncPoint.STEP).wait()
    ahead.wait()
    comm.control.watchdog.leave()


def test_messages_of_a_run_do_not_meet_those_of_another(ranks: Pools) -> None:
    ranks(2).run(_train_after_an_exception)
