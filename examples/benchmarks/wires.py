"""Every transport of the package beside torch's own collectives: times, elements sent, sums.

    python examples/benchmarks/wires.py                       # gloo, and NCCL where there are GPUs
    python examples/benchmarks/wires.py --mib 64 --rounds 50 --devices cpu --world 4
    python examples/benchmarks/wires.py --latency 2 4 8 16    # of sync points, by ranks

``Communicator`` chooses one of three transports, and this shows why. A size is that of the whole
tensor, of which each of N ranks has, or wants, a shard of 1/N. Ours, the chosen one marked:

* ``shared memory``, ``point to point``, ``collectives``: the package's transports.
  ``gather`` fills the whole tensor from all shards, ``reduce`` writes the sum of this rank's shard.

Torch's, on the default group:

* ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` do the same.
* ``all_to_all_single + sum`` sends every rank its part and adds up the parts received.
* ``all_reduce`` and ``broadcast`` leave whole tensors everywhere, like DDP's gradients and buffers.

The same processes run all rounds, rounds are interleaved (A B C A B C), and a round's time is the
slowest rank's, from a barrier to the use of the result; inputs are written before. Every result of
every round is compared with what each rank can compute alone: bit for bit, or up to rounding where
a backend adds three or more summands in its own order. *Sent* are rank 0's elements as our ledger
counts them, *through sockets* as the kernel counts them for all connections of the process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import machine
import torch
import torch.distributed as dist
from contenders import Ranks
from measure import in_fresh_processes, joined
from torch import Tensor

from lightning_zero.comm import Control, Extent, SyncPoint, sum_into, sum_of
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.control import hops
from lightning_zero.comm.transport import Collectives
from lightning_zero.plan.layout import ALIGNMENT

# torch 2.13 renamed the two and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


_MEETINGS = 50


@dataclass(frozen=True)
class Job(Ranks):
    """A run on one kind of device."""

    mib: tuple[float, ...] = (1, 16, 64)
    rounds: int = 21
    warmup: int = 3


class Values:
    """One tensor for each rank, known to all ranks, and the expected results.

    Attributes:
        everybodys: The tensors of all ranks.
        own: This rank's tensor.
        gathered: Every rank's shard of its own tensor.
        total: The sum of all tensors, added up in the order of the ranks.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # Shards are aligned, as every layout's are.
        numel = -(-numel // (ALIGNMENT * self.world)) * ALIGNMENT * self.world
        seeds = [torch.Generator().manual_seed(rank) for rank in range(self.world)]
        self.everybodys = [torch.randn(numel, generator=seed).to(device) for seed in seeds]
        self.own = self.everybodys[self.rank]
        shards = [whole.view(self.world, -1)[r] for r, whole in enumerate(self.everybodys)]
        self.gathered = torch.cat(shards)
        self.total = torch.empty_like(self.own)
        sum_into(self.total, self.everybodys)

    def shard(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of ``whole``."""
        return whole.view(self.world, -1)[self.rank]

    @property
    def has_one_order(self) -> bool:
        """Return whether a sum has the same bits in any order."""
        return self.world <= 2


class Way(NamedTuple):
    """One way to gather or to reduce.

    ``given`` writes the input, untimed; ``run`` is timed and must leave ``expected`` in ``out``.
    """

    out: Tensor
    expected: Tensor
    run: Callable[[Any], Any]
    given: Callable[[], Any] = lambda: None
    comm: Communicator | None = None
    is_exact: bool = True

    def __call__(self) -> float:
        """Return this rank's seconds from a barrier to the use of the result."""
        self.out.fill_(nan)
        given = self.given()
        settle(self.out.device)
        start = time.perf_counter()
        self.run(given)
        if self.out.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def check(self, name: str) -> None:
        """Raise unless the result is right."""
        tolerance = {"rtol": 0, "atol": 0} if self.is_exact else {"rtol": 1e-5, "atol": 1e-5}
        if not torch.allclose(self.out, self.expected, **tolerance):
            worst = float((self.out - self.expected).abs().max())
            raise RuntimeError(f"{name} is wrong by up to {worst}, so its time is meaningless.")


def settle(device: torch.device) -> None:
    """Wait for all pending work, on all ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def our_gather(comm: Communicator, values: Values) -> Way:
    part, out = values.shard(values.own), torch.empty_like(values.own)
    master = next(comm.transport.share([Extent(part.numel(), part.dtype)]))
    master.own.copy_(part)

    def run(_: None) -> None:
        comm.transport.gather(out, master, unit="", tag=1).wait()

    return Way(out, values.gathered, run, comm=comm)


def our_reduce(comm: Communicator, values: Values) -> Way:
    out = torch.empty_like(values.shard(values.own))

    def given() -> Any:
        buffer = comm.transport.reduce_buffer(values.own.numel(), out.dtype)
        buffer.tensor.copy_(values.own)
        return buffer

    def run(buffer: Any) -> None:
        comm.transport.reduce(out, buffer, unit="", tag=1).wait()

    is_exact = name_of(comm) != "collectives" or values.has_one_order
    return Way(out, values.shard(values.total), run, given, comm, is_exact)


def all_gather_into_tensor(values: Values) -> Way:
    part, out = values.shard(values.own), torch.empty_like(values.own)
    return Way(out, values.gathered, lambda _: _all_gather(out, part))


def broadcast(values: Values) -> Way:
    out = torch.empty_like(values.own)
    first = values.everybodys[0]
    given = (lambda: out.copy_(first)) if values.rank == 0 else (lambda: None)
    return Way(out, first, lambda _: dist.broadcast(out, 0), given)


def reduce_scatter_tensor(values: Values) -> Way:
    whole, out = torch.empty_like(values.own), torch.empty_like(values.shard(values.own))
    return Way(
        out,
        values.shard(values.total),
        lambda _: _reduce_scatter(out, whole),
        lambda: whole.copy_(values.own),
        is_exact=values.has_one_order,
    )


def all_to_all_and_sum(values: Values) -> Way:
    inbox, out = torch.empty_like(values.own), torch.empty_like(values.shard(values.own))

    def run(_: None) -> None:
        dist.all_to_all_single(inbox, values.own)
        sum_into(out, list(inbox.view(values.world, -1)))

    return Way(out, values.shard(values.total), run)


def all_reduce(values: Values) -> Way:
    out = torch.empty_like(values.own)
    return Way(
        out,
        values.total,
        lambda _: dist.all_reduce(out),
        lambda: out.copy_(values.own),
        is_exact=values.has_one_order,
    )


GATHERS = {"all_gather_into_tensor": all_gather_into_tensor, "broadcast": broadcast}
REDUCES = {
    "all_to_all_single + sum": all_to_all_and_sum,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "all_reduce": all_reduce,
}
"""Torch's own ways, beside our two verbs."""


NAMES = {
    "SharedMemory": "shared memory",
    "Transport": "point to point",
    "Collectives": "collectives",
}


def name_of(comm: Communicator) -> str:
    return NAMES[type(comm.transport).__name__]


def transports(device: torch.device) -> dict[str, Communicator]:
    """Return a ``Communicator`` for each transport available here, the default one first."""
    found = [Communicator(device)]
    if found[0].transport.reads_peers:
        found.append(Communicator(device, reads_peers=False))
    if dist.get_backend() == "gloo":
        comm = Communicator(device, reads_peers=False)
        comm.transport = Collectives(comm.control, comm.mesh.shard, device)
        found.append(comm)
    return {name_of(comm): comm for comm in found}


def ways(comms: dict[str, Communicator], values: Values) -> dict[str, Way]:
    """Return every way of this backend by name: first those that gather, then those that add."""
    return {
        **{f"{name} gather": our_gather(comm, values) for name, comm in comms.items()},
        **{name: build(values) for name, build in GATHERS.items()},
        **{f"{name} reduce": our_reduce(comm, values) for name, comm in comms.items()},
        **{name: build(values) for name, build in REDUCES.items()},
    }


def traffic(name: str, way: Way) -> dict[str, int | None]:
    """Return the elements that one untimed run sends, by our ledger and through sockets."""
    ledger = way.comm and way.comm.transport.ledger
    if ledger is not None:
        ledger.end_step()
    bytes_before = machine.socket_bytes()
    way()
    # After the barrier everything has been received, and hence sent.
    settle(way.out.device)
    way.check(name)
    sent = None
    if ledger is not None:
        ledger.end_step()
        sent = sum_of(ledger.last_step).elements
    itemsize = way.out.element_size()
    on_sockets = None
    if bytes_before is not None and dist.get_backend() == "gloo":
        on_sockets = (machine.socket_bytes() - bytes_before) // itemsize
    return {"sent": sent, "on_sockets": on_sockets}


def measure(candidates: dict[str, Way], job: Job) -> dict[str, dict[str, Any]]:
    """Return each way's median and range in milliseconds, and its traffic."""
    rows: dict[str, dict[str, Any]] = {name: traffic(name, way) for name, way in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(job.warmup + job.rounds):
        for name, way in candidates.items():
            times[name].append(1000 * way())
            way.check(name)
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, times)
    for name, row in rows.items():
        rounds = list(zip(*(times[name] for times in everybodys), strict=True))
        slowest = [max(round_) for round_ in rounds[job.warmup :]]
        row.update(ms=statistics.median(slowest), ms_range=[min(slowest), max(slowest)])
    return rows


def compare(job: Job) -> list[dict[str, Any]]:
    """Return the rows of all sizes, on this rank of a process group."""
    device = torch.device(job.device)
    comms = transports(device)
    chosen = next(iter(comms))
    found = []
    for mib in job.mib:
        values = Values(int(mib * 2**20) // 4, device)
        for name, row in measure(ways(comms, values), job).items():
            place = {"backend": dist.get_backend(), "world": job.world, "mib": mib, "way": name}
            found.append({**place, **row, "is_chosen": name.startswith(f"{chosen} ")})
        for comm in comms.values():
            comm.transport.release_scratch()
            comm.transport.release()
    for comm in comms.values():
        comm.control.watchdog.leave()
    return found


def work(rank: int, job: Job, port: int, answer: Path) -> None:
    """Run one rank from start to end."""
    with joined(rank, job, port):
        rows = compare(job)
        if rank == 0:
            answer.write_text(json.dumps(rows))
        settle(torch.device(job.device))


def meet(rank: int, job: Job, port: int, answer: Path) -> None:
    """Time sync points, and gloo's all-reduce of a message as large, in alternating rounds."""
    with joined(rank, job, port):
        control = Control()
        message = torch.zeros(control.capacity, dtype=torch.uint8)
        group = control.group
        ways: dict[str, Callable[[], Any]] = {
            "sync point": lambda: control.call(SyncPoint.STEP).wait(),
            "all_reduce": lambda: dist.all_reduce(message, dist.ReduceOp.MAX, group=group),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(job.warmup + job.rounds):
            for name, way in ways.items():
                begin = time.perf_counter()
                for _ in range(_MEETINGS):
                    way()
                if number >= job.warmup:
                    found[name].append((time.perf_counter() - begin) / _MEETINGS)
        if rank == 0:
            medians = {name: 1e6 * statistics.median(times) for name, times in found.items()}
            number_of_hops = len([*hops(0, job.world)])
            answer.write_text(json.dumps({"hops": number_of_hops, **medians}))
        dist.barrier()
        control.watchdog.leave()


def latency_table(worlds: list[int], rounds: int) -> str:
    """Return a Markdown table of the times of sync points, by the number of ranks."""
    lines = [
        "| ranks | hops | sync point, µs | gloo's hops | its all-reduce, µs |",
        "|---" * 5 + "|",
    ]
    for world in worlds:
        row = in_fresh_processes(meet, Job(world, rounds=rounds))
        own, gloos = row["sync point"], row["all_reduce"]
        lines.append(f"| {world} | {row['hops']} | {own:.0f} | {2 * (world - 1)} | {gloos:.0f} |")
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table for each backend and size."""
    lines: list[str] = []
    headings = [f"{row['backend']}, {row['world']} ranks, {row['mib']:g} MiB" for row in rows]
    for number, (row, heading) in enumerate(zip(rows, headings, strict=True)):
        if heading not in headings[:number]:
            lines += ["", f"| {heading} | ms | range | sent | through sockets |", "|---" * 5 + "|"]
        low, high = row["ms_range"]
        lines.append(
            f"| {row['way']}{' (chosen)' if row['is_chosen'] else ''} | {row['ms']:.2f}"
            f" | {low:.2f} to {high:.2f}"
            f" | {_millions(row['sent'])} | {_millions(row['on_sockets'])} |"
        )
    return "\n".join(lines[1:])


def _millions(elements: int | None) -> str:
    return "" if elements is None else f"{elements / 1e6:.2f} M"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("--devices", nargs="+", choices=here, default=here)
    parser.add_argument("--world", type=int, default=2, help="ranks; on GPUs at most one for each")
    parser.add_argument("--mib", type=float, nargs="+", default=Job.mib, help="sizes of tensors")
    parser.add_argument("--rounds", type=int, default=Job.rounds)
    parser.add_argument("--output", type=Path, help="folder for wires.json")
    parser.add_argument("--latency", type=int, nargs="+", help="numbers of ranks at sync points")
    options = parser.parse_args()
    if options.latency:
        print(f"{machine.description()}, median of {options.rounds} rounds of {_MEETINGS}\n")
        print(latency_table(options.latency, options.rounds))
        return
    rows = []
    for device in options.devices:
        world = options.world if device == "cpu" else min(options.world, torch.cuda.device_count())
        job = Job(world, device=device, mib=tuple(options.mib), rounds=options.rounds)
        rows += in_fresh_processes(work, job)
    date = time.strftime("%Y-%m-%d")
    print(f"{date}, {machine.description()}, median of {options.rounds} rounds\n")
    print(table(rows))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        report = {"date": date, "machine": machine.description(), "rounds": options.rounds}
        report["rows"] = rows
        (options.output / "wires.json").write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
