"""Formatted bytes, tables, ``memory.json`` and a plot, ``memory.svg``."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_zero.memory.model import Estimate
from lightning_zero.memory.walk import AWAY_ROWS, KINDS, RESTING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "weights": "#1f5a96",
    "gradients": "#4f94cd",
    "master": "#0b7a75",
    "states": "#62b6a0",
    "buffers": "#9aa5b1",
    "gathered": "#f2a541",
    "unreduced": "#e4572e",
    "activations": "#d9c9e8",
}


_PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}


def format_bytes(count: float) -> str:
    """Format with three figures and a unit: ``160 GB``, ``1.58 MB``, ``512 B``."""
    for prefix in ("T", "G", "M", "K"):
        scale = _PREFIXES[prefix]
        if abs(count) >= 0.9995 * scale:
            value = count / scale
            digits = max(0, 3 - len(f"{abs(value):.3g}".split(".")[0]))
            return f"{value:.{digits}f} {prefix.replace('K', 'k')}B"
    return f"{count:.0f} B"


def format_ranks(world_size: int) -> str:
    """Format a number of ranks: ``1 rank``, ``8 ranks``."""
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


def parse_bytes(text: str) -> int:
    """Parse a number of bytes such as ``80GB``, ``24 GiB`` or ``1e9``."""
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None or re.fullmatch(r"\d{1,4}", text.strip()):  # a unit was forgotten
        raise ValueError(f"Expected a number of bytes such as '80GB' or '24GiB', got {text!r}.")
    number, prefix, is_binary = match.groups()
    scale = _PREFIXES[prefix.upper()]
    if is_binary:
        scale = 1024 ** ["", "K", "M", "G", "T"].index(prefix.upper())
    return int(float(number) * scale)


def parse_numel(text: str) -> int:
    """Parse a number of parameters such as ``10B``, ``350M`` or ``1000``."""
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([KMBT]?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"Expected a number of parameters such as '10B' or '350M', got {text!r}.")
    return round(float(match.group(1)) * _PREFIXES[match.group(2).upper()])


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
        saved = estimates[0].peak.total - found.peak.total
        columns[f"{found.name}, {format_ranks(found.world_size)}"] = {
            **found.most,
            "model states": found.model_states,
            "peak": found.peak.total,
            "saved": saved if saved > estimates[0].peak.total // 1000 else None,
            **{row: found.rests[row] for row in AWAY_ROWS if found.offload},
            "host peak": found.host_peak if found.offload else None,
            "disk": sum(found.disk.values()) or None,
        }
    rows = [*RESTING, "model states", *KINDS[len(RESTING) :], "peak", "saved"]
    return table(columns, [*rows, *AWAY_ROWS, "host peak", "disk"])


def write_report(
    folder: Path, estimates: Sequence[Estimate], limit: int | None = None
) -> list[Path]:
    """Write ``memory.json`` and, if matplotlib is installed, a plot; return what was written.

    The plot shows a step of the last estimate that has one, and a device's ``limit`` as a line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = [_facts_of(found) for found in estimates]
    written = [folder / "memory.json"]
    written[0].write_text(json.dumps(facts, indent=1) + "\n")
    shown = [found for found in estimates if len(found.snapshots) > 1]
    with contextlib.suppress(ImportError):
        from matplotlib.figure import Figure

        if shown:
            figure = Figure(figsize=(9.0, 4.4), layout="constrained")
            draw(figure.add_subplot(), shown[-1], limit)
            figure.savefig(folder / "memory.svg")
            written.append(folder / "memory.svg")
    return written


def draw(axes: Axes, found: Estimate, limit: int | None = None) -> None:
    """Draw one step from left to right, with the bytes held stacked by kind, those at rest first.

    Args:
        axes: Axes of matplotlib.
        found: An estimate of a model.
        limit: Bytes of a device's memory, drawn as a line.
    """
    parts, gigabyte = found.snapshots, 1e9
    edges, bottom = list(range(len(parts) + 1)), [0.0] * (len(parts) + 1)
    for kind in KINDS:
        heights = [part.kinds[kind] / gigabyte for part in parts]
        if any(heights):
            pairs = zip(bottom, [*heights, heights[-1]], strict=True)
            top = [low + height for low, height in pairs]
            axes.fill_between(
                edges, bottom, top, step="post", color=COLOURS[kind], label=kind, lw=0
            )
            bottom = top
    if limit is not None:
        axes.axhline(limit / gigabyte, color="#b00020", ls="--", label="device")
    starts = [0] + [i for i in edges[1:-1] if parts[i].phase != parts[i - 1].phase]
    axes.set_xticks(starts, [parts[start].phase for start in starts], ha="left")
    axes.set_xlim(0, len(parts))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GB per rank")
    axes.set_title(
        f"A step under {found.name}, {format_ranks(found.world_size)}: peak"
        f" {format_bytes(found.peak.total)} {found.peak.label}",
        loc="left",
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _facts_of(found: Estimate) -> dict[str, Any]:
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
        "parts": [{"at": part.label, **asdict(part)} for part in found.snapshots],
    }
