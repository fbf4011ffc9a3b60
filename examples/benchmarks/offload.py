"""Weights and states in files, against the disk and against memory, on one rank.

    python examples/benchmarks/offload.py              # a model of 1 GB, in 10 GB of memory
    python examples/benchmarks/offload.py --megabytes 100 --rounds 2
    python examples/benchmarks/offload.py --predictions --megabytes 2000 --tokens 1 512 2048
    python examples/benchmarks/offload.py --deepspeed PYTHON --accelerate PYTHON

Each round measures, one after the other:

* ``disk reads``: the model's bytes by large requests of direct I/O, from two threads, to memory of
  the size of two units, as for streamed weights.
* ``disk reads and writes``: twice the model's bytes, as for AdamW's states, read and written at the
  same time, by two threads each.
* ``compute``: a forward with weights in memory, by default of 1 and of 512 tokens.
* ``stream``: the same with weights read from scratch files, which were dropped from the page
  cache. The limit is the larger of the disk's time and the computation's.
* ``step in memory``, ``step with states in files``, ``step in files``: an AdamW step over all
  elements. The limit is the larger of the time of a step in memory and the disk's time to read and
  write the bytes that the step's ledger counts. Masters in files are memory-mapped, and the system
  writes them back at any time: they are not in the limit, and pending writes are flushed before
  each measurement.
* ``casts of a step``, ``one copy``: the casts of masters in host memory to bf16, unit by unit, as a
  step with offload to the host makes them, and one copy of as many bytes, on all cores.
* ``training in memory``, ``training in files``: forward and backward of each number of ``--rows``,
  and the step. The limit is the larger of the disk's time and of training in memory.

Given the interpreter of an environment that has DeepSpeed or accelerate, the same rounds measure:

* ``DeepSpeed step``, ``DeepSpeed training``: of its stage 3, with optimizer states on NVMe.
* ``accelerate, 1 token`` and ``512``: the forward of its ``disk_offload``.

Figures are medians; ranges are over all rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from disk_contenders import Contender
from machine import description
from torch import Tensor, nn

from lightning_zero.checkpoint import load_module_state, read_safetensors, write_safetensors
from lightning_zero.engine import Engine
from lightning_zero.plan import RECIPES, Offload, Settings
from lightning_zero.tensors import StagingMemory

STATES_ALONE = "with states in files"
DEEPSPEED = {"step": "DeepSpeed step", "train": "DeepSpeed training"}
_REQUEST = 4 * 2**20


def model(width: int, depth: int) -> nn.Sequential:
    """Return layers on ``meta``, each a unit."""
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)])


def timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


class Disk:
    """Direct I/O on a scratch file, by two threads each way.

    Args:
        memory_bytes: Size of the memory that requests cycle through. They are faster where it fits
            into the processor's cache.
    """

    def __init__(self, folder: str, nbytes: int, memory_bytes: int = 4 * _REQUEST) -> None:
        path = os.path.join(folder, "disk")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, nbytes)
        self._places = range(0, nbytes - _REQUEST + 1, _REQUEST)
        # The memory that steps use, with huge pages where available.
        self._memory = StagingMemory(memory_bytes)
        self._num_buffers = memory_bytes // (4 * _REQUEST)
        self.write()

    @property
    def nbytes(self) -> int:
        """Bytes moved each way."""
        return len(self._places) * _REQUEST

    def read(self) -> None:
        self._all(os.preadv)

    def write(self) -> None:
        self._all(os.pwritev)

    def read_and_write(self) -> None:
        self._all(os.preadv, os.pwritev)

    def _all(self, *requests: Callable[..., int]) -> None:
        def some(way: int, number: int) -> None:
            places = range(2 * way + number, 4 * self._num_buffers, 4)
            buffers = [self._memory.part(place * _REQUEST, _REQUEST) for place in places]
            behind = len(self._places) // 2 * way
            in_order = (*self._places[behind:], *self._places[:behind])[number::2]
            for place, buffer in zip(in_order, itertools.cycle(buffers), strict=False):
                requests[way](self._file, [buffer], place)

        with ThreadPoolExecutor(2 * len(requests)) as threads:
            ways = [(way, number) for way in range(len(requests)) for number in range(2)]
            list(threads.map(some, *zip(*ways, strict=True)))


def forget(masters: Iterable[Tensor]) -> None:
    """Drop mapped files from memory."""
    page_out = 21  # MADV_PAGEOUT, of Linux 5.4; not in Python's mmap
    for master in masters:
        place, nbytes = ctypes.c_void_p(master.data_ptr()), ctypes.c_size_t(master.nbytes)
        ctypes.CDLL(None).madvise(place, nbytes, page_out)


def streaming(path: Path, settings: Settings, width: int, depth: int) -> Engine:
    """Return an engine that has copied the weights to scratch files."""
    engine = Engine(model(width, depth), settings)
    load_module_state(engine.module, engine, read_safetensors(path))
    return engine


class Stepping:
    """A model with gradients, and AdamW over it."""

    def __init__(self, settings: Settings, width: int, depth: int) -> None:
        self.engine = Engine(model(width, depth), settings)
        self.optimizer = torch.optim.AdamW(self.engine.module.parameters(), 1e-4, fused=True)
        self.engine.adopt(self.optimizer)
        self._width = width
        self.train(1)

    def step(self) -> None:
        self.optimizer.step()

    def train(self, rows: int) -> None:
        """Take a step as Lightning's loop does, with forward and backward in its closure."""

        def closure() -> None:
            self.optimizer.zero_grad()
            loss = self.engine.module(torch.ones(rows, self._width)).sum()
            loss.backward()

        self.optimizer.step(closure)


