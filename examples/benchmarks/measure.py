"""Times, peaks, bytes and traffic of one contender, in fresh processes.

On CUDA the host runs ahead of the device, as in training, and steps are timed on the device. Memory
and traffic come from untimed runs.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from contenders import CONTENDERS, GPT, Contender, Job, Ranks
from torch import Tensor

from lightning_zero.comm import sum_of
from lightning_zero.plan.plan import RECIPES


class Run:
    """One contender in this process: its steps, one at a time."""

    def __init__(self, rank: int, name: str, job: Job) -> None:
        torch.manual_seed(0)
        self.job = job
        self.device = torch.device(job.device)
        with self.device:
            model = GPT(job)
        self.contender = CONTENDERS[name](model, job)
        # On the device: a copy from the host would wait for everything launched before.
        self.data = torch.Generator(self.device).manual_seed(rank // self.contender.tensor_size)

    def __call__(self) -> Tensor:
        loss = self.pass_through()
        self.step()
        return loss

    def pass_through(self) -> Tensor:
        """Run forward and backward in the Trainer's order: old gradients live until backward."""
        job, contender = self.job, self.contender
        shape = (job.batch, job.length + 1)
        tokens = torch.randint(job.vocabulary, shape, generator=self.data, device=self.device)
        autocast = RECIPES[job.precision].autocast
        context = (
            torch.autocast(self.device.type, autocast, cache_enabled=False)
            if autocast
            else contextlib.nullcontext()
        )
        with context:
            logits = contender.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        contender.optimizer.zero_grad()
        contender.backward(loss)
        return loss.detach()

    def step(self) -> None:
        """Step the optimizer."""
        (self.contender.step or self.contender.optimizer.step)()

    def rest(self) -> None:
        """Wait for the end of a step, including gathers that the next one would wait for."""
        for unit in self.contender.engine.sharded.units if self.contender.engine else ():
            unit.weights.wait()
        self.settle()

    def settle(self) -> None:
        """Wait for all pending work, on all ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if not self.job.fake_world:
            dist.barrier()


@contextlib.contextmanager
def joined(rank: int, job: Ranks, port: int) -> Iterator[None]:
    """Enter a context in which this process is one of the ranks."""
    torch.set_num_threads(job.threads)
    os.environ["LOCAL_RANK"] = str(rank)  # DeepSpeed needs it.
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    if job.fake_world:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=job.fake_world)
    else:
        backend = "nccl" if job.device == "cuda" else "gloo"
        address = f"tcp://127.0.0.1:{port}"
        device = torch.device("cuda", rank) if job.device == "cuda" else None
        dist.init_process_group(backend, address, rank=rank, world_size=job.world, device_id=device)
    try:
        yield
    finally:
        # Other groups end with their processes. Destroying one waits, holding the GIL, for gloo's
        # threads, which now and then wait for the GIL to free what a collective held.
        if job.fake_world:
            dist.destroy_process_group()


NUM_FAULTY = 2
"""Number of steps over which page faults are counted."""


def timed(rank: int, name: str, job: Job, port: int, answer: Path) -> None:
    with joined(rank, job, port):
        run = Run(rank, name, job)
        times, loss = (_times_on_cuda if job.device == "cuda" else _times_on_cpu)(run)
        found = {"seconds": statistics.median(times), "loss": float(loss)}
        run.settle()
        before = machine.page_faults()
        for _ in range(NUM_FAULTY):
            run()
        found["page_faults"] = (machine.page_faults() - before) // NUM_FAULTY
        # No rank leaves while another still waits for its data.
        run.rest()
        if rank == 0:
            answer.write_text(json.dumps(found))


def _times_on_cpu(run: Run) -> tuple[list[float], Tensor]:
    """Return the seconds of each step, which all ranks begin together, and the last loss.

    At stages 1 and 2, weights are still in flight when a step ends: the next step waits for them.
    """
    times = []
    for _ in range(run.job.warmup + run.job.steps):
        run.settle()
        start = time.perf_counter()
        loss = run()
        times.append(time.perf_counter() - start)
    return times[run.job.warmup :], loss


def _times_on_cuda(run: Run) -> tuple[list[float], Tensor]:
    """Return the same, timed from the end of one step on the device to the end of the next.

    Nothing waits in between, as in training: the host runs ahead of the device, and at stages 1 and
    2 weights travel during the next step.
    """
    for _ in range(run.job.warmup):
        run()
    run.settle()
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(run.job.steps + 1)]
    run()
    ends[0].record()
    for end in ends[1:]:
        loss = run()
        end.record()
    run.settle()
    return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(ends)], loss


def weighed(rank: int, name: str, job: Job, port: int, answer: Path) -> None:
    """Write memory and traffic after a few untimed steps to ``answer``.

    Shared memory does not come from the allocator, so ours runs without it here: the same steps,
    with the reduce and receive buffers where they are counted.
    """
    job = replace(job, windows=False)
    with joined(rank, job, port):
        found = _weigh(lambda: Run(rank, name, job), job)
        if rank == 0:
            answer.write_text(json.dumps(found))


def measured(rank: int, name: str, job: Job, port: int, answer: Path) -> None:
    """Write time, memory and traffic of one process to ``answer``, for devices.

    On a device, memory is the allocator's own figure, which costs the timed steps nothing.
    """
    with joined(rank, job, port):
        run = Run(rank, name, job)
        times, loss = (_times_on_cuda if job.device == "cuda" else _times_on_cpu)(run)
        found = {"seconds": statistics.median(times), "loss": float(loss)}
        # On a CPU the allocator's events are known only from the start of a profile.
        make = (lambda: run) if job.device == "cuda" else (lambda: Run(rank, name, job))
        found.update(_weigh(make, job))
        if job.device == "cuda":
            found["reserved_mib"] = torch.cuda.memory_stats()["reserved_bytes.all.peak"] / 2**20
        if rank == 0:
            answer.write_text(json.dumps(found))


def _weigh(make: Callable[[], Run], job: Job) -> dict[str, Any]:
    """Return peaks, bytes between steps, and what a step sends."""
    run, found = _peaks(make, job)
    run.step()
    run.rest()
    found["bytes"] = _bytes_by_kind(run.contender)
    engine, before = run.contender.engine, machine.socket_bytes()
    run()
    run.rest()
    if engine is not None:
        found["sent"] = sum_of(engine.comm.transport.ledger.last_step).elements
    if before is not None and dist.get_backend() == "gloo":
        found["socket_bytes"] = machine.socket_bytes() - before
    return found


def _peaks(make: Callable[[], Run], job: Job) -> tuple[Run, dict[str, Any]]:
    """Return a run, and its peaks in forward and backward beyond the idle model.

    The idle model is weights, masters and optimizer states; all else that stays between steps, such
    as DDP's buckets and our gradient shards, is counted. There are two peaks: in a plain loop the
    previous step's gradients are freed before the forward; under the Trainer, after it.
    """
    runs: list[Run] = []

    def prepare() -> None:
        runs.append(make())
        runs[0]()
        runs[0]()
        runs[0].contender.optimizer.zero_grad()
        runs[0].rest()

    def pass_through() -> None:
        runs[0].pass_through()
        runs[0].rest()

    def step() -> None:
        runs[0].step()
        runs[0].rest()

    measure = _peaks_on_cuda if job.device == "cuda" else _peaks_on_cpu
    _, plain, _, under_trainer = measure([prepare, pass_through, step, pass_through])
    idle = _model_bytes(runs[0].contender)
    return runs[0], {
        "peak_mib": (plain - idle) / 2**20,
        "trainer_peak_mib": (under_trainer - idle) / 2**20,
    }


def _bytes_by_kind(contender: Contender) -> dict[str, int]:
    """Return this rank's bytes between steps, by the engine's kinds, without message buffers.

    A master is a tensor that the optimizer steps and the model does not hold.
    """
    if contender.engine is not None:
        return contender.engine.sharded.memory()
    optimizer: Any = contender.optimizer
    for inner in ("optim", "optimizer"):  # ZeroRedundancyOptimizer's and DeepSpeed's
        optimizer = getattr(optimizer, inner, optimizer)
    weights = list(contender.model.parameters())
    # Its groups may be empty between steps, but it has a state for everything that it steps.
    stepped = list(optimizer.state)
    # DeepSpeed's stage 3 leaves an empty parameter and attaches the shard to it.
    resting = _storages([getattr(weight, "ds_tensor", weight) for weight in weights])
    masters = _storages(stepped)
    return {
        "weights": sum(resting.values()),
        "master": sum(nbytes for place, nbytes in masters.items() if place not in resting),
        "gradients": sum(_storages([p.grad for p in [*weights, *stepped]]).values()),
        "states": sum(
            sum(_storages(list(state.values())).values()) for state in optimizer.state.values()
        ),
    }


def _model_bytes(contender: Contender) -> int:
    """Return the bytes of this rank's weights, masters and optimizer states."""
    held = _bytes_by_kind(contender)
    return held["weights"] + held["master"] + held["states"]


