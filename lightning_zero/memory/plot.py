"""Pictures of memory; they need the ``plot`` extra (matplotlib).

Each function returns a matplotlib ``Figure``: ``stages(...).savefig("stages.png")``. A kind has the
same colour in all of them; resting kinds are stacked first, then those that come and go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_zero.memory.prediction import Estimate
from lightning_zero.memory.size import format_bytes
from lightning_zero.memory.snapshots import Snapshot
from lightning_zero.memory.terms import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
_STAGE_COLOURS = {0: "#555555", 1: "#1f5a96", 2: "#e4572e", 3: "#0b7a75"}
_INK = "#222222"
_LIMIT = "#b00020"


def has_matplotlib() -> bool:
    """Return whether the ``plot`` extra is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def timeline(snapshots: Sequence[Snapshot], *, title: str, limit: int | None = None) -> Figure:
    """Draw one step from left to right, with the bytes held stacked by kind.

    Args:
        snapshots: The snapshots of a step, as in ``Estimate.snapshots``.
        title: The title.
        limit: Bytes of a device's memory, drawn as a line.
    """
    figure, axes = _figure(9.0, 4.4, title)
    edges = list(range(len(snapshots) + 1))
    bottom = [0.0] * len(edges)
    scale, unit = _scale(max(snapshot.total for snapshot in snapshots))
    for kind in _present([snapshot.kinds for snapshot in snapshots]):
        heights = [snapshot.kinds[kind] / scale for snapshot in snapshots]
        top = [low + h for low, h in zip(bottom, [*heights, heights[-1]], strict=True)]
        axes.fill_between(edges, bottom, top, step="post", color=COLOURS[kind], label=kind, lw=0)
        bottom = top
    axes.step(edges, bottom, where="post", color=_INK, lw=0.8)
    peak = max(range(len(snapshots)), key=lambda index: snapshots[index].total)
    height = 1.22 * max([*bottom, (limit or 0) / scale])
    label = snapshots[peak].total / scale + 0.03 * height
    if limit is not None:
        line = limit / scale
        # Keep the label of the limit away from that of the peak, and both off the line.
        is_left = peak >= len(snapshots) / 2
        axes.axhline(line, color=_LIMIT, ls="--", lw=1.2)
        axes.annotate(f"device: {format_bytes(limit)}", (0.01 if is_left else 0.99, line),
                      xycoords=("axes fraction", "data"), xytext=(0, 4),
                      textcoords="offset points", ha="left" if is_left else "right", va="bottom",
                      color=_LIMIT, fontsize=9)  # fmt: skip
        if label - 0.04 * height < line < label + 0.14 * height:
            label = line + 0.03 * height
    _name_phases(axes, snapshots)
    _mark_peak(axes, snapshots[peak], peak + 0.5, scale, label)
    axes.set_xlim(0, len(snapshots))
    axes.set_ylim(0, max(height, label + 0.15 * height))
    axes.set_ylabel(f"{unit} per rank")
    _legend(axes)
    return figure


def stages(columns: Mapping[str, Mapping[str, int]], *, title: str) -> Figure:
    """Draw bytes by kind, one bar per strategy; savings are relative to the first."""
    figure, axes = _figure(9.0, 1.3 + 0.62 * len(columns), title)
    totals = [sum(kinds.get(kind, 0) for kind in KINDS) for kinds in columns.values()]
    scale, unit = _scale(max(totals))
    left = [0.0] * len(columns)
    for kind in _present(columns.values()):
        widths = [kinds.get(kind, 0) / scale for kinds in columns.values()]
        axes.barh(list(columns), widths, left=left, color=COLOURS[kind], label=kind, height=0.66)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, total in enumerate(totals):
        saved = 1 - total / totals[0]
        less = f"   {saved:.0%} less than {next(iter(columns))}" if saved > 0.005 else ""
        axes.annotate(f" {format_bytes(total)}{less}", (total / scale, place), va="center",
                      fontsize=10, color=_INK)  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(totals) / scale)
    axes.set_xlabel(f"{unit} per rank")
    axes.tick_params(axis="y", length=0, labelsize=11)
    _legend(axes)
    return figure


