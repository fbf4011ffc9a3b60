"""Weights and states in files, against the disk and against memory, on one rank.

    python examples/benchmarks/offload.py              # a model of 1 GB, in 10 GB of memory
    python examples/benchmarks/offload.py --megabytes 100 --rounds 2
    python examples/benchmarks/offload.py --deepspeed PYTHON --accelerate PYTHON

In each round, one after the other:

* ``disk reads``: the model's bytes by large unbuffered requests of two threads.
* ``disk reads and writes``: twice the model's bytes, as AdamW's states are, read and written at
  once, by two threads each.
* ``compute``: a forward with weights in memory, of 1 and of 512 tokens.
* ``stream``: the same with weights that are read from their checkpoint, which the system has
  forgotten before. The limit is the larger of the disk's time and of the computation's.
* ``step in memory``, ``step with states in files``, ``step in files``: an AdamW step over all
  elements. The limit is the larger of the disk's time, for what the step's ledger says that it read
  and wrote at once, and of a step in memory. Where masters are in files too they are mapped, and
  the system writes them when it likes: they are not in the limit, and before each measurement it
  writes what others have left.
* ``training in memory``, ``training in files``: forward and backward of one token, and the step.
* ``fused step``, ``step by unit``: the same step of torch's own optimizer over the same pieces in
  memory, at once and as it is stepped on an accelerator's host.

With the interpreter of an environment that has DeepSpeed or accelerate, also, in the same rounds:

* ``DeepSpeed step``, ``DeepSpeed training``: of its stage 3, with optimizer states on NVMe.
* ``accelerate, 1 token`` and ``512``: the forward of its ``disk_offload``.

Medians count; ranges are of all rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from disk_contenders import Contender
from machine import description
from torch import Tensor, nn

from lightning_zero.checkpoint import ModuleLoad, read_safetensors, write_safetensors
from lightning_zero.comm import StagingMemory, StepTimes
from lightning_zero.engine import Engine
from lightning_zero.optimizer import States, UnitStep
from lightning_zero.plan import Offload, Settings

TOKENS = (1, 512)
STATES_ALONE = "with states in files"
ON_PIECES = ("fused step", "step by unit")
DEEPSPEED = {"step": "DeepSpeed step", "train": "DeepSpeed training"}
_REQUEST = 4 * 2**20


def model(width: int, depth: int) -> nn.Sequential:
    """Layers on ``meta``, each a unit."""
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)])


def timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


class Disk:
    """Unbuffered requests on a file of its own, by two threads each way."""

    def __init__(self, folder: str, nbytes: int) -> None:
        path = os.path.join(folder, "disk")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, nbytes)
        self._places = range(0, nbytes - _REQUEST + 1, _REQUEST)
        # Memory as steps have it, in large pages where there are some.
        self._memory = StagingMemory(4 * _REQUEST)
        self.write()

    @property
    def nbytes(self) -> int:
        """Bytes that are moved each way."""
        return len(self._places) * _REQUEST

    def read(self) -> None:
        self._all(os.preadv)

    def write(self) -> None:
        self._all(os.pwritev)

    def read_and_write(self) -> None:
        self._all(os.preadv, os.pwritev)

    def _all(self, *requests: Callable[..., int]) -> None:
        def some(way: int, number: int) -> None:
            buffer = self._memory.part((2 * way + number) * _REQUEST, _REQUEST)
            behind = len(self._places) // 2 * way
            for place in (*self._places[behind:], *self._places[:behind])[number::2]:
                requests[way](self._file, [buffer], place)

        with ThreadPoolExecutor(2 * len(requests)) as threads:
            ways = [(way, number) for way in range(len(requests)) for number in range(2)]
            list(threads.map(some, *zip(*ways, strict=True)))


def forget(path: Path) -> None:
    """Let the system drop what it keeps of a file in memory."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def streaming(path: Path, settings: Settings, width: int, depth: int) -> Engine:
    """An engine whose weights stay in the file."""
    module = model(width, depth)
    load = ModuleLoad(module, lambda: None)
    load.call(read_safetensors(path, maps=False), strict=True)
    return Engine(module, settings, sources=load.take_sources())


