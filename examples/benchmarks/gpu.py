"""Everything that a machine with one GPU or several can show, in one command and nine minutes.

    python examples/benchmarks/gpu.py --output gpu

It first runs the tests that need a device, several ranks over NCCL included, which share a GPU if
there is but one. Then it compares, in fp32 and bf16-mixed: the Trainer alone and under our
strategies, with the peak that ``estimate`` predicts; plain loops under DDP, FSDP2, every stage and,
where installed, DeepSpeed at world 1; and rank 0 of 8 on torch's fake collectives (see
``compare.py``). With several GPUs, plain loops also run on all of them. At last it profiles how
much of copies and messages is hidden. It needs torch 2.11 or newer, Lightning and pytest, but no
network. When time runs short, it drops rounds and steps, never a contender.

The results are ``gpu.json``, ``gpu.md`` and ``tests.log`` in the output folder.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import machine
import torch
from contenders import CONTENDERS, OFFLOADED, Job
from measure import in_fresh_processes, measured
from overlap import profiled
from trained import STRATEGIES, trained

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/engine/test_cuda.py",)
TESTS_SHARE = 0.4
"""The largest share of the time that tests may take."""
GPT_1B = Job(
    dim=2048, layers=18, heads=16, vocabulary=32768, length=1024, steps=6, device="cuda", world=1,
    threads=max(1, (os.cpu_count() or 1) // max(1, torch.cuda.device_count())),
)  # fmt: skip
PRECISIONS = ("32-true", "bf16-mixed")
STAGES = ("zero1", "zero2", "zero3", "zero3 keep", "fsdp2")
ON_ALL_GPUS = ("ddp", *STAGES, *OFFLOADED, *[name for name in CONTENDERS if "deepspeed" in name])
WORLDS = {1: (*STRATEGIES, "no traffic", *ON_ALL_GPUS), 8: STAGES}
"""The contenders at each number of ranks, of which only the first is real."""
PROFILED = ("zero2 offload", "zero3 offload", "zero3 nvme")


class Case(NamedTuple):
    """One contender in one setting; the other ranks of a world may be fake."""

    precision: str
    world: int
    name: str
    is_fake: bool = False


@dataclass
class Clock:
    """The deadline, and the seconds that each run of a contender took so far."""

    deadline: float
    runs: list[float] = field(default_factory=list)

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline - time.monotonic()

    def has_time_for(self, num_runs: int) -> bool:
        """Return whether ``num_runs`` more runs are likely to end in time."""
        return not self.runs or statistics.mean(self.runs) * num_runs < self.left()


def cases() -> list[Case]:
    """Return all contenders in all settings."""
    num_gpus = torch.cuda.device_count()
    worlds = [(world, world > 1, names) for world, names in WORLDS.items()]
    if num_gpus > 1:
        worlds.insert(1, (num_gpus, False, ON_ALL_GPUS))
    return [
        Case(precision, world, name, is_fake)
        for precision in PRECISIONS
        for world, is_fake, names in worlds
        for name in names
    ]


def run_tests(output: Path, seconds: float) -> dict[str, Any]:
    """Run the tests that need a device; return how they ended and how long they took."""
    # Not every machine has the plugins that the project's pytest options need.
    options = ["-o", "addopts=", "-o", "timeout=0", "-W", "ignore", "-ra", "-q"]
    command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", *TESTS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = time.monotonic()
    with (output / "tests.log").open("w") as log:
        try:
            code: int | str = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"timed out after {seconds:.0f} s"
    lines = (output / "tests.log").read_text().strip().splitlines()
    return {
        "code": code,
        "seconds": time.monotonic() - start,
        "summary": lines[-1] if lines else "",
        "failed": [line for line in lines if line.startswith(("FAILED", "ERROR"))],
    }


def run_case(case: Case, job: Job, worker: Any = None) -> dict[str, Any]:
    """Run one contender in a fresh process; an error becomes its answer."""
    sizes = {"fake_world": case.world} if case.is_fake else {"world": case.world}
    job = replace(job, precision=case.precision, **sizes)
    worker = worker or (trained if case.name in STRATEGIES else measured)
    try:
        return in_fresh_processes(worker, case.name, job)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def rounds(job: Job, clock: Clock, most: int) -> Iterator[list[tuple[Case, dict[str, Any]]]]:
    """Run all contenders in rounds while time allows, and yield the answers of each round."""
    for number in range(most):
        if number and not clock.has_time_for(len(cases())):
            return
        answers: list[tuple[Case, dict[str, Any]]] = []
        for case in cases():
            if not clock.has_time_for(len(cases()) - len(answers)):
                job = replace(job, steps=2, warmup=1)
            start = time.monotonic()
            answer = run_case(case, job)
            clock.runs.append(time.monotonic() - start)
            print(f"round {number + 1}: {case} {_shown(answer)}", file=sys.stderr, flush=True)
            answers.append((case, answer))
        yield answers


def profiles(job: Job) -> list[dict[str, Any]]:
    """Profile what moves data beside computation: offload, and messages between several GPUs."""
    if job.device != "cuda":
        return []
    num_gpus = torch.cuda.device_count()
    names = (*PROFILED, *(("ddp", *STAGES) if num_gpus > 1 else ()))
    cases = [Case("bf16-mixed", num_gpus, name) for name in names]
    return [{"name": case.name, **run_case(case, job, profiled)} for case in cases]


def overlap_table(found: list[dict[str, Any]]) -> str:
    """Return a Markdown table of profiles."""
    lines = [
        "| bf16-mixed | compute ms/step | up | down | sent | hidden behind compute | both ways |",
        "|---" * 7 + "|",
    ]
    for row in found:
        if "error" in row:
            lines.append(f"| {row['name']} | {row['error'].splitlines()[0][:100]} | | | | | |")
            continue
        times = " | ".join(f"{row[f'{k}_ms']:.1f}" for k in ("compute", "up", "down", "sent"))
        lines.append(f"| {row['name']} | {times} | {row['hidden']:.2f} | {row['both_ways']:.2f} |")
    return "\n".join(lines)


def _shown(answer: dict[str, Any]) -> str:
    if "error" in answer:
        return str(answer["error"])
    phases = [f"{name} {seconds:.1f}" for name, seconds in answer.get("phases", {}).items()]
    return f"{answer['seconds']:.4f} s" + (f" ({', '.join(phases)} s)" if phases else "")


def phases_table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the seconds of each phase of a run under the Trainer."""
    timed = [row for row in rows if "phases" in row]
    names = list(timed[0]["phases"]) if timed else []
    lines = [
        f"| {' | '.join(['precision', 'strategy', *names])} |",
        "|---" * (len(names) + 2) + "|",
    ]
    for row in timed:
        seconds = [f"{row['phases'][name]:.1f}" for name in names]
        lines.append(f"| {' | '.join([row['precision'], row['name'], *seconds])} |")
    return "\n".join(lines)


