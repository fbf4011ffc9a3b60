"""Draws docs/memory.png: bytes per rank of weights, gradients, masters and Adam's states.

By the formulas of the README, for 7 billion parameters in mixed precision.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

PARAMETERS = 7e9
RANKS = [1, 2, 4, 8, 16, 32, 64]
BYTES = {
    "DDP": [16 * PARAMETERS for _ in RANKS],
    "zero1, zero2": [2 * PARAMETERS + 16 * PARAMETERS / n for n in RANKS],
    "zero3": [16 * PARAMETERS / n for n in RANKS],
}

if __name__ == "__main__":
    figure = Figure(figsize=(7, 3.2), dpi=130, layout="tight")
    axes = figure.add_subplot()
    for (name, values), style in zip(BYTES.items(), ("o-", "s-", "^-"), strict=True):
        axes.plot(RANKS, [value / 1e9 for value in values], style, label=name)
    axes.axhline(80, color="0.6", linestyle="--", linewidth=1)
    axes.text(64, 84, "80 GB", horizontalalignment="right", color="0.4", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(RANKS, [str(n) for n in RANKS])
    axes.set(xlabel="GPUs", ylabel="GB per GPU", ylim=(0, 135))
    axes.set_title("7 billion parameters, bf16-mixed, Adam: weights, gradients, states", fontsize=9)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).parents[2] / "docs" / "memory.png")