@torch.no_grad()
def forward(module: nn.Module, tokens: Tensor) -> None:
    module(tokens)


class Rounds:
    """Measured seconds by name, one entry per round.

    Args:
        others: Processes that measure other packages, by package.
    """

    def __init__(self, others: dict[str, Contender]) -> None:
        self.found: dict[str, list[float]] = {}
        self._others = others

    def note(self, name: str, function: Callable[[], object]) -> None:
        os.sync()  # pending writes of others would be in the way
        self.found.setdefault(name, []).append(timed(function))

    def note_other(self, package: str, name: str, what: str) -> None:
        if package in self._others:
            os.sync()
            self.found.setdefault(name, []).append(self._others[package].measure(what))

    def end_warm_up(self) -> None:
        """Forget the first round, which compares checksums and learns the order of units."""
        for seconds in self.found.values():
            seconds.clear()


class Predictions:
    """Forwards with weights in memory, and with weights read from files."""

    def __init__(self, folder: str, width: int, depth: int, tokens: Sequence[int]) -> None:
        self._path = Path(folder) / "weights.safetensors"
        names = (f"{n}.weight" for n in range(depth))
        write_safetensors(self._path, {n: torch.randn(width, width) / width**0.5 for n in names})
        # Reads and writes have half of the memory each; a half is the size of two units.
        units_bytes = 2 * 4 * width**2
        self._disk = Disk(folder, self._path.stat().st_size, max(2 * units_bytes, 4 * _REQUEST))
        self._whole = model(width, depth)
        self._whole.load_state_dict(read_safetensors(self._path), assign=True)
        for parameter in self._whole.parameters():
            parameter.data = parameter.data.clone()
        self._stream = streaming(self._path, _in_files(folder), width, depth)
        self._tokens = {count: torch.randn(count, width) for count in tokens}

    def measure(self, rounds: Rounds) -> None:
        rounds.note("disk reads", self._disk.read)
        for count, tokens in self._tokens.items():
            compute = functools.partial(forward, self._whole, tokens)
            stream = functools.partial(forward, self._stream.module, tokens)
            rounds.note(f"compute, {count} tokens", compute)
            forget(flat.master for flat in self._stream.sharded.flats)
            rounds.note(f"stream, {count} tokens", stream)
            rounds.note_other("accelerate", f"accelerate, {count} tokens", str(count))

    def close(self) -> None:
        self._stream.close(restore=False)

    def report(self, found: dict[str, list[float]]) -> None:
        for count in self._tokens:
            limit = map(max, found["disk reads"], found[f"compute, {count} tokens"])
            compare(f"stream, {count} tokens to the limit", found[f"stream, {count} tokens"], limit)
        for count in self._tokens:
            compare_other(f"accelerate, {count} tokens", f"stream, {count} tokens", found)


class Steps:
    """Steps of an optimizer with masters and states in memory, and in files."""

    def __init__(self, folder: str, width: int, depth: int, rows: Sequence[int]) -> None:
        self._disk = Disk(folder, 2 * 4 * depth * width**2)
        files = _in_files(folder)
        places = {
            "in memory": replace(files, offload=None),
            STATES_ALONE: replace(files, offload=Offload("nvme", None)),
            "in files": files,
        }
        self._rows = rows
        self._in = {name: Stepping(settings, width, depth) for name, settings in places.items()}

    def measure(self, rounds: Rounds) -> None:
        rounds.note("disk reads and writes", self._disk.read_and_write)
        for name in ("in memory", STATES_ALONE, "in files"):
            rounds.note(f"step {name}", self._in[name].step)
        for count in self._rows:
            for name in ("in memory", "in files"):
                train = functools.partial(self._in[name].train, count)
                rounds.note(training(name, count), train)
        for what, label in DEEPSPEED.items():
            rounds.note_other("deepspeed", label, what)

    def close(self) -> None:
        for stepping in self._in.values():
            stepping.engine.close(restore=False)

    def report(self, found: dict[str, list[float]]) -> None:
        times = self._in["in files"].engine.comm.transport.ledger.last_times
        share = times.bytes_read / self._disk.nbytes
        disk = [share * seconds for seconds in found["disk reads and writes"]]
        for name in (f"step {STATES_ALONE}", "step in files"):
            compare(f"{name} to the limit", found[name], map(max, disk, found["step in memory"]))
        for count in self._rows:
            label, least = training("in files", count), found[training("in memory", count)]
            compare(f"{label} to the limit", found[label], map(max, disk, least))
        for doing, label in DEEPSPEED.items():
            ours = {"step": "step in files", "train": training("in files", 1)}[doing]
            compare_other(label, ours, found)
        step, in_memory = (statistics.median(found[f"step in {at}"]) for at in ("files", "memory"))
        print(
            f"a step in files takes {step / in_memory:.2f} of the time of one in memory: it reads"
            f" {times.bytes_read / 1e9:.2f} GB, writes {times.bytes_written / 1e9:.2f}, and waits"
            " for files in"
            f" {times.waiting / times.stepping:.0%} of it"
        )


