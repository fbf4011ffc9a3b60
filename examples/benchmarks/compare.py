"""The same GPT, data and optimizer under DDP, ZeRO and its peers, side by side in one run.

    python examples/benchmarks/compare.py                             # CPU, fp32, everything
    python examples/benchmarks/compare.py --precision bf16-mixed --only ddp zero3 fsdp2
    python examples/benchmarks/compare.py --device cuda --fake-world 64 --only zero3 fsdp2

Every contender runs in fresh processes. Rounds are interleaved (A B C A B C), and each round's step
times are divided by the first contender's, DDP's, of the same round, so a machine that drifts
cancels out. On CUDA the host runs ahead of the device, as in training, and a step is timed on the
device. Memory and traffic come from separate runs that are not timed. A contender that ends a round
at another loss than DDP is not compared.

*Sent* are the elements of our ledger, *through sockets* what the kernel has counted for everyone, a
step's, where ranks talk through gloo. Both are without windows, which send nothing. *Page faults*
are a step's too, of those that follow the timed ones.

``--fake-world N`` runs rank 0 of N alone, with torch's fake collectives: memory and the overhead of
host and device without the wire. They send nothing, but copy this rank's own part to where those of
others belong, N small copies for each gather; losses mean nothing and are not checked. There the
first contender is a step without traffic, as DDP cannot run.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import importlib.util
import itertools
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import machine
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero.comm import Comm
from lightning_zero.engine import Engine
from lightning_zero.ledger import sum_of
from lightning_zero.plan import RECIPES
from lightning_zero.settings import Settings


@dataclass(frozen=True)
class Job:
    """What is run; the defaults are the figures' 34 M parameters."""

    dim: int = 512
    layers: int = 8
    heads: int = 8
    vocabulary: int = 8192
    length: int = 128
    batch: int = 4
    steps: int = 8
    warmup: int = 3
    world: int = 2
    threads: int = 1
    precision: str = "32-true"
    device: str = "cpu"
    fake_world: int = 0
    windows: bool = True


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder with an untied head."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.tokens = nn.Embedding(job.vocabulary, job.dim)
        self.positions = nn.Embedding(job.length, job.dim)
        self.blocks = nn.ModuleList(Block(job.dim, job.heads) for _ in range(job.layers))
        self.norm = nn.LayerNorm(job.dim)
        self.head = nn.Linear(job.dim, job.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class Contender:
    """A model that is ready to train, its optimizer, and our engine if it is ours."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    engine: Engine | None = None
    backward: Callable[[Tensor], None] = Tensor.backward
    step: Callable[[], Any] | None = None


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4, fused=True)


def _alone(model: nn.Module, job: Job) -> Contender:
    return Contender(model, _adamw(model))


def _ddp(model: nn.Module, job: Job) -> Contender:
    wrapped = nn.parallel.DistributedDataParallel(model)
    return Contender(wrapped, _adamw(wrapped))


def _zero(stage: int, **settings: Any) -> Callable[[nn.Module, Job], Contender]:
    def build(model: nn.Module, job: Job) -> Contender:
        recipe = RECIPES[job.precision]
        device = torch.device(job.device)
        comm = Comm(device, windows=None if job.windows else False)
        engine = Engine(model, Settings(stage, recipe=recipe, device=device, **settings), comm)
        optimizer = _adamw(model)
        engine.adopt(optimizer)
        return Contender(model, optimizer, engine)

    return build


def _fsdp2(*, reshard: bool) -> Callable[[nn.Module, Job], Contender]:
    def build(model: nn.Module, job: Job) -> Contender:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        recipe = RECIPES[job.precision]
        options = {
            "mesh": init_device_mesh(job.device, (dist.get_world_size(),)),
            "mp_policy": MixedPrecisionPolicy(recipe.weight, recipe.reduce),
            "reshard_after_forward": reshard,
        }
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        return Contender(model, _adamw(model))

    return build


def _fsdp1(strategy: str) -> Callable[[nn.Module, Job], Contender]:
    def build(model: nn.Module, job: Job) -> Contender:
        from torch.distributed.fsdp import (
            FullyShardedDataParallel,
            MixedPrecision,
            ShardingStrategy,
        )
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        recipe = RECIPES[job.precision]
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=ShardingStrategy[strategy],
            mixed_precision=MixedPrecision(recipe.weight, recipe.reduce),
            device_id=torch.device(job.device),
            use_orig_params=True,
        )
        return Contender(wrapped, _adamw(wrapped))

    return build


def _zero_redundancy(model: nn.Module, job: Job) -> Contender:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-4, fused=True
    )
    return Contender(wrapped, optimizer)


def _deepspeed(stage: int) -> Callable[[nn.Module, Job], Contender]:
    def build(model: nn.Module, job: Job) -> Contender:
        import deepspeed

        # Its buckets hold 500 M elements if not told: here the largest unit's, as ours do.
        bucket = max(12 * job.dim, job.vocabulary) * job.dim
        sizes = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
        config = {
            "train_micro_batch_size_per_gpu": job.batch,
            "zero_optimization": {"stage": stage, **sizes},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": job.precision == "bf16-mixed"},
        }
        wrapped, optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=_adamw(model), config=config
        )
        return Contender(wrapped, optimizer, backward=wrapped.backward, step=wrapped.step)

    return build


CONTENDERS: dict[str, Callable[[nn.Module, Job], Contender]] = {
    "ddp": _ddp,
    "zero1": _zero(1),
    "zero2": _zero(2),
    "zero3": _zero(3),
    "zero3 keep": _zero(3, reshard_after_forward=False),
    "fsdp2": _fsdp2(reshard=True),
    "fsdp2 keep": _fsdp2(reshard=False),
    "fsdp1": _fsdp1("FULL_SHARD"),
    "fsdp1 grad_op": _fsdp1("SHARD_GRAD_OP"),
    "zero redundancy": _zero_redundancy,
    "no traffic": _alone,
}
if importlib.util.find_spec("deepspeed"):
    CONTENDERS.update({f"deepspeed {stage}": _deepspeed(stage) for stage in (1, 2, 3)})

NEED_OTHERS = ("ddp", "zero redundancy")
"""Not to be had on torch's fake backend: DDP waits for a sum that does not come from there."""


class Run:
    """One contender in this process: its steps, one at a time."""

    def __init__(self, rank: int, name: str, job: Job) -> None:
        torch.manual_seed(0)
        self.job = job
        self.device = torch.device(job.device)
        with self.device:
            model = GPT(job)
        self.contender = CONTENDERS[name](model, job)
        # Made where it is used: a copy from the host would wait for all that was started before.
        self.data = torch.Generator(self.device).manual_seed(rank)

    def __call__(self) -> Tensor:
        loss = self.pass_through()
        self.step()
        return loss

    def pass_through(self) -> Tensor:
        """Forward and backward, in the Trainer's order: old gradients live until the backward."""
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
        """The optimizer's step."""
        (self.contender.step or self.contender.optimizer.step)()

    def rest(self) -> None:
        """Come to where a step ends: also the gathers that the next one would wait for."""
        for unit in self.contender.engine.units if self.contender.engine else ():
            unit.wait_if_in_flight()
        self.settle()

    def settle(self) -> None:
        """Let everything that was started end."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if not self.job.fake_world:
            dist.barrier()


@contextlib.contextmanager
def _ranks(rank: int, job: Job, port: int) -> Iterator[None]:
    torch.set_num_threads(job.threads)
    os.environ["LOCAL_RANK"] = str(rank)  # DeepSpeed asks for it.
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
        # Other groups end with their processes. To destroy one waits, with Python's lock, for
        # gloo's threads, which now and then wait for that lock to free what a collective held.
        if job.fake_world:
            dist.destroy_process_group()


NUM_FAULTY = 2
"""Steps whose page faults are counted."""


def _timed(rank: int, name: str, job: Job, port: int, answer: Path) -> None:
    with _ranks(rank, job, port):
        run = Run(rank, name, job)
        times, loss = (_times_on_cuda if job.device == "cuda" else _times_on_cpu)(run)
        found = {"seconds": statistics.median(times), "loss": float(loss)}
        run.settle()
        before = machine.page_faults()
        for _ in range(NUM_FAULTY):
            run()
        found["page_faults"] = (machine.page_faults() - before) // NUM_FAULTY
        # Nobody leaves while another still waits for what was sent.
        run.rest()
        if rank == 0:
            answer.write_text(json.dumps(found))


def _times_on_cpu(run: Run) -> tuple[list[float], Tensor]:
    """Seconds of each step, which all ranks begin together, and the last loss.

    Weights of stages 1 and 2 are still on their way then: the next step's start waits for them.
    """
    times = []
    for _ in range(run.job.warmup + run.job.steps):
        run.settle()
        start = time.perf_counter()
        loss = run()
        times.append(time.perf_counter() - start)
    return times[run.job.warmup :], loss


def _times_on_cuda(run: Run) -> tuple[list[float], Tensor]:
    """The same, from the end of one step on the device to that of the next.

    Nothing waits in between, as in training: the host is ahead of the device, and weights of stages
    1 and 2 travel behind the next step.
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


def _weighed(rank: int, name: str, job: Job, port: int, answer: Path) -> None:
    """Memory and traffic after a few steps, never timed.

    Shared memory is not the allocator's, so ours runs without it here: the same steps, with its
    reduce buffers and those it receives in where they are counted.
    """
    job = replace(job, windows=False)
    with _ranks(rank, job, port):
        run, found = _peaks(rank, name, job)
        run.step()
        run.rest()
        found["bytes"] = _bytes_by_kind(run.contender)
        engine, before = run.contender.engine, machine.socket_bytes()
        run()
        run.rest()
        if engine is not None:
            found["sent"] = sum_of(engine.comm.ledger.last_step).elements
        if before is not None and dist.get_backend() == "gloo":
            found["socket_bytes"] = machine.socket_bytes() - before
        if rank == 0:
            answer.write_text(json.dumps(found))


def _peaks(rank: int, name: str, job: Job) -> tuple[Run, dict[str, Any]]:
    """The most memory in forward and backward beyond the idle model, in two orders of a step.

    The idle model is weights, masters and optimizer states; what else stays between steps, as
    DDP's buckets and our shards of gradients do, is counted. In a plain loop the gradients of the
    step before are dropped when the forward begins; under the Trainer they live until its end.
    """
    runs: list[Run] = []

    def prepare() -> None:
        runs.append(Run(rank, name, job))
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
    """What this rank holds between steps, in the engine's words; not what peers keep for messages.

    A master is what the optimizer steps and the model does not have.
    """
    if contender.engine is not None:
        return contender.engine.memory()
    optimizer: Any = contender.optimizer
    for inner in ("optim", "optimizer"):  # ZeroRedundancyOptimizer's and DeepSpeed's
        optimizer = getattr(optimizer, inner, optimizer)
    weights = list(contender.model.parameters())
    # Its groups may be empty between steps; it has states of all that it steps.
    stepped = list(optimizer.state)
    # DeepSpeed's stage 3 leaves an empty parameter behind, and hangs the shard on it.
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
    """Bytes of weights, masters and optimizer states of this rank."""
    held = _bytes_by_kind(contender)
    return held["weights"] + held["master"] + held["states"]


def _storages(values: list[Any]) -> dict[int, int]:
    """Bytes of the tensors among some values by where they are, this rank's part of each."""
    parts = [_own_part(value) for value in values if isinstance(value, Tensor)]
    return {part.data_ptr(): part.nbytes for part in parts if part.numel()}


def _own_part(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _peaks_on_cuda(parts: list[Callable[[], Any]]) -> list[int]:
    """The most live bytes in each part."""
    peaks = []
    for part in parts:
        torch.cuda.reset_peak_memory_stats()
        part()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    return peaks


def _peaks_on_cpu(parts: list[Callable[[], Any]]) -> list[int]:
    """The same, counted from the allocator's own events, which know nothing of any engine.

    One profile holds all parts: it knows the sizes only of what was allocated within it.
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


def _in_fresh_processes(worker: Callable[..., None], name: str, job: Job) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        processes = 1 if job.fake_world else job.world
        # A server that has imported everything, and done nothing, is forked for each process.
        mp.set_forkserver_preload(["torch.distributed.fsdp", "torch.profiler", "lightning_zero"])
        mp.start_processes(worker, (name, job, port, answer), processes, start_method="forkserver")
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def compare(names: list[str], job: Job, rounds: int) -> dict[str, dict[str, Any]]:
    """Ratios to the first of ``names``, memory and traffic of each."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    right = next((name for name in names if name != "no traffic"), names[0])
    for number in range(rounds):
        for name in names:
            answer = _in_fresh_processes(_timed, name, job)
            answers[name].append(answer)
            print(f"round {number + 1}: {name} {answer['seconds']:.3f} s", file=sys.stderr)
            if not job.fake_world and name != "no traffic":
                _check_loss((name, answer["loss"]), (right, answers[right][number]["loss"]), job)
    times = {name: [answer["seconds"] for answer in found] for name, found in answers.items()}
    rows = {}
    for name in names:
        ratios = [own / base for own, base in zip(times[name], times[names[0]], strict=True)]
        rows[name] = {
            "loss": answers[name][-1]["loss"],
            "page_faults": statistics.median(answer["page_faults"] for answer in answers[name]),
            "seconds": statistics.median(times[name]),
            "seconds_by_round": times[name],
            "ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
            **_least_peaks([_in_fresh_processes(_weighed, name, job) for _ in range(rounds)]),
        }
    return rows


def _least_peaks(weighed: list[dict[str, Any]]) -> dict[str, Any]:
    """The last answer, with the least peak of all.

    The allocator's events are those of the threads that run Python: what a thread of the backend
    frees, now and then, counts as alive for ever.
    """
    peaks = ("peak_mib", "trainer_peak_mib")
    return {**weighed[-1], **{key: min(answer[key] for answer in weighed) for key in peaks}}


def _check_loss(found: tuple[str, float], expected: tuple[str, float], job: Job) -> None:
    (name, loss), (right, right_loss) = found, expected
    tolerance = 1e-4 if job.precision == "32-true" else 2e-2
    # A NaN is never near.
    if not abs(loss - right_loss) <= tolerance * abs(right_loss):
        raise RuntimeError(f"{name} ends at loss {loss}, {right} at {right_loss}.")


def table(rows: dict[str, dict[str, Any]]) -> str:
    """A Markdown table of the results."""
    base = next(iter(rows))
    lines = [
        f"| | s/step | ratio to {base} | range | peak MiB | under the Trainer"
        " | sent | through sockets MB | between steps MiB | page faults |",
        "|---" * 10 + "|",
    ]
    for name, row in rows.items():
        low, high = row["ratio_range"]
        states = sum(row["bytes"][kind] for kind in ("weights", "master", "states")) / 2**20
        sent = f"{row['sent'] / 1e6:.1f} M" if "sent" in row else ""
        on_sockets = f"{row['socket_bytes'] / 1e6:.1f}" if "socket_bytes" in row else ""
        lines.append(
            f"| {name} | {row['seconds']:.3f} | {row['ratio']:.2f} | {low:.2f} to {high:.2f}"
            f" | {row['peak_mib']:.0f} | {row['trainer_peak_mib']:.0f} | {sent} | {on_sockets}"
            f" | {states:.1f} | {row['page_faults']} |"
        )
    return "\n".join(lines)


def plot(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Step-time ratio and peak memory of each contender, as one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 0.45 * len(rows) + 1.5), sharey=True)
    names = list(rows)[::-1]
    colors = ["tab:blue" if name.startswith("zero") else "tab:gray" for name in names]
    for axis, key, title in zip(
        axes,
        ("ratio", "peak_mib"),
        (f"step time / {names[-1]}", "peak beyond idle, MiB"),
        strict=True,
    ):
        bars = axis.barh(names, [rows[name][key] for name in names], color=colors)
        axis.bar_label(bars, fmt="%.2f" if key == "ratio" else "%.0f", padding=3)
        axis.set_title(title)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.15)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="folder for compare.json and compare.png")
    choices = asdict(Job())
    del choices["windows"]
    for name, default in choices.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    arguments = vars(parser.parse_args())
    names, rounds = arguments.pop("only"), arguments.pop("rounds")
    output = arguments.pop("output")
    job = Job(**arguments)
    unable = [name for name in names or () if job.fake_world and name in NEED_OTHERS]
    if unable:
        parser.error(f"{unable[0]} needs real ranks, got --fake-world: leave it out of --only.")
    rows = compare(names or default_names(job), job, rounds)
    date, here = time.strftime("%Y-%m-%d"), machine.description()
    print(f"\n{date}, {here}, {job.precision}\n\n{table(rows)}")
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        report = {"date": date, "machine": here, "job": asdict(job), "rows": rows}
        (output / "compare.json").write_text(json.dumps(report, indent=2))
        plot(rows, output / "compare.png")


def default_names(job: Job) -> list[str]:
    """All that can be had; on the fake backend ratios are to a step without any traffic."""
    if not job.fake_world:
        return list(CONTENDERS)
    able = [name for name in CONTENDERS if name not in (*NEED_OTHERS, "no traffic")]
    return ["no traffic", *able]


if __name__ == "__main__":
    main()
