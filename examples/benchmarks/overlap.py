"""How much of what is copied and sent a contender hides behind computation, from a profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from contenders import Job
from measure import Run, joined
from torch.profiler import ProfilerActivity, profile

STEPS = 3
Spans = list[tuple[float, float]]


def profiled(rank: int, name: str, job: Job, port: int, answer: Path) -> None:
    """Write the milliseconds per step of each kind of work on the device, and what overlaps."""
    with joined(rank, job, port):
        run = Run(rank, name, job)
        for _ in range(job.warmup):
            run()
        run.settle()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            for _ in range(STEPS):
                run()
            run.settle()
        if rank == 0:
            answer.write_text(json.dumps(_summary(spans_of(list(seen.events() or ())))))


def spans_of(events: list[Any]) -> dict[str, Spans]:
    """Return when the device computed, copied up and down, and sent, in microseconds."""
    kinds: dict[str, Spans] = {"compute": [], "up": [], "down": [], "sent": []}
    for event in events:
        # Named ranges are shown on the device too.
        is_range = event.name.startswith(("zero.", "nccl:", "ProfilerStep", "Optimizer."))
        if event.device_type == torch.autograd.DeviceType.CUDA and not is_range:
            span = (event.time_range.start, event.time_range.end)
            kinds[_kind_of(event.name)].append(span)
    return {kind: _union(spans) for kind, spans in kinds.items()}


def _kind_of(kernel: str) -> str:
    if "HtoD" in kernel:
        return "up"
    if "DtoH" in kernel:
        return "down"
    return "sent" if "nccl" in kernel.lower() else "compute"


def _summary(kinds: dict[str, Spans]) -> dict[str, float]:
    found = {f"{kind}_ms": _length(spans) / 1000 / STEPS for kind, spans in kinds.items()}
    moved = _union([span for kind in ("up", "down", "sent") for span in kinds[kind]])
    found["hidden"] = _share(moved, kinds["compute"])
    shorter = min(kinds["up"], kinds["down"], key=_length)
    found["both_ways"] = _length(_common(kinds["up"], kinds["down"])) / max(_length(shorter), 1e-9)
    return found


def _share(spans: Spans, others: Spans) -> float:
    """Return the share of ``spans`` during which one of ``others`` runs."""
    return _length(_common(spans, others)) / max(_length(spans), 1e-9)


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def _union(spans: Spans) -> Spans:
    joined: Spans = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _common(spans: Spans, others: Spans) -> Spans:
    """Return where both of two unions run."""
    found, rest = [], list(others)
    for start, end in spans:
        found += [(max(start, a), min(end, b)) for a, b in rest if a < end and start < b]
    return found