class OnHost(Offload):
    """Offload of masters and weights to the host of a device, played by a CPU."""

    def runs_on(self, device: torch.device) -> bool:
        return True

    def is_mapped(self, device: torch.device) -> bool:
        return False


class Casts:
    """Casts of masters in host memory."""

    def __init__(self, width: int, depth: int) -> None:
        offload, recipe = OnHost("cpu", "cpu"), RECIPES["bf16-mixed"]
        settings = Settings(units=(nn.Linear,), offload=offload, recipe=recipe)
        self._engine = Engine(model(width, depth), settings)
        self._masters = torch.ones(depth * width**2)
        self._weights = torch.empty_like(self._masters, dtype=torch.bfloat16)

    def _cast(self) -> None:
        for unit in self._engine.sharded.units:
            for flat in unit.flat_parameters:
                flat.store.cast(unit.label)

    def _copy(self) -> None:
        self._weights.copy_(self._masters)

    def measure(self, rounds: Rounds) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        rounds.note("casts of a step", self._cast)
        rounds.note("one copy", self._copy)
        torch.set_num_threads(1)

    def close(self) -> None:
        self._engine.close(restore=False)

    def report(self, found: dict[str, list[float]]) -> None:
        compare("casts of a step to one copy", found["casts of a step"], found["one copy"])


Part = Predictions | Steps | Casts


def training(name: str, rows: int) -> str:
    return f"training {name}, {rows} rows"


def _in_files(folder: str) -> Settings:
    return Settings(units=(nn.Linear,), offload=Offload("nvme", "nvme"), offload_path=folder)


def compare(name: str, seconds: Iterable[float], others: Iterable[float]) -> None:
    """Print the median and range of the ratios of rounds."""
    ratios = [one / other for one, other in zip(seconds, others, strict=True)]
    print(f"{name}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def compare_other(theirs: str, ours: str, found: dict[str, list[float]]) -> None:
    """Print the ratios of another package's seconds to ours, if it was measured."""
    if theirs in found:
        compare(f"{theirs} to {ours}", found[theirs], found[ours])


def run(
    parts: Sequence[Predictions | Steps | Casts], number: int, others: dict[str, Contender]
) -> None:
    """Measure ``parts`` in ``number`` rounds, and print the results."""
    rounds = Rounds(others)
    for index in range(number + 1):
        for part in parts:
            part.measure(rounds)
        if index == 0:
            rounds.end_warm_up()
    print("| | seconds, median | least to most |\n|---|---|---|")
    for name, seconds in rounds.found.items():
        middle, least, most = statistics.median(seconds), min(seconds), max(seconds)
        print(f"| {name} | {middle:.3f} | {least:.3f} to {most:.3f} |")
    print()
    for part in parts:
        part.report(rounds.found)
        part.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=".", help="folder on the disk to measure")
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 512), help="of each forward")
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 64), help="of training steps")
    parser.add_argument("--predictions", action="store_true", help="skip the optimizer steps")
    for name in ("deepspeed", "accelerate"):
        parser.add_argument(f"--{name}", help=f"interpreter with {name}, to compare with it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    width, depth = options.width, max(1, options.megabytes * 10**6 // (4 * options.width**2))
    print(f"{description()}; {depth} layers, {4 * depth * width**2 / 1e9:.2f} GB of weights")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder))
        others: dict[str, Contender] = {}
        for name in ("deepspeed", "accelerate"):
            if (python := getattr(options, name)) is not None:
                others[name] = Contender(python, name, folder, width, depth)
                stack.callback(others[name].close)
        parts: list[Predictions | Steps | Casts] = [
            Predictions(folder, width, depth, options.tokens)
        ]
        if not options.predictions:
            rows = options.rows if options.deepspeed is None else sorted({1, *options.rows})
            parts += [Steps(folder, width, depth, rows), Casts(width, depth)]
        run(parts, options.rounds, others)


if __name__ == "__main__":
    main()
