"""Step times of DDP, FSDP2 and ZeRO on hosts joined by a slow link, and the traffic through it.

    sudo make bench-hosts                         # two hosts of two ranks, 1 Gb/s between them
    sudo make bench-hosts ARGS="--gbit 10 --hosts 3"

This machine simulates the hosts: each is a network namespace with one rate-limited interface, and a
process namespace, so that ranks of different hosts share no memory. That takes Linux, its commands
``ip``, ``tc`` and ``unshare``, and root.

With ``--faults`` it reports instead how long the ranks of each host go on after another host was
killed, or has lost its cable.

Every process trains all contenders in turn, in rounds (A B C A B C), and ratios are to DDP in the
same round. *Through the link* are the bytes per step that the kernel counts on the first host's
interface, headers included; *by the ledger* those that ZeRO counts from its ranks to other hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from contenders import CONTENDERS, Contender, Job, fsdp2, zero
from measure import Run
from torch import nn

from lightning_zero.comm import Communicator, sum_of, towards
from lightning_zero.engine.engine import Engine
from lightning_zero.plan import Settings

_fork = multiprocessing.get_context("fork")
INTERFACE = "lan"
PORT = 29511
JOB = Job(dim=256, layers=4, heads=4, vocabulary=2048, length=64, batch=2, steps=4, warmup=1)


def contenders(ranks_on_host: int) -> dict[str, Callable[[nn.Module, Job], Contender]]:
    """Return the ways to train, by name."""
    return {
        "ddp": CONTENDERS["ddp"],
        "fsdp2": CONTENDERS["fsdp2"],
        "fsdp2, hybrid": fsdp2(reshard=True, shard=ranks_on_host),
        "zero3": zero(3),
        "zero3, hybrid": zero(3, shard=ranks_on_host),
        "zero3, 8 bits": zero(3, gather_bits=8, reduce_bits=8),
        "zero3, hybrid, gradients in 8 bits": zero(3, shard=ranks_on_host, reduce_bits=8),
    }


# -- the hosts -------------------------------------------------------------------------------------


def _call(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def hosts(number: int, gbit: float) -> Iterator[list[str]]:
    """Create network namespaces joined by a bridge, and yield their names.

    Raises:
        RuntimeError: This system, or this user, cannot create them.
    """
    names = [f"host{index}-{os.getpid()}" for index in range(number)]
    bridge = f"b{os.getpid()}"
    with contextlib.ExitStack() as stack:
        try:
            _call("ip", "link", "add", bridge, "type", "bridge")
            stack.callback(_call, "ip", "link", "del", bridge)
            _call("ip", "link", "set", bridge, "up")
            for index, name in enumerate(names):
                _call("ip", "netns", "add", name)
                stack.callback(_call, "ip", "netns", "del", name)
                end = f"v{index}-{os.getpid()}"
                _call("ip", "link", "add", end, "type", "veth", "peer", INTERFACE, "netns", name)
                # It would go with its namespace, but later: the next one of its name would fail.
                stack.callback(_call, "ip", "link", "del", end)
                _call("ip", "link", "set", end, "master", bridge, "up")
                _call("ip", "-n", name, "addr", "add", f"{_address(index)}/24", "dev", INTERFACE)
                for interface in ("lo", INTERFACE):
                    _call("ip", "-n", name, "link", "set", interface, "up")
                if gbit:
                    limit = ("rate", f"{gbit}gbit", "burst", "256kb", "latency", "50ms")
                    inside = ("ip", "netns", "exec", name)
                    _call(*inside, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or error
            raise RuntimeError(f"Cannot simulate hosts here: {said}") from error
        yield names


def _address(index: int) -> str:
    return f"10.9.{os.getpid() % 250}.{index + 1}"


def run_on(names: list[str], ranks_on_host: int, *words: object, timeout: float = 600) -> None:
    """Run this script's worker on all hosts at once."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    started = []
    for index, name in enumerate(names):
        alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        place = [f"--nnodes={len(names)}", f"--node-rank={index}", f"--master-port={PORT}"]
        place += [f"--nproc-per-node={ranks_on_host}", f"--master-addr={_address(0)}"]
        run = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *place]
        script = [str(Path(__file__).resolve()), "--worker", *map(str, words)]
        command = ["ip", "netns", "exec", name, *alone, *run, *script]
        started.append(subprocess.Popen(command, env=environment))
    try:
        codes = [process.wait(timeout) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    if any(codes):
        raise RuntimeError(f"The hosts exited with codes {codes}.")


# -- a rank ----------------------------------------------------------------------------------------


def _through_the_link() -> int:
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def _sent_to_others(engine: Engine, ranks_on_host: int) -> float:
    """Return the bytes that this rank has sent to other hosts in a step, by the ledger."""
    total = 0.0
    for axis, transport in engine.comm.transports.items():
        sent = sum_of(transport.ledger.last_step).bytes
        peers = transport.size - 1
        # A copy on one host sends nothing to others; otherwise all peers get equally much.
        near = min(transport.size, ranks_on_host) - 1 if axis == "shard" else 0
        total += sent * (peers - near) / peers if peers else 0
    return total


def train(name: str, job: Job, ranks_on_host: int) -> dict[str, float]:
    """Train one contender for some steps, and return its figures per step."""
    CONTENDERS[name] = contenders(ranks_on_host)[name]
    run = Run(dist.get_rank(), name, job)
    for _ in range(job.warmup):
        run()
    run.rest()
    engine = run.contender.engine
    times, before, loss = [], _through_the_link(), torch.zeros(())
    for _ in range(job.steps):
        begin = time.perf_counter()
        loss = run()
        run.rest()
        times.append(time.perf_counter() - begin)
    found = {"seconds": statistics.median(times), "loss": float(loss)}
    dist.barrier()
    found["through"] = (_through_the_link() - before) / job.steps
    if engine is not None:
        found["ledger"] = ranks_on_host * _sent_to_others(engine, ranks_on_host)
        engine.close()
    return found


def work(names: list[str], job: Job, rounds: int, answer: Path) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks_on_host = int(os.environ["LOCAL_WORLD_SIZE"])
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            found[name].append(train(name, job, ranks_on_host))
    if dist.get_rank() == 0:
        answer.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # gloo's threads of many groups end with the process


# -- faults ----------------------------------------------------------------------------------------

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def _train_on(host: str, address: str, rank: int, ranks: int, stage: int, said: Path) -> None:
    """Train on a host, as one rank of several, until an error ends it; write down the error."""
    with open(f"/var/run/netns/{host}") as room:
        assert ctypes.CDLL(None).setns(room.fileno(), _NEW_NETWORK) == 0
    os.environ["MASTER_ADDR"] = address
    with towards(address):
        method = f"tcp://{address}:{PORT}"
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    comm = Communicator(torch.device("cpu"), reads_peers=False)
    engine = Engine(model, Settings(stage, units=(nn.Linear,)), comm)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    engine.adopt(optimizer)
    try:
        while True:
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            said.with_suffix(".begun").touch()
            time.sleep(0.02)
    except RuntimeError as error:
        said.write_text(str(error))


class Fault(NamedTuple):
    """A host that is lost while ranks on all hosts train, and how."""

    how: str
    host: int
    stage: int


FAULTS = [Fault("kill", 1, 1), Fault("kill", 0, 3), Fault("cut", 1, 1), Fault("cut", 0, 3)]


def suffer(fault: Fault, ranks_on_host: int, limit: float, folder: Path) -> dict[str, Any]:
    """Lose one of two hosts; return what the others' ranks said, and seconds until they exited."""
    number = 2 * ranks_on_host
    with hosts(2, 0) as names:
        processes = {}
        for rank in range(number):
            place = names[rank // ranks_on_host], _address(0), rank, number
            given = *place, fault.stage, folder / str(rank)
            processes[rank] = _fork.Process(target=_train_on, args=given)
            processes[rank].start()
        while not all((folder / f"{rank}.begun").exists() for rank in processes):
            if not all(process.is_alive() for process in processes.values()):
                raise RuntimeError("A rank ended before it trained.")
            time.sleep(0.1)
        lost = range(fault.host * ranks_on_host, (fault.host + 1) * ranks_on_host)
        if fault.how == "cut":
            _call("ip", "link", "set", f"v{fault.host}-{os.getpid()}", "nomaster")
            lost = range(0)  # each side is left without the other
        begin = time.monotonic()
        for rank in lost:
            processes.pop(rank).kill()
        ended: dict[int, float] = {}
        while len(ended) < len(processes) and time.monotonic() - begin < limit:
            time.sleep(0.1)
            for rank, process in processes.items():
                if not process.is_alive():
                    ended.setdefault(rank, round(time.monotonic() - begin, 1))
        found = {}
        for rank, process in processes.items():
            process.kill()
            text = folder / str(rank)
            said = text.read_text() if text.exists() else ""
            found[rank] = {"seconds": ended.get(rank), "said": said}
    return {**fault._asdict(), "ranks": found}


def suffer_all(ranks_on_host: int, limit: float) -> list[dict[str, Any]]:
    """Lose hosts in every way, at the same time."""
    with tempfile.TemporaryDirectory() as place:
        cases = []
        for number, fault in enumerate(FAULTS):
            folder = Path(place) / str(number)
            folder.mkdir()
            answer = folder / "answer"
            work = lambda *args, answer=answer: answer.write_text(json.dumps(suffer(*args)))  # noqa: E731
            case = _fork.Process(target=work, args=(fault, ranks_on_host, limit, folder))
            case.start()
            cases.append((case, answer))
        for case, _ in cases:
            case.join()
        return [json.loads(answer.read_text()) for _, answer in cases]


# -- the command -----------------------------------------------------------------------------------


def compare(
    names: list[str], *, num_hosts: int, ranks: int, gbit: float, rounds: int, job: Job
) -> dict[str, list[dict[str, float]]]:
    """Return each contender's figures per step, by round."""
    with tempfile.TemporaryDirectory() as folder, hosts(num_hosts, gbit) as places:
        answer = Path(folder) / "answer.json"
        told = json.dumps([names, dataclasses.asdict(job), rounds, str(answer)])
        run_on(places, ranks, told)
        return json.loads(answer.read_text())  # type: ignore[no-any-return]


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Return a Markdown table."""
    base = next(iter(found.values()))
    lines = [
        "| | s/step | ratio to DDP | range | through the link MB | by the ledger MB |",
        "|---" * 6 + "|",
    ]
    for name, rounds in found.items():
        ratios = [
            own["seconds"] / first["seconds"] for own, first in zip(rounds, base, strict=True)
        ]
        seconds = statistics.median(one["seconds"] for one in rounds)
        ledger = f"{rounds[-1]['ledger'] / 1e6:.1f}" if "ledger" in rounds[-1] else ""
        lines.append(
            f"| {name} | {seconds:.3f} | {statistics.median(ratios):.2f}"
            f" | {min(ratios):.2f} to {max(ratios):.2f} | {rounds[-1]['through'] / 1e6:.1f}"
            f" | {ledger} |"
        )
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        names, job, rounds, answer = json.loads(sys.argv[2])
        work(names, Job(**job), rounds, Path(answer))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(contenders(2)), metavar="NAME")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="ranks on each host")
    parser.add_argument("--gbit", type=float, default=1.0, help="rate of the link; 0 for no limit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of patience with faults")
    for name in ("dim", "layers", "steps"):
        parser.add_argument(f"--{name}", type=int, default=getattr(JOB, name))
    options = parser.parse_args()
    if options.faults:
        print(json.dumps(suffer_all(options.ranks, options.limit), indent=1))
        return
    job = dataclasses.replace(JOB, dim=options.dim, layers=options.layers, steps=options.steps)
    found = compare(
        options.only or list(contenders(options.ranks)),
        num_hosts=options.hosts,
        ranks=options.ranks,
        gbit=options.gbit,
        rounds=options.rounds,
        job=job,
    )
    print(table(found))


if __name__ == "__main__":
    main()
