"""Saving and loading a checkpoint: one plain file by all ranks, against the alternatives.

    python examples/benchmarks/checkpoint.py                   # 1 GB over 2 ranks
    python examples/benchmarks/checkpoint.py --megabytes 100 --world 4 --rounds 5

The contenders, each for the same state (fp32 weights and two Adam averages, sharded as at stage 3):

* ``file``: ours; every rank writes its parts of one file that ``torch.load`` reads.
* ``directory``: ours with ``checkpoint="dcp"``; a directory that ``dcp`` below can read.
* ``gather``: every tensor is gathered on rank 0, which calls ``torch.save``; every rank loads all.
* ``dcp``: a torch.distributed.checkpoint directory to which each rank writes its own shards.
* ``torch.save``: one process that holds everything.

Rounds are interleaved, figures are medians, and every save is synced to disk. Memory is the peak
private memory of any rank beyond what it held before; pages of memory-mapped files are not private.
The files are dropped from the page cache before the first load (``load``), as when another run
resumes; the second (``again``) finds them there.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contenders import Ranks
from measure import in_fresh_processes, joined

from lightning_zero.checkpoint import (
    DirectorySave,
    Provenance,
    Saver,
    ShardedValue,
    collected,
    load,
)
from lightning_zero.comm import Control

NUM_TENSORS = 48


class Shards:
    """This rank's parts of ``NUM_TENSORS`` tensors."""

    def __init__(self, control: Control, megabytes: int) -> None:
        self.control = control
        numel = megabytes * 2**20 // 4 // NUM_TENSORS
        edges = [numel * rank // control.world_size for rank in range(control.world_size + 1)]
        self.numel, self.start, stop = numel, edges[control.rank], edges[control.rank + 1]
        self.parts = [torch.randn(stop - self.start) for _ in range(NUM_TENSORS)]

    def spread(self) -> dict[str, Any]:
        """Return a state dict of tensors that are sharded over the ranks."""
        return {
            str(n): ShardedValue.of(str(n), part, self.start, (self.numel,), (1,), self.control)
            for n, part in enumerate(self.parts)
        }

    def take(self, whole: dict[str, Any]) -> None:
        """Copy this rank's ranges of whole tensors."""
        for n, part in enumerate(self.parts):
            part.copy_(whole[str(n)][self.start : self.start + part.numel()])


def save_own(shards: Shards, path: str, **options: Any) -> None:
    provenance = Provenance(3, shards.control.world_size, "")
    Saver(shards.control).save({"state_dict": shards.spread()}, path, provenance, **options)


def load_own(shards: Shards, path: str) -> None:
    """Load as the strategy does: each part is copied from a mapped file, after its checksums."""
    shards.take(load(path, shards.control)["state_dict"])


def save_gathered(shards: Shards, path: str) -> None:
    whole = collected(shards.spread(), shards.control)
    if shards.control.rank == 0:
        save_alone_to(whole, path)
    dist.barrier()


def load_gathered(shards: Shards, path: str) -> None:
    shards.take(torch.load(path, weights_only=True))


def of_rank(shards: Shards) -> dict[str, Any]:
    return {f"{shards.control.rank}/{n}": part for n, part in enumerate(shards.parts)}


def save_dcp(shards: Shards, path: str) -> None:
    dcp.save(of_rank(shards), storage_writer=dcp.FileSystemWriter(path, sync_files=True))


def load_dcp(shards: Shards, path: str) -> None:
    dcp.load(of_rank(shards), storage_reader=dcp.FileSystemReader(path))


def save_alone(shards: Shards, path: str) -> None:
    save_alone_to({str(n): part for n, part in enumerate(shards.parts)}, path)


def save_alone_to(state: dict[str, Any], path: str) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


save_directory = functools.partial(save_own, kind=DirectorySave)

CONTENDERS: dict[str, tuple[Callable[..., None], Callable[..., None], bool]] = {
    "file": (save_own, load_own, True),
    "directory": (save_directory, load_own, True),
    "gather": (save_gathered, load_gathered, True),
    "dcp": (save_dcp, load_dcp, True),
    "torch.save": (save_alone, load_gathered, False),
}
"""How to save, how to load, and whether all ranks take part."""


class Peak:
    """The peak private memory of this process within the context, beyond that before."""

    def __enter__(self) -> Peak:
        self.before = self.most = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

    @property
    def megabytes(self) -> float:
        return (self.most - self.before) / 2**20


def put_out_of_cache(path: str) -> None:
    """Drop a file, or the files of a folder, from the page cache."""
    for file in Path(path).iterdir() if os.path.isdir(path) else [Path(path)]:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def work(
    rank: int, name: str, megabytes: int, path: str, job: Ranks, port: int, answer: Path
) -> None:
    """Run one rank of one contender in one round."""
    with joined(rank, job, port):
        save, reload, _ = CONTENDERS[name]
        shards = Shards(Control(), megabytes)
        before = [part.clone() for part in shards.parts] if megabytes <= 64 else []
        numbers: list[float] = []
        for action in (save, reload, reload):
            dist.barrier()
            with Peak() as peak:
                start = time.perf_counter()
                action(shards, path)
                dist.barrier()
                numbers += [time.perf_counter() - start, peak.megabytes]
            if action is save:
                put_out_of_cache(path)
            else:
                assert all(torch.equal(a, b) for a, b in zip(before, shards.parts, strict=False))
            for part in shards.parts:
                part.zero_()
        worst = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if rank == 0:
            answer.write_text(json.dumps(worst.tolist()))
        dist.barrier()


def measure(name: str, world: int, megabytes: int, folder: str | None) -> list[float]:
    """Return seconds and megabytes of a save and of two loads, the worst over the ranks."""
    job = Ranks(world if CONTENDERS[name][2] else 1)
    with tempfile.TemporaryDirectory(dir=folder) as room:
        found: list[float] = in_fresh_processes(work, name, megabytes, f"{room}/state", job)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the whole state")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="folder to write to; default: a temporary one")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    options = parser.parse_args()
    rounds: dict[str, list[list[float]]] = {name: [] for name in options.only}
    for _ in range(options.rounds):
        for name in options.only:
            rounds[name].append(measure(name, options.world, options.megabytes, options.folder))
    over = f"{options.megabytes} MB over {options.world} ranks"
    print(f"{over}, median of {options.rounds} rounds, worst rank")
    print(f"{'':<20}{'save s':>9}{'save MB':>9}{'load s':>9}{'load MB':>9}{'again s':>9}")
    for name, numbers in rounds.items():
        medians = [statistics.median(column) for column in zip(*numbers, strict=True)]
        print(f"{name:<20}" + "".join(f"{value:>9.2f}" for value in medians[:-1]))


if __name__ == "__main__":
    main()
