"""The same Transformer under DDP and each stage of ZeRO, in real processes, beside the formulas.

    python examples/compare_stages.py
    python examples/compare_stages.py --ranks 4 --width 512 --depth 12 --precision bf16-mixed

Under each strategy the ranks train a few steps and measure what they hold between steps, what they
send and how long a step takes. The formulas give, for P parameters over N ranks without padding,
the bytes that a rank holds and the elements that it sends in a step. DDP does not count these.
zero3 sends a little less than its formula, since the last unit of the forward and the root stay
whole until backward. Bytes and elements are exact; times on CPUs say little about other machines.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero.memory.size import format_bytes

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
KINDS = ("weights", "gradients", "master", "states")


class Transformer(LightningModule):
    """Embedding, encoder layers and a head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 256)

    def training_step(self, text: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(text)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), text.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Meter(Callback):
    """Times the steps and counts the elements sent in the last one."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.sent: int | None = None

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        if hasattr(trainer.strategy, "traffic"):
            self.sent = sum(sent.elements for sent in trainer.strategy.traffic.values())


def train(strategy: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what one rank holds and sends, and its time per step, under `strategy`."""
    torch.manual_seed(0)
    monitor, meter = lightning_zero.MemoryMonitor(predict=False), Meter()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=options.ranks,
        precision=options.precision,
        max_steps=options.steps,
        callbacks=[monitor, meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Transformer(options.width, options.depth)
    numel = sum(parameter.numel() for parameter in model.parameters())
    data = torch.randint(256, (options.steps * options.ranks, 4, 64))
    trainer.fit(model, DataLoader(data, batch_size=None))
    held = dict(monitor.measured["step"])
    if strategy == "ddp":
        # DDP drops gradients before the next step: count them after backward.
        held["gradients"] = monitor.measured["backward"]["gradients"]
    return {
        "numel": numel,
        "seconds": statistics.median(meter.seconds),
        "sent": meter.sent,
        **{kind: held[kind] for kind in KINDS},
    }


def formulas(strategy: str, numel: int, options: argparse.Namespace) -> tuple[float, float]:
    """Return the bytes that a rank holds between steps and the elements that it sends in one."""
    n, mixed = options.ranks, options.precision == "bf16-mixed"
    weight, shared = (2, 16) if mixed else (4, 12)
    held = {"ddp": 16, "zero1": weight + shared / n, "zero2": weight + shared / n, "zero3": 16 / n}
    passes = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3}
    return held[strategy] * numel, passes[strategy] * numel * (n - 1) / n


def rank_main(rank: int, folder: str, options: argparse.Namespace) -> None:
    """Join the other ranks and train under each strategy; rank 0 prints the table."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(options.ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
    )  # fmt: skip
    store = dist.FileStore(f"{folder}/store", options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    results = {strategy: train(strategy, options) for strategy in STRATEGIES}
    if rank == 0:
        show(results, options)
    dist.barrier()
    # Give gloo's threads time to free their last message, for which they need the interpreter.
    time.sleep(0.1)
    dist.destroy_process_group()


def show(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the table."""
    numel = results["ddp"]["numel"]
    totals = {name: sum(row[kind] for kind in KINDS) for name, row in results.items()}
    expected = {name: formulas(name, numel, options) for name in results}
    most = expected["ddp"][0]
    rows = [(kind, [format_bytes(row[kind]) for row in results.values()]) for kind in KINDS]
    rows += [
        ("total", [format_bytes(total) for total in totals.values()]),
        ("  formula", [format_bytes(held) for held, _ in expected.values()]),
        ("saved", [f"{1 - total / totals['ddp']:.1%}" for total in totals.values()]),
        ("  formula", [f"{1 - held / most:.1%}" for held, _ in expected.values()]),
        ("sent", [f"{row['sent']:,}" if row["sent"] else "" for row in results.values()]),
        ("  formula", [f"{sent:,.0f}" for _, sent in expected.values()]),
        ("step", [f"{1000 * row['seconds']:.0f} ms" for row in results.values()]),
    ]
    print(f"\n{numel:,} parameters, {options.ranks} ranks, {options.precision}, AdamW\n")
    print(f"{'per rank':<12}" + "".join(f"{name:>14}" for name in results))
    for name, cells in rows:
        print(f"{name:<12}" + "".join(f"{cell:>14}" for cell in cells))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line, by default this program's."""
    parser = argparse.ArgumentParser(description="DDP and the stages of ZeRO side by side.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed"])
    return parser.parse_args(words)


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
