"""Process groups: made once for each purpose, or ended with the run that needed them."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zero import ZeROStrategy
from lightning_zero.comm import Communicator
from lightning_zero.comm.process_groups import destroy, group_for, new_group_of_hosts
from tests.oracle.models import Block
from tests.oracle.projects import Regression, make_trainer, rows, wired
from tests.oracle.ranks import Pools
from tests.oracle.sharded import CPU


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
    """The first run makes those that last; background saves make and end one each."""
    for counts in ranks(2).run(run_each_way, str(tmp_path)):
        for way, numbers in counts.items():
            assert numbers == 6 * [numbers[0]], way


def make_and_destroy() -> None:
    before = num_groups()
    group = new_group_of_hosts()
    assert num_groups() == before + 1
    destroy(group)
    assert num_groups() == before
    destroy(group)  # ended before, with the default group: nothing to do
    comm = Communicator(CPU)
    assert group_for("sync points", of_hosts=True) is comm.control.channel.group
    before = num_groups()
    other = comm.control.separate()
    assert num_groups() == before + 1
    assert other.gather_objects(comm.control.rank) == [0, 1]
    comm.control.broadcast_object(None)  # all have received
    comm.control.leave()
    assert num_groups() == before


def test_a_channel_apart_ends_with_its_ranks(ranks: Pools) -> None:
    ranks(2).run(make_and_destroy)
