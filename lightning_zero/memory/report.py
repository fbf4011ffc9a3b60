"""The memory of a run as text, and as ``memory.json`` and the page ``memory.html``."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_zero.comm import StepTimes
from lightning_zero.memory import plot
from lightning_zero.memory.prediction import Estimate
from lightning_zero.memory.size import format_bytes, format_ranks
from lightning_zero.memory.terms import AWAY_ROWS, HOST_KINDS, KINDS, RESTING

EQUAL_STAGES = (
    "zero1 and zero2 need the same memory here. They differ only with several microbatches per step"
    " (accumulate_grad_batches): between these, stage 1 keeps gradients whole and stage 2 sharded."
    " With one microbatch, both reduce a unit's gradients as soon as it has all of them."
)

_KINDS = {
    "weights": "the parameters that forward reads",
    "gradients": "reduced gradients, until they are freed",
    "master": "the fp32 weights that the optimizer steps, if forward reads other copies",
    "states": "optimizer states, such as Adam's two moments",
    "buffers": "the module's buffers",
    "gathered": "whole weights of the units in use, at stage 3",
    "unreduced": "gradients before and during their reduction",
    "activations": "what forward saves for backward, and temporary results",
}

Measured = Mapping[str, Mapping[str, int]]


def write_report(
    folder: str | Path,
    *,
    subject: str = "a rank",
    measured: Measured | None = None,
    held: Mapping[str, int] | None = None,
    predicted: Estimate | None = None,
    stages: Sequence[Estimate] = (),
    device_memory: int | None = None,
    times: StepTimes | None = None,
) -> Path:
    """Write ``memory.json`` and a self-contained ``memory.html``; return the page's path.

    Args:
        folder: The folder for the files; created if it does not exist.
        subject: The model, precision, optimizer and batch, for the title.
        measured: Bytes by kind at each point of a step, the maximum over ranks.
        held: Bytes by kind that the predicted rank held between steps.
        predicted: The estimate for the same run; its step becomes the timeline.
        stages: Estimates that are shown side by side; savings are relative to the first.
        device_memory: Bytes of a device, drawn as a line.
        times: Times of the steps with offload, on the predicted rank.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "subject": subject,
        "measured": measured or {},
        "held": held or {},
        "predicted": None if predicted is None else facts_of(predicted),
        "stages": [facts_of(found) for found in stages],
        "device_memory": device_memory,
        "times": times._asdict() if times and times.seconds else None,
    }
    (folder / "memory.json").write_text(json.dumps(facts, indent=1) + "\n")
    parts = [_LEGEND, *_timeline(predicted, device_memory)]
    if stages:
        parts += _titled("The stages side by side", estimate_table(stages))
        parts += [f"<p>{EQUAL_STAGES}</p>"] if are_equal_stages(stages) else []
    if measured:
        rows = list(next(iter(measured.values())))
        parts += _titled("Measured, the maximum over all steps and ranks", table(measured, rows))
    if times and times.seconds:
        parts.append(f"<p>{times.describe()}</p>")
    if held and predicted is not None:
        rests = {"predicted": predicted.rests, "measured": held}
        parts += _titled("Predicted and measured, between steps, on one rank", rest_table(rests))
    page = folder / "memory.html"
    text = _PAGE.replace("{subject}", html.escape(subject))
    page.write_text(text.replace("{content}", "\n".join(parts)))
    return page


def are_equal_stages(stages: Sequence[Estimate]) -> bool:
    """Return whether stages 1 and 2 are both among ``stages`` and have the same peak."""
    peaks = {e.stage: e.peak.total for e in stages if e.offload is None and e.stage in (1, 2)}
    return len(peaks) == 2 and peaks[1] == peaks[2]


def rest_table(columns: Mapping[str, Mapping[str, int]]) -> str:
    """Return a table of bytes between steps."""
    return table(columns, (*RESTING, *AWAY_ROWS))


def table(columns: Mapping[str, Mapping[str, int | None]], rows: Sequence[str]) -> str:
    """Return a table of bytes, without the rows that are empty in every column."""
    shown = [row for row in rows if any(column.get(row) for column in columns.values())]
    width = max(map(len, (*shown, "unreduced")))
    widths = {name: max(len(name), 9) for name in columns}
    lines = [" " * width + "".join(f"  {name:>{widths[name]}}" for name in columns)]
    for row in shown:
        cells = [(widths[name], column.get(row)) for name, column in columns.items()]
        texts = [f"  {'' if count is None else format_bytes(count):>{w}}" for w, count in cells]
        lines.append(f"{row:<{width}}" + "".join(texts))
    return "\n".join(lines)


