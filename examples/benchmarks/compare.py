"""The same GPT, data and optimizer under DDP, ZeRO and its peers, side by side in one run.

    python examples/benchmarks/compare.py                             # CPU, fp32, everything
    python examples/benchmarks/compare.py --precision bf16-mixed --only ddp zero3 fsdp2
    python examples/benchmarks/compare.py --device cuda --fake-world 64 --only zero3 fsdp2

Every contender runs in fresh processes. Rounds are interleaved (A B C A B C), and the step times of
each round are divided by those of the first contender, DDP, in the same round, which cancels drift
of the machine. On CUDA the host runs ahead of the device, as in training, and steps are timed on
the device. Memory and traffic come from separate, untimed runs. If a contender ends a round at
another loss than DDP, that is an error.

*Sent* are the elements per step in our ledger, *through sockets* the bytes per step that the kernel
counts for any contender, where ranks talk through gloo. Both are without windows, which send
nothing. *Page faults* are per step too, in steps that follow the timed ones.

``--fake-world N`` runs rank 0 of N alone, with torch's fake collectives, to show memory and the
overhead of host and device without a network. They send nothing, but copy this rank's own part to
the places of the others', N small copies per gather; losses mean nothing and are not checked. As
DDP cannot run there, the first contender is a step without traffic.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import machine
from contenders import CONTENDERS, NEED_OTHERS, Job, default_names
from measure import in_fresh_processes, timed, weighed


def compare(names: list[str], job: Job, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the times, their ratio to the first of ``names``, memory and traffic of each."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    right = next((name for name in names if name != "no traffic"), names[0])
    for number in range(rounds):
        for name in names:
            answer = in_fresh_processes(timed, name, job)
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
            **_least_peaks([in_fresh_processes(weighed, name, job) for _ in range(rounds)]),
        }
    return rows


def _least_peaks(weighed: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last answer, with the least peaks of all.

    The allocator's events are only those of threads that run Python, so what a thread of the
    backend frees now and then counts as alive forever.
    """
    peaks = ("peak_mib", "trainer_peak_mib")
    return {**weighed[-1], **{key: min(answer[key] for answer in weighed) for key in peaks}}


def _check_loss(found: tuple[str, float], expected: tuple[str, float], job: Job) -> None:
    (name, loss), (right, right_loss) = found, expected
    tolerance = 1e-4 if job.precision == "32-true" else 2e-2
    # Written so that NaN fails.
    if not abs(loss - right_loss) <= tolerance * abs(right_loss):
        raise RuntimeError(f"{name} ends at loss {loss}, {right} at {right_loss}.")


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table of the results."""
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
    """Plot the step-time ratio and peak memory of each contender."""
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
        parser.error(f"{unable[0]} cannot run with --fake-world. Remove it from --only.")
    rows = compare(names or default_names(job), job, rounds)
    date, here = time.strftime("%Y-%m-%d"), machine.description()
    print(f"\n{date}, {here}, {job.precision}\n\n{table(rows)}")
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        report = {"date": date, "machine": here, "job": asdict(job), "rows": rows}
        (output / "compare.json").write_text(json.dumps(report, indent=2))
        plot(rows, output / "compare.png")


if __name__ == "__main__":
    main()