class Stepping:
    """A model with gradients, and AdamW over it."""

    def __init__(self, settings: Settings, width: int, depth: int) -> None:
        self.engine = Engine(model(width, depth), settings)
        self.optimizer = torch.optim.AdamW(self.engine.module.parameters(), 1e-4, fused=True)
        self.engine.adopt(self.optimizer)
        self._token = torch.ones(1, width)
        self.train()

    def step(self) -> None:
        self.optimizer.step()

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.engine.module(self._token).sum().backward()
        self.optimizer.step()

    def on_pieces(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """The step of another optimizer over the pieces: at once, and unit by unit."""
        optimizer = torch.optim.AdamW(self.engine.sharded.pieces, 1e-4, fused=True)
        unit_step = UnitStep([unit.pieces for unit in self.engine.sharded.units], States(optimizer))

        def by_unit() -> None:
            unit_step.begin()
            optimizer.step()
            unit_step.end()

        return optimizer.step, by_unit


@torch.no_grad()
def forward(module: nn.Module, tokens: Tensor) -> None:
    module(tokens)


Contenders = dict[str, Contender]


def measured(
    folder: str, width: int, depth: int, rounds: int, others: Contenders
) -> tuple[dict[str, list[float]], float, StepTimes]:
    """Seconds of each contender, by round; the part of the disk's that steps move; their times."""
    path = Path(folder) / "weights.safetensors"
    shapes = {f"{n}.weight": (torch.float32, (width, width)) for n in range(depth)}
    write_safetensors(path, shapes, lambda _: torch.randn(width, width) / width**0.5)
    units = (nn.Linear,)
    files = Settings(units=units, offload=Offload("nvme", "nvme"), offload_path=folder)
    memory = Settings(units=units)
    disk, of_states = (Disk(folder, times * path.stat().st_size) for times in (1, 2))
    whole = model(width, depth)
    whole.load_state_dict(read_safetensors(path), assign=True)
    for parameter in whole.parameters():
        parameter.data = parameter.data.clone()
    stream = streaming(path, files, width, depth)
    states = Settings(units=units, offload=Offload("nvme", None), offload_path=folder)
    places = {"in memory": memory, STATES_ALONE: states, "in files": files}
    steps = {name: Stepping(settings, width, depth) for name, settings in places.items()}
    on_pieces = dict(zip(ON_PIECES, steps["in memory"].on_pieces(), strict=True))
    found: dict[str, list[float]] = {}

    def note(name: str, function: Callable[[], object]) -> None:
        os.sync()  # what others have left to be written is not to be in the way
        found.setdefault(name, []).append(timed(function))

    def note_other(name: str, label: str, what: str) -> None:
        if name in others:
            os.sync()
            found.setdefault(label, []).append(others[name].measure(what))

    # The first round is left out: checksums are compared in it, and the order of units is learned.
    for _ in range(rounds + 1):
        note("disk reads", disk.read)
        note("disk reads and writes", of_states.read_and_write)
        for count in TOKENS:
            tokens = torch.randn(count, width)
            note(f"compute, {count} tokens", functools.partial(forward, whole, tokens))
            forget(path)
            note(f"stream, {count} tokens", functools.partial(forward, stream.module, tokens))
            note_other("accelerate", f"accelerate, {count} tokens", str(count))
        for name, stepping in steps.items():
            note(f"step {name}", stepping.step)
        for name, step in on_pieces.items():
            note(name, step)
        for name in ("in memory", "in files"):
            note(f"training {name}", steps[name].train)
        for what, label in DEEPSPEED.items():
            note_other("deepspeed", label, what)
    times = steps["in files"].engine.comm.step_times
    for engine in (stream, *(stepping.engine for stepping in steps.values())):
        engine.close(restore=False)
    share = times.bytes_read / of_states.nbytes
    return {name: seconds[1:] for name, seconds in found.items()}, share, times


def compare(name: str, seconds: list[float], others: list[float]) -> None:
    """Print the ratios of rounds."""
    ratios = [one / other for one, other in zip(seconds, others, strict=True)]
    print(f"{name}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def report(found: dict[str, list[float]], share: float, times: StepTimes) -> None:
    middle = {name: statistics.median(seconds) for name, seconds in found.items()}
    print("| | seconds, median | least to most |\n|---|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {middle[name]:.3f} | {min(seconds):.3f} to {max(seconds):.3f} |")
    print()
    limits = {
        f"stream, {count} tokens": (found["disk reads"], found[f"compute, {count} tokens"])
        for count in TOKENS
    }
    disk = [share * seconds for seconds in found["disk reads and writes"]]
    limits[f"step {STATES_ALONE}"] = (disk, found["step in memory"])
    for doing in ("step", "training"):
        limits[f"{doing} in files"] = (disk, found[f"{doing} in memory"])
    for name, both in limits.items():
        compare(f"{name} to the limit", found[name], [*map(max, *both)])
    compare("step by unit to fused step", *(found[name] for name in reversed(ON_PIECES)))
    rivals = {f"accelerate, {count} tokens": f"stream, {count} tokens" for count in TOKENS}
    rivals |= {f"DeepSpeed {doing}": f"{doing} in files" for doing in ("step", "training")}
    for theirs, ours in rivals.items():
        if theirs in found:
            compare(f"{theirs} to {ours}", found[theirs], found[ours])
    print(
        f"a step in files: {middle['step in files'] / middle['step in memory']:.2f} of one in"
        f" memory; it reads {times.bytes_read / 1e9:.2f} GB at {times.read_speed / 1e9:.2f} GB/s"
        f" and writes at {times.write_speed / 1e9:.2f} at once, and waits"
        f" {times.waiting / times.stepping:.0%} of its time"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=".", help="a folder on the disk that is measured")
    for name in ("deepspeed", "accelerate"):
        parser.add_argument(f"--{name}", help=f"an interpreter that has {name}, to compare with it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    width, depth = options.width, max(1, options.megabytes * 10**6 // (4 * options.width**2))
    print(f"{description()}; {depth} layers, {4 * depth * width**2 / 1e9:.2f} GB of weights")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder))
        others: Contenders = {}
        for name in ("deepspeed", "accelerate"):
            if (python := getattr(options, name)) is not None:
                others[name] = Contender(python, name, folder, width, depth)
                stack.callback(others[name].close)
        report(*measured(folder, width, depth, options.rounds, others))


if __name__ == "__main__":
    main()
