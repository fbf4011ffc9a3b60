"""Process groups: made once for each purpose, or ended with the run that needed them."""

from __future__ import annotations

import gc
import os
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed import HashStore

from lightning_zero import ZeROStrategy, comm
from lightning_zero.comm import (
    Communicator,
    Control,
    SyncPoint,
    hosts,
    process_groups,
    towards,
    transport,
    watchdog,
)
from lightning_zero.comm.process_groups import group_for, store_of_incarnation
from tests.oracle.models import Block
from tests.oracle.projects import Regression, communicator_by, make_trainer, rows, wired
from tests.oracle.ranks import Pools


def num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def run_often(way: str, folder: str) -> list[int]:
    """Return how many groups there are after each of several runs."""
    counts = []
    with wired(way):
        for _ in range(2):
            module = Regression()
            trainer = make_trainer(
                ZeROStrategy(3, units={Block}, async_checkpoint=True),
                enable_checkpointing=True,
                callbacks=[ModelCheckpoint(f"{folder}/{way}", save_top_k=0, save_last=True)],
                limit_train_batches=1,
                limit_val_batches=1,
                num_sanity_val_steps=0,
            )
            for run in (trainer.fit, trainer.validate, trainer.test):
                run(module, rows(8))
                counts.append(num_groups())
    return counts


def run_each_way(folder: str) -> dict[str, list[int]]:
    return {way: run_often(way, folder) for way in ("windows", "backend")}


def test_runs_of_the_trainer_leave_no_groups(ranks: Pools, tmp_path: Path) -> None:
    """The first run makes those that last, also that of background saves."""
    for counts in ranks(2).run(run_each_way, str(tmp_path)):
        for way, numbers in counts.items():
            assert numbers == 6 * [numbers[0]], way


# ---------------------------------------------------------------------------- accelerators


class Options:
    """What NCCL's options have."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)


@pytest.mark.parametrize("name", ["nccl", "cpu:gloo,cuda:nccl"])
def test_weights_and_gradients_go_before_computation_and_keep_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Of the default group, whatever the name of its device."""
    made: list[dict[str, Any]] = []
    limit = timedelta(seconds=77)
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=limit))
    default = SimpleNamespace(
        _device_types=[torch.device("xpu")], _get_backend=lambda device: backend
    )
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: default)
        monkeypatch.setattr(dist, "get_backend", lambda group=None: name)
        monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), False)
        monkeypatch.setattr(dist, "new_group", lambda *_, **options: made.append(options))
        group_for("weights", is_urgent=True)
        group_for("owners")
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()
    urgent, other = made
    assert urgent["pg_options"].is_high_priority_stream
    assert urgent["pg_options"]._timeout == urgent["timeout"] == other["timeout"] == limit
    assert urgent["backend"] == "nccl"
    assert other["pg_options"] is None


def test_gloo_connects_ranks_by_the_way_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "GLOO_SOCKET_IFNAME"
    monkeypatch.delenv(variable, raising=False)
    assert hosts.interface_of(hosts.own_address("127.0.0.1")) == "lo"
    with towards("127.0.0.1"):
        assert variable not in os.environ, "one host: gloo's own choice"
    monkeypatch.setattr(hosts, "own_address", lambda _: "10.0.0.7")
    monkeypatch.setattr(hosts, "interface_of", {"10.0.0.7": "ib0"}.get)
    with towards("node0"):
        assert os.environ[variable] == "ib0"
    assert variable not in os.environ
    failure = "[third_party/gloo/gloo/transport/tcp/pair.cc:1] connect: timed out"
    with (
        pytest.raises(RuntimeError, match=f"by 'ib0', .* to node0. Set {variable}"),
        towards("node0"),
    ):
        raise RuntimeError(failure)
    monkeypatch.setenv(variable, "eth1")
    with towards("node0"):
        assert os.environ[variable] == "eth1"


def lacks_a_verb() -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Backend none does not support reduce_scatter")

    for verb in ("_all_gather", "_reduce_scatter"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transport, verb, fail)
            with pytest.raises(ValueError, match=r"'gloo' could not all-gather and.*type 'cpu'"):
                communicator_by("backend")


def test_a_backend_without_what_weights_need_is_refused_at_setup(ranks: Pools) -> None:
    ranks(2).run(lacks_a_verb)


def test_a_device_without_streams_is_refused_at_setup() -> None:
    with pytest.raises(ValueError, match=r"no streams and events, or .* of type 'mps'"):
        Communicator(torch.device("mps"))


def num_sockets() -> int:
    files = Path("/proc/self/fd").iterdir()
    return sum(file.is_symlink() and "socket" in str(file.readlink()) for file in files)


def connected(most: int) -> int:
    """How many connections a group of hosts has when it is made; messages of each kind arrive."""
    control = Control()
    gc.collect()
    control.call(SyncPoint.STEP).wait()  # makes what all control planes share
    while any(hub._num_missing for hub in watchdog._hubs):  # it accepts lines in a thread
        time.sleep(0.01)
    time.sleep(2 * watchdog.TICK)  # and closes those of runs that were collected
    before = num_sockets()
    with (
        mock.patch.object(process_groups, "_MOST_CONNECTED", most),
        mock.patch.object(comm.control, "kept", lambda _, make: make()),
    ):
        other = control.separate()
    found = num_sockets() - before
    control.call(SyncPoint.STEP).wait()  # all have counted, before the first of them connects
    rank, world = other.rank, other.world_size
    assert other.gather_objects("a" * 600 * rank) == ["a" * 600 * r for r in range(world)]
    assert other.broadcast_object(rank) == 0
    parts = [*other.collect(torch.full((3,), rank, dtype=torch.uint8), 3 * rank)]
    found_parts = [(at, part.tolist()) for at, part in parts]
    assert found_parts == [(3 * r, [r] * 3) for r in range(world)] or rank
    control.watchdog.leave()
    return found


def connected_both_ways() -> list[int]:
    return [connected(most) for most in (4, 3)]


def test_many_ranks_are_connected_only_where_they_send(ranks: Pools) -> None:
    for every, few in ranks(4).run(connected_both_ways):
        assert (every, few) == (4, 1)  # with the one that listens


def _host_group_beside_an_accelerator() -> None:
    world, device = dist.group.WORLD, torch.device("xpu", 0)
    world.bound_device_id = device
    try:
        group = process_groups.new_group_of_hosts()
        assert world.bound_device_id == device
    finally:
        world.bound_device_id = None
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == 2
    dist.destroy_process_group(group)


def test_hosts_have_groups_where_the_default_one_is_bound_to_an_accelerator(ranks: Pools) -> None:
    ranks(2).run(_host_group_beside_an_accelerator)


# ---------------------------------------------------------------------------- restarts


def test_missing_ranks_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"Expected 4 ranks within .* 3 did not join: 1, 2, 3"):
        store_of_incarnation(HashStore(), 0, 4, timedelta(milliseconds=1))
