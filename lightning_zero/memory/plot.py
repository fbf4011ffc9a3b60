"""Pictures of memory; they need the ``plot`` extra (matplotlib).

Each function returns a matplotlib ``Figure``: ``stages(...).savefig("stages.png")``. One kind has
one colour in all of them, from what rests at the bottom to what comes and goes at the top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_zero.memory.moments import Moment
from lightning_zero.memory.prediction import Estimate
from lightning_zero.memory.size import format_bytes
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


def has_matplotlib() -> bool:
    """Whether the ``plot`` extra is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def timeline(moments: Sequence[Moment], *, title: str, limit: int | None = None) -> Figure:
    """One step from left to right, what is held stacked by kind.

    Args:
        moments: The stretches of a step, as in ``Estimate.moments``.
        title: What is shown.
        limit: A device's memory, drawn as a line.
    """
    figure, axes = _figure(9.0, 4.4, title)
    edges = list(range(len(moments) + 1))
    bottom = [0.0] * len(edges)
    scale, unit = _scale(max(moment.total for moment in moments))
    for kind in _present([moment.kinds for moment in moments]):
        heights = [moment.kinds[kind] / scale for moment in moments]
        top = [low + h for low, h in zip(bottom, [*heights, heights[-1]], strict=True)]
        axes.fill_between(edges, bottom, top, step="post", color=COLOURS[kind], label=kind, lw=0)
        bottom = top
    axes.step(edges, bottom, where="post", color=_INK, lw=0.8)
    peak = max(range(len(moments)), key=lambda index: moments[index].total)
    _mark_peak(axes, moments[peak], peak + 0.5, scale)
    _name_phases(axes, moments)
    if limit is not None:
        axes.axhline(limit / scale, color="#b00020", ls="--", lw=1.2)
        axes.annotate(f"device: {format_bytes(limit)}", (0.2, limit / scale), color="#b00020",
                      va="bottom", fontsize=9)  # fmt: skip
    axes.set_xlim(0, len(moments))
    axes.set_ylim(0, 1.18 * max([*bottom, (limit or 0) / scale]))
    axes.set_ylabel(f"{unit} per rank")
    _legend(axes)
    return figure


def stages(columns: Mapping[str, Mapping[str, int]], *, title: str) -> Figure:
    """Bytes by kind, one bar for each strategy; the first is what the others save against."""
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
        less = f"   {saved:.0%} less" if place and saved > 0.005 else ""
        axes.annotate(f" {format_bytes(total)}{less}", (total / scale, place), va="center",
                      fontsize=10, color=_INK)  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(totals) / scale)
    axes.set_xlabel(f"{unit} per rank")
    axes.tick_params(axis="y", length=0, labelsize=11)
    _legend(axes)
    return figure


def scaling(estimates: Sequence[Estimate], *, title: str, limit: int | None = None) -> Figure:
    """Model states against the number of ranks: dots with padding, lines the formula."""
    figure, axes = _figure(9.0, 4.4, title)
    scale, unit = _scale(max(found.model_states for found in estimates))
    worlds = sorted({found.world_size for found in estimates})
    ends: dict[str, tuple[list[str], Estimate]] = {}
    for stage in sorted({found.stage for found in estimates}):
        own = [found for found in estimates if found.stage == stage]
        fixed, shared = replicated_and_sharded(own)
        line, dots = [(fixed + shared / n) / scale for n in worlds], [e.model_states for e in own]
        colour = _STAGE_COLOURS[stage]
        axes.plot(worlds, line, color=colour, lw=1.5)
        places = [found.world_size for found in own]
        axes.plot(places, [count / scale for count in dots], "o", color=colour, ms=5)
        ends.setdefault(format_bytes(dots[-1]), ([], own[-1]))[0].append(own[-1].name)
    for text, (names, last) in ends.items():
        place = (last.world_size, last.model_states / scale)
        colour = _STAGE_COLOURS[int(names[-1][-1]) if last.stage else 0]
        axes.annotate(f"  {', '.join(names)}: {text}", place, color=colour,
                      va="center", fontsize=10, fontweight="bold")  # fmt: skip
    if limit is not None:
        axes.axhline(limit / scale, color="#b00020", ls="--", lw=1.2)
        axes.annotate(f"device: {format_bytes(limit)} ", (1.0, limit / scale), va="bottom",
                      ha="right", xycoords=("axes fraction", "data"), color="#b00020",
                      fontsize=9)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.set_xlim(worlds[0] / 1.15, worlds[-1] * 3.2)
    axes.set_xlabel("ranks")
    axes.set_ylabel(f"model states, {unit} per rank")
    axes.grid(axis="y", which="major", color="#dddddd", lw=0.7)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    # Between powers of ten only these: a range of less than a decade has labels, too.
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    return figure


def replicated_and_sharded(estimates: Sequence[Estimate]) -> tuple[float, float]:
    """The two numbers of the formula ``replicated + sharded / ranks`` behind one stage's bytes."""
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


def _mark_peak(axes: Any, moment: Moment, place: float, scale: float) -> None:
    axes.annotate(
        f"peak {format_bytes(moment.total)}\n{moment.label}",
        (place, moment.total / scale), xytext=(0, 8), textcoords="offset points",
        ha="center", va="bottom", fontsize=9, color=_INK, zorder=5,
        bbox={"facecolor": "white", "alpha": 0.8, "lw": 0, "pad": 1},
        arrowprops={"arrowstyle": "-", "color": _INK, "lw": 0.8},
    )  # fmt: skip


def _name_phases(axes: Any, moments: Sequence[Moment]) -> None:
    """Write each phase below its stretch of the axis, with lines between them."""
    starts = [0]
    for index in range(1, len(moments)):
        if moments[index].phase != moments[index - 1].phase:
            starts.append(index)
    ends = [*starts[1:], len(moments)]
    for start in starts[1:]:
        axes.axvline(start, color="#888888", lw=0.8, ls=":")
    names = {"forward": "forward", "backward": "backward", "step": "step", "rest": "at rest"}
    labels = [names[moments[start].phase] for start in starts]
    axes.set_xticks([(start + end) / 2 for start, end in zip(starts, ends, strict=True)], labels)
    axes.tick_params(axis="x", length=0, labelsize=11)


def _legend(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0),
                frameon=False, fontsize=10)  # fmt: skip