def scaling(estimates: Sequence[Estimate], *, title: str, limit: int | None = None) -> Figure:
    """Draw model states by number of ranks: dots include padding, lines are the formula."""
    figure, axes = _figure(9.0, 4.4, title)
    scale, unit = _scale(max(found.model_states for found in estimates))
    worlds = sorted({found.world_size for found in estimates})
    ends: dict[str, _End] = {}
    for stage in sorted({found.stage for found in estimates}):
        own = [found for found in estimates if found.stage == stage]
        fixed, shared = replicated_and_sharded(own)
        line, dots = [(fixed + shared / n) / scale for n in worlds], [e.model_states for e in own]
        colour = _STAGE_COLOURS[stage]
        axes.plot(worlds, line, color=colour, lw=1.5)
        places = [found.world_size for found in own]
        axes.plot(places, [count / scale for count in dots], "o", color=colour, ms=5)
        text = format_bytes(dots[-1])
        names = ends[text].names if text in ends else ()
        ends[text] = _End((*names, own[-1].name), dots[-1] / scale, colour)
    texts = [(f"{', '.join(end.names)}: {text}", end) for text, end in ends.items()]
    if limit is not None:
        axes.plot(worlds, [limit / scale] * len(worlds), color=_LIMIT, ls="--", lw=1.2)
        texts.append((f"device: {format_bytes(limit)}", _End((), limit / scale, _LIMIT)))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.set_xlim(worlds[0] / 1.1, worlds[-1] * 1.1)
    ticks = _ticks(*axes.dataLim.intervaly)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(ticks[0], ticks[-1])
    axes.set_xlabel("number of ranks (logarithmic scale)")
    axes.set_ylabel(f"model states, {unit} per rank (logarithmic scale)")
    axes.grid(axis="y", color="#dddddd", lw=0.7)
    _name_ends(axes, texts)
    return figure


class _End(NamedTuple):
    """The right end of one line, or of several that end at the same value."""

    names: tuple[str, ...]
    value: float
    colour: str


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers that enclose ``low`` to ``high``, as ticks of a logarithmic axis."""
    mantissas = (1, 2, 5) if high > 4 * low else (1, 1.5, 2, 3, 4, 5, 6, 8)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    ticks = [float(f"{mantissa}e{power}") for power in powers for mantissa in mantissas]
    first = max(index for index, tick in enumerate(ticks) if tick < low)
    last = min(index for index, tick in enumerate(ticks) if tick > high)
    return ticks[first : last + 1]


def _name_ends(axes: Any, texts: Sequence[tuple[str, _End]]) -> None:
    """Label the ends of lines, moving labels apart where they would touch."""
    low, high = (math.log(value) for value in axes.get_ylim())
    place = -math.inf
    for text, end in sorted(texts, key=lambda pair: pair[1].value):
        place = max((math.log(end.value) - low) / (high - low), place + 0.06)
        axes.annotate(text, (1.01, place), xycoords="axes fraction", color=end.colour,
                      va="center", fontsize=10, fontweight="bold")  # fmt: skip


def replicated_and_sharded(estimates: Sequence[Estimate]) -> tuple[float, float]:
    """Return the numbers of the formula ``replicated + sharded / ranks`` for one stage's bytes."""
    first, last = estimates[0], estimates[-1]
    if first.stage == 0 or first.world_size == last.world_size:
        return float(first.model_states), 0.0
    gap = 1 / first.world_size - 1 / last.world_size
    shared = (first.model_states - last.model_states) / gap
    return first.model_states - shared / first.world_size, shared


def _figure(width: float, height: float, title: str) -> tuple[Figure, Any]:
    if not has_matplotlib():
        raise ImportError("Pictures need matplotlib: pip install 'lightning-zero[plot]'.")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=130)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _present(many: Any) -> list[str]:
    return [kind for kind in KINDS if any(kinds.get(kind) for kinds in many)]


def _scale(largest: float) -> tuple[float, str]:
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= scale:
            return scale, unit
    return 1.0, "bytes"


def _mark_peak(axes: Any, snapshot: Snapshot, place: float, scale: float, height: float) -> None:
    """Label the peak at ``height``; the label hides the lines behind it."""
    axes.annotate(
        f"peak {format_bytes(snapshot.total)}\n{snapshot.label}",
        (place, snapshot.total / scale), xytext=(place, height),
        ha="center", va="bottom", fontsize=9, color=_INK, zorder=5,
        bbox={"facecolor": "white", "lw": 0, "pad": 1},
        arrowprops={"arrowstyle": "-", "color": _INK, "lw": 0.8},
    )  # fmt: skip


def _name_phases(axes: Any, snapshots: Sequence[Snapshot]) -> None:
    """Label each phase below its part of the axis, with lines between phases."""
    starts = [0]
    for index in range(1, len(snapshots)):
        if snapshots[index].phase != snapshots[index - 1].phase:
            starts.append(index)
    ends = [*starts[1:], len(snapshots)]
    for start in starts[1:]:
        axes.axvline(start, color="#888888", lw=0.8, ls=":")
    names = {"forward": "forward", "backward": "backward", "step": "step", "rest": "at rest"}
    labels = [names[snapshots[start].phase] for start in starts]
    axes.set_xticks([(start + end) / 2 for start, end in zip(starts, ends, strict=True)], labels)
    axes.tick_params(axis="x", length=0, labelsize=11)


def _legend(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0),
                frameon=False, fontsize=10)  # fmt: skip