def estimate_table(estimates: Sequence[Estimate]) -> str:
    """Return estimates side by side: what rests, the most that comes and goes, and the peak.

    Host memory and files follow if any are used.
    """
    columns: dict[str, dict[str, int | None]] = {}
    for found in estimates:
        most = found.most
        saved = estimates[0].peak.total - found.peak.total
        columns[f"{found.name}, {format_ranks(found.world_size)}"] = {
            **{kind: most[kind] for kind in KINDS},
            "model states": found.model_states,
            "peak": found.peak.total,
            "saved": saved if saved > estimates[0].peak.total // 1000 else None,
            **{f"host {kind}": count for kind, count in found.host.items() if found.leaves_device},
            "host peak": found.host_peak if found.leaves_device else None,
            **{f"disk {kind}": count for kind, count in found.disk.items() if found.offload},
            "disk": sum(found.disk.values()) or None,
        }
    rows = [*RESTING, "model states", *KINDS[len(RESTING) :], "peak", "saved"]
    rows += [f"host {kind}" for kind in HOST_KINDS] + ["host peak"]
    return table(columns, [*rows, *(f"disk {kind}" for kind in RESTING), "disk"])


def facts_of(found: Estimate) -> dict[str, Any]:
    """Return an estimate as plain numbers."""
    return {
        "strategy": found.name,
        "world_size": found.world_size,
        "precision": found.precision,
        "num_parameters": found.num_parameters,
        "resting": found.resting,
        "model_states": found.model_states,
        "most": found.most,
        "peak": {"at": found.peak.label, "total": found.peak.total, "kinds": found.peak.kinds},
        "host": found.host,
        "host_peak": found.host_peak,
        "disk": found.disk,
        "offload": None if found.offload is None else asdict(found.offload),
        "moments": [{"at": m.label, **asdict(m)} for m in found.snapshots],
    }


def _timeline(predicted: Estimate | None, limit: int | None) -> list[str]:
    if predicted is None or not predicted.has_units:
        return []
    peak = predicted.peak
    title = f"One step under {predicted.name}, {format_ranks(predicted.world_size)}"
    parts = [
        "<h2>A step</h2>",
        f"<p>A rank holds at most <b>{format_bytes(peak.total)}</b>, {peak.label}, and"
        f" {format_bytes(predicted.snapshots[-1].total)} between steps.</p>",
    ]
    if not predicted.has_activations:
        parts.append("<p>Activations are not counted, because no batch was passed.</p>")
    if not plot.has_matplotlib():
        return [*parts, "<p>(Pictures need matplotlib: pip install 'lightning-zero[plot]'.)</p>"]
    svg = io.StringIO()
    plot.timeline(predicted.snapshots, title=title, limit=limit).savefig(svg, format="svg")
    return [*parts, f"<figure>{svg.getvalue()[svg.getvalue().index('<svg') :]}</figure>"]


def _titled(title: str, text: str) -> list[str]:
    return [f"<h2>{title}</h2>", f"<pre>{html.escape(text)}</pre>"]


_LEGEND = (
    "<p>All figures on this page are for one rank, that is, one process with one device. Sizes are"
    " decimal: 1 GB is 10<sup>9</sup> bytes, or 0.93 GiB; memory.json has the exact bytes. A unit"
    " of the model is a part that is gathered and reduced together, usually one of its repeated"
    " blocks.</p><details open><summary>The kinds of bytes</summary><dl>"
    + "".join(f"<dt>{kind}</dt><dd>{text}</dd>" for kind, text in _KINDS.items())
    + "</dl></details>"
)

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Memory of {subject}</title>
<meta name="viewport" content="width=device-width">
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
figure { margin: .5rem 0; } figure svg { width: 100%; height: auto; }
pre { overflow-x: auto; font-size: .85rem; }
dt { font-weight: bold; float: left; clear: left; width: 7rem; } dd { margin-left: 7.5rem; }
</style></head><body><h1>Memory of {subject}</h1>
{content}
</body></html>
"""
