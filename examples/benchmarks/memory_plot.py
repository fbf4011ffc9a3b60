"""Draws the pictures of memory in docs/.

* memory.png: bytes per rank by the formulas of the README, for 7 billion parameters.
* monitor.png: what ``MemoryMonitor`` logs of a small model on two processes.
* timeline.png: a step of 24 Transformer layers at stage 3 on eight ranks, as ``estimate`` predicts.
"""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import MemoryMonitor, estimate
from lightning_zero.memory import draw

DOCS = Path(__file__).parents[2] / "docs"
PARAMETERS = 7e9
RANKS = [1, 2, 4, 8, 16, 32, 64]
BYTES = {
    "DDP": [16 * PARAMETERS for _ in RANKS],
    "zero1, zero2": [2 * PARAMETERS + 16 * PARAMETERS / n for n in RANKS],
    "zero3": [16 * PARAMETERS / n for n in RANKS],
}
KINDS = ("weights", "states", "gradients", "gathered", "unreduced")


def drawing(title: str, **labels: Any) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 3.2), dpi=130, layout="tight")
    axes = figure.add_subplot()
    axes.set(**labels)
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def memory() -> Figure:
    title = "7 billion parameters, bf16-mixed, Adam: weights, gradients, states"
    figure, axes = drawing(title, xlabel="GPUs", ylabel="GB per GPU", ylim=(0, 135))
    for (name, values), style in zip(BYTES.items(), ("o-", "s-", "^-"), strict=True):
        axes.plot(RANKS, [value / 1e9 for value in values], style, label=name)
    axes.axhline(80, color="0.6", linestyle="--", linewidth=1)
    axes.text(64, 84, "80 GB", horizontalalignment="right", color="0.4", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(RANKS, [str(n) for n in RANKS])
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    return figure


class Layers(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(self.block() for _ in range(6)))

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


POINTS = ("setup", "forward", "backward", "step")
STRATEGIES = ("ddp", "zero1", "zero3")


def logged(strategy: str, folder: str) -> dict[str, str]:
    """Train for an epoch on two processes; return the metrics that were logged."""
    trainer = Trainer(
        strategy=f"{strategy}_fork",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=CSVLogger(folder, name=strategy, version=""),
        callbacks=[MemoryMonitor()],
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Layers(), DataLoader(torch.randn(64, 256), 8))
    with (Path(folder) / strategy / "metrics.csv").open() as file:
        return next(csv.DictReader(file))


def monitored(folder: str) -> Figure:
    title = "memory/<point>/<kind>, logged by MemoryMonitor: 3 million parameters, AdamW, 2 ranks"
    figure, axes = drawing(title, ylabel="MB per rank")
    found = {strategy: logged(strategy, folder) for strategy in STRATEGIES}
    bars = [(strategy, point) for strategy in STRATEGIES for point in POINTS]
    places = [number + number // len(POINTS) for number in range(len(bars))]
    lower = [0.0] * len(bars)
    for kind in KINDS:
        keys = [(strategy, f"memory/{point}/{kind}") for strategy, point in bars]
        own = [float(found[strategy].get(key) or 0) / 1e6 for strategy, key in keys]
        axes.bar(places, own, bottom=lower, label=kind)
        lower = [a + b for a, b in zip(lower, own, strict=True)]
    axes.set_xticks(places, [point for _, point in bars], rotation=45, fontsize=7)
    for number, strategy in enumerate(STRATEGIES):
        axes.text(5 * number + 1.5, 1.1 * max(lower), strategy, horizontalalignment="center")
    axes.set_ylim(0, 1.4 * max(lower))
    axes.legend(frameon=False, ncols=len(KINDS), fontsize=7, loc="upper center")
    return figure


def timeline() -> Figure:
    def model() -> nn.Module:
        how = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        layers = (nn.TransformerEncoderLayer(2048, 16, 8192, **how) for _ in range(24))
        return nn.Sequential(*layers)

    batch = torch.empty(2, 1024, 2048, device="meta")
    found = estimate(model, "zero3", world_size=8, precision="bf16-mixed", batch=batch)
    figure, axes = drawing("")
    draw(axes, found)
    return figure


if __name__ == "__main__":
    memory().savefig(DOCS / "memory.png")
    timeline().savefig(DOCS / "timeline.png")
    with tempfile.TemporaryDirectory() as folder:
        monitored(folder).savefig(DOCS / "monitor.png")
