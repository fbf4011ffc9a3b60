"""Sync points through memory: the same maxima as by messages, and an end where a rank has none."""

from __future__ import annotations

import math
import random
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from lightning_zero.comm import Communicator, SyncPoint, process_groups
from lightning_zero.comm.one_host import sync_windows
from lightning_zero.comm.one_host.window import Window
from tests.oracle.ranks import Pools

CPU = torch.device("cpu")


def flags_of(rank: int, number: int) -> bytes:
    return random.Random(1000 * rank + number).randbytes(1 + number % 64)


def maxima(rounds: int, num_flags: int) -> bool:
    """Come to many sync points, each rank in haste by turns, and compare what all get."""
    comm = Communicator(CPU)
    control, world = comm.control, comm.control.world_size
    control.channel.reserve(num_flags)
    for number in range(rounds):
        flags = flags_of(control.rank, number)
        if number % world == control.rank:
            time.sleep(3e-4)
        found = control.call(SyncPoint.END, flags).wait()
        expected = bytes(map(max, *(flags_of(rank, number) for rank in range(world))))
        assert found == expected, number
    return control.channel.memory is not None


@pytest.mark.parametrize("world", [2, 4])
def test_every_flag_becomes_its_maximum(ranks: Pools, world: int) -> None:
    assert ranks(world).run(maxima, 100, 64) == [True] * world


def test_flags_without_room_go_by_messages(ranks: Pools) -> None:
    assert ranks(2).run(maxima, 3, sync_windows.MOST_FLAGS + 1) == [False, False]


def waits_later() -> None:
    """Wait for one sync point behind the next ones, which then waits for it."""
    control = Communicator(CPU).control
    pending = control.call(SyncPoint.BEGIN, bytes([control.rank + 1]))
    for _ in range(3):
        assert control.call(SyncPoint.END, bytes([control.rank + 7])).wait() == b"\x08"
    assert pending.wait() == b"\x02"


def test_a_sync_point_may_be_waited_for_behind_others(ranks: Pools) -> None:
    ranks(2).run(waits_later)


def abandons() -> None:
    """Leave a sync point that was never waited for, on both ranks, for others."""
    control = Communicator(CPU).control
    control.call(SyncPoint.BEGIN)
    control.call(SyncPoint.STEP).wait()
    # The ranks have come to the same number of them, but to others.
    control.call(SyncPoint.BEGIN if control.rank else SyncPoint.END)
    with pytest.raises(RuntimeError, match="The ranks have diverged"):
        control.call(SyncPoint.STEP if control.rank else SyncPoint.FORWARD).wait()


def test_a_sync_point_may_be_abandoned(ranks: Pools) -> None:
    ranks(2).run(abandons)


def has_no_flags() -> None:
    """An optimizer of none of the model's parameters asks for the gradients of none."""
    for windows in (None, False):
        control = Communicator(CPU, reads_peers=windows).control
        assert control.call(SyncPoint.GRADIENT, b"").wait() == b""


def test_there_may_be_no_flags(ranks: Pools) -> None:
    ranks(2).run(has_no_flags)


def parts(num_flags: tuple[int, int], others: bool) -> None:
    """Come to different sync points, or to one with other flags; no group is made any more."""
    process_groups._groups.setdefault(dist.group.WORLD, {}).pop("sync points", None)
    control = Communicator(CPU).control
    own = bytes(num_flags[control.rank])
    new_group, dist.new_group = dist.new_group, None
    try:
        pending = control.call(SyncPoint.STEP if others and control.rank else SyncPoint.EDIT, own)
        with pytest.raises(RuntimeError, match="The ranks have diverged"):
            pending.wait()
    finally:
        dist.new_group = new_group


@pytest.mark.parametrize(("num_flags", "others"), [((0, 0), True), ((1, 0), False)])
def test_ranks_that_part_make_no_group(
    ranks: Pools, num_flags: tuple[int, int], others: bool
) -> None:
    """Some may never come to make one."""
    ranks(2).run(parts, num_flags, others)


def is_late() -> None:
    """Rank 1 comes when rank 0 has given it up."""
    windows = Communicator(CPU).control.channel.memory
    assert windows is not None
    windows._seconds = 0.05
    if dist.get_rank():
        dist.barrier()
        windows.publish(b"late")
        return
    word = windows.publish(b"mine")
    with pytest.raises(dist.DistError, match="rank 1 did not arrive within"):
        word.wait()
    windows._seconds = math.inf
    dist.barrier()
    word.wait()
    assert word.maxima == b"mite"


def test_a_rank_that_does_not_come_ends_the_wait(ranks: Pools) -> None:
    ranks(2).run(is_late)


def test_a_process_that_has_ended_is_known() -> None:
    """Also before its parent takes notice, when its number is still there."""
    own = Window.create(sync_windows._CAPACITY, 1)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        desk = sync_windows._Desk(own.address._replace(process=child.pid), own)
        assert not desk.has_ended
        assert child.stdin is not None
        child.stdin.close()  # which ends it
        deadline = time.monotonic() + 60.0
        while not desk.has_ended and time.monotonic() < deadline:
            time.sleep(0.05)
        assert desk.has_ended