def rows_of(answers: list[list[tuple[Case, dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return one row per case: median time, its ratio to DDP's, and memory.

    DDP's is that of the same ranks; of rank 0 of a fake world, that of one rank.
    """
    by_case: dict[Case, list[dict[str, Any]]] = {}
    for one in answers:
        for case, answer in one:
            by_case.setdefault(case, []).append(answer)
    rows = []
    for case, found in by_case.items():
        row = {**case._asdict(), **found[-1]}
        base_world = 1 if case.is_fake else case.world
        base = by_case[case._replace(world=base_world, name="ddp", is_fake=False)]
        pairs = [(a, b) for a, b in zip(found, base, strict=True) if "seconds" in {*a} & {*b}]
        if pairs:
            row["seconds"] = statistics.median(own["seconds"] for own, _ in pairs)
            ratios = [own["seconds"] / other["seconds"] for own, other in pairs]
            row["ratio"], row["ratio_range"] = statistics.median(ratios), [min(ratios), max(ratios)]
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table; ratios are to DDP in the same precision and round."""
    lines = [
        "| precision | ranks | | ms/step | ratio to DDP | range | peak MiB | under the Trainer"
        " | allocated under it MiB | predicted MiB | reserved MiB | states MiB |",
        "|---" * 12 + "|",
    ]
    for row in rows:
        ranks = f"{row['world']}{' (fake)' if row.get('is_fake') else ''}"
        head = f"| {row['precision']} | {ranks} | {row['name']} |"
        if "error" in row:
            lines.append(f"{head} {row['error'].splitlines()[0][:100]} | | | | | | | | |")
            continue
        low, high = row.get("ratio_range", (float("nan"),) * 2)
        held = row.get("bytes", {})
        states = sum(held.get(kind, 0) for kind in ("weights", "master", "states")) / 2**20
        # Runs of a Trainer know all that was allocated, and no peak beyond the idle model.
        kinds = (
            *("peak_mib", "trainer_peak_mib"),
            *("allocated_mib", "predicted_mib", "reserved_mib"),
        )
        peaks = [f"{row[kind]:.0f}" if kind in row else "" for kind in kinds]
        lines.append(
            f"{head} {row['seconds'] * 1000:.1f} | {row.get('ratio', float('nan')):.3f}"
            f" | {low:.3f} to {high:.3f} | {' | '.join(peaks)}"
            f" | {f'{states:.0f}' if held else ''} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run tests and comparison; return 1 if a test or a contender failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gpu"), help="folder for the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit for everything")
    parser.add_argument("--rounds", type=int, default=5, help="maximum number of rounds")
    for name, default in asdict(GPT_1B).items():
        if name not in ("windows", "precision", "fake_world", "world"):
            parser.add_argument(f"--{name}", type=type(default), default=default)
    arguments = vars(parser.parse_args())
    output, minutes, most = (arguments.pop(key) for key in ("output", "minutes", "rounds"))
    job = replace(GPT_1B, **arguments)
    if job.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU here. Use --device cpu to rehearse the run.")
    output.mkdir(parents=True, exist_ok=True)
    seconds = minutes * 60 * 0.85  # the rest is for profiles
    clock = Clock(time.monotonic() + seconds)
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine.description(),
        "job": asdict(job),
        "tests": run_tests(output, seconds * TESTS_SHARE),
    }
    answers = []
    for one in rounds(job, clock, most):
        answers.append(one)
        # Written after each round, in case a later one fails.
        report.update(rounds=len(answers), rows=rows_of(answers))
        (output / "gpu.json").write_text(json.dumps(report, indent=2))
    head = f"{report['date']}, {report['machine']}, {len(answers)} rounds"
    tests = f"Tests: {report['tests']['summary'] or report['tests']['code']}"
    report["profiles"] = profiles(job)
    (output / "gpu.json").write_text(json.dumps(report, indent=2))
    tables = [table(report["rows"]), phases_table(report["rows"])]
    tables += [overlap_table(report["profiles"])] if report["profiles"] else []
    page = "\n\n".join([head, tests, *report["tests"]["failed"], *tables]) + "\n"
    (output / "gpu.md").write_text(page)
    print(f"\n{page}")
    rows = [*report["rows"], *report["profiles"]]
    return int(report["tests"]["code"] != 0 or any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
