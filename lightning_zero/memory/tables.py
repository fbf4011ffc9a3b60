"""Bytes by kind as text: one line for each kind, one column for each thing compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_zero.memory.prediction import Estimate
from lightning_zero.memory.size import format_bytes, format_ranks
from lightning_zero.memory.terms import HOST_KINDS, KINDS, RESTING


def table(columns: Mapping[str, Mapping[str, int | None]], rows: Sequence[str]) -> str:
    """A table of bytes; a row that is empty in every column is left out."""
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
    """Estimates side by side: what rests, the most that comes and goes, and the peak.

    Host memory and files follow where something rests there.
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
            **{f"host {kind}": count for kind, count in found.host.items() if found.offload},
            "host peak": found.host_peak if found.offload else None,
            **{f"disk {kind}": count for kind, count in found.disk.items() if found.offload},
            "disk": sum(found.disk.values()) or None,
        }
    rows = [*RESTING, "model states", *KINDS[len(RESTING) :], "peak", "saved"]
    rows += [f"host {kind}" for kind in HOST_KINDS] + ["host peak"]
    return table(columns, [*rows, *(f"disk {kind}" for kind in RESTING), "disk"])
