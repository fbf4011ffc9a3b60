"""The picture of a step's memory; it needs the ``plot`` extra (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
    """Draw one step from left to right, with the bytes held stacked by kind, those at rest first.

    Resting kinds are stacked first, then those that come and go.

    Args:
        snapshots: The snapshots of a step, as in ``Estimate.snapshots``.
        title: The title.
        limit: Bytes of a device's memory, drawn as a line.
    """
    figure, axes = _figure(title)
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


def _figure(title: str) -> tuple[Figure, Any]:
    if not has_matplotlib():
        raise ImportError("Pictures need matplotlib: pip install 'lightning-zero[plot]'.")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.4), layout="constrained", dpi=130)
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