def _storages(values: list[Any]) -> dict[int, int]:
    """Return the bytes of this rank's part of each tensor among ``values``, by address."""
    parts = [_own_part(value) for value in values if isinstance(value, Tensor)]
    return {part.data_ptr(): part.nbytes for part in parts if part.numel()}


def _own_part(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _peaks_on_cuda(parts: list[Callable[[], Any]]) -> list[int]:
    """Return the most live bytes in each part."""
    peaks = []
    for part in parts:
        torch.cuda.reset_peak_memory_stats()
        part()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    return peaks


def _peaks_on_cpu(parts: list[Callable[[], Any]]) -> list[int]:
    """Return the same, counted from the allocator's events, independently of any engine.

    One profile spans all parts, because it knows only the sizes of what was allocated within it.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        for number, part in enumerate(parts):
            with torch.profiler.record_function(f"part {number}"):
                part()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    ends = sorted(e["ts"] + e["dur"] for e in events if str(e.get("name")).startswith("part "))
    changes = [e for e in events if e.get("name") == "[memory]"]
    peaks, live = [0] * len(parts), 0
    for event in sorted(changes, key=lambda e: e["ts"]):
        live += event["args"]["Bytes"]
        number = min(bisect.bisect_left(ends, event["ts"]), len(parts) - 1)
        peaks[number] = max(peaks[number], live)
    return peaks


_PRELOADED = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.profiler"]


def in_fresh_processes(worker: Callable[..., None], *arguments: Any) -> Any:
    """Return what ``worker(rank, *arguments, port, answer)`` writes; the last argument is a job."""
    job: Ranks = arguments[-1]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        processes = 1 if job.fake_world else job.world
        # Each process is forked from a server that has imported everything and done nothing.
        mp.set_forkserver_preload([*_PRELOADED, "lightning_zero"])
        mp.start_processes(worker, (*arguments, port, answer), processes, start_method="forkserver")
        return json.loads(answer.read_text())
