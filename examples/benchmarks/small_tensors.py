"""What each tensor costs: setup, save and resume of models with many small parameters.

    python examples/benchmarks/small_tensors.py
    python examples/benchmarks/small_tensors.py --parameters 400 3200 --rounds 5

A model of parameters of 16 x 16 is trained by AdamW under Lightning's Trainer, with DDP and with
the stages of ZeRO in turn, by the same processes. ``setup`` is the time from ``fit`` to the first
batch, ``save`` that of ``trainer.save_checkpoint``, ``resume`` that from ``fit(ckpt_path=...)`` to
the first batch. Figures are medians over the rounds, of the slowest rank: seconds by the clock, and
in parentheses of a processor, threads included.

With ``--profile FILE`` rank 0 leaves a profile of its rounds under zero3 there.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import os
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import Ranks
from lightning.pytorch import Callback, LightningModule, Trainer
from measure import in_fresh_processes, joined
from torch import Tensor, nn
from torch.utils.data import DataLoader

SIZE = 16
PER_LAYER = 100
"""Parameters of one child of the model, as in a transformer's layers."""

PHASES = ("setup", "save", "resume")

Rounds = list[list[list[float]]]
"""Of each round and phase, the seconds by the clock and of a processor."""


@dataclass(frozen=True)
class Job(Ranks):
    """What is measured."""

    parameters: int = 3200
    rounds: int = 3
    strategies: tuple[str, ...] = ("ddp", "zero3")
    profile: str = ""


class Layer(nn.Module):
    """Some parameters, added to the input."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(SIZE, SIZE) for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack(list(self.weights)).mean((0, 1))


class Model(LightningModule):
    """Layers of small parameters, and AdamW."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        sizes = [min(PER_LAYER, parameters - start) for start in range(0, parameters, PER_LAYER)]
        self.layers = nn.Sequential(*map(Layer, sizes))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch.expand(SIZE)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


def now() -> Tensor:
    """Return the seconds by the clock, and those of a processor."""
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


class Begin(Callback):
    """Notes when the first batch begins."""

    at: Tensor | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        if self.at is None:
            self.at = now()


def fitted(name: str, job: Job, **arguments: Any) -> tuple[Trainer, Tensor]:
    """Train for one step (two from a checkpoint); return the Trainer and the seconds before it."""
    torch.manual_seed(0)
    begin, model = Begin(), Model(job.parameters)
    trainer = Trainer(
        strategy=name,
        accelerator=job.device,
        devices=job.world,
        max_steps=2 if arguments else 1,
        max_epochs=-1,
        callbacks=[begin],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    dist.barrier()
    start = now()
    trainer.fit(model, DataLoader(torch.ones(4 * job.world), batch_size=1), **arguments)
    assert begin.at is not None
    return trainer, begin.at - start


def times_of(name: str, job: Job, path: str, profile: cProfile.Profile | None) -> Tensor:
    """Return the seconds of each phase, ``[phases, 2]``."""
    if profile is not None:
        profile.enable()
    trainer, setup = fitted(name, job)
    dist.barrier()
    start = now()
    trainer.save_checkpoint(path)
    save = now() - start
    dist.barrier()
    _, resume = fitted(name, job, ckpt_path=path)
    if profile is not None:
        profile.disable()
    return torch.stack([setup, save, resume])


def work(rank: int, folder: str, job: Job, port: int, answer: Path) -> None:
    """Run one rank: all strategies, round by round."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.world, "GROUP_RANK": 0}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"LOCAL_WORLD_SIZE": str(job.world), "TORCHELASTIC_RUN_ID": "benchmark"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    profile = cProfile.Profile() if job.profile and not rank else None
    found: dict[str, Rounds] = {name: [] for name in job.strategies}
    with joined(rank, job, port):
        for number in range(-1, job.rounds):  # the first round warms up
            for name in job.strategies:
                path = f"{folder}/{name}.ckpt"
                is_profiled = number >= 0 and name == "zero3"
                times = times_of(name, job, path, profile if is_profiled else None)
                dist.all_reduce(times, dist.ReduceOp.MAX)
                if number >= 0:
                    found[name].append(times.tolist())
        if profile is not None:
            profile.dump_stats(job.profile)
        if rank == 0:
            answer.write_text(json.dumps(found))
        dist.barrier()


def table(found: dict[str, Rounds], job: Job) -> str:
    """Return the medians of every strategy, and their ratios to those of DDP."""
    lines = [f"{job.parameters} parameters of {SIZE} x {SIZE}, {job.world} ranks"]
    lines += [f"| | {' | '.join(f'{phase}, s | to DDP' for phase in PHASES)} |", "|---" * 7 + "|"]
    base = torch.tensor(found["ddp"])
    for name, rounds in found.items():
        seconds = torch.tensor(rounds)
        ratios = (seconds / base).median(0).values.tolist()
        cells = [
            f"{wall:.3f} ({cpu:.3f}) | {wall_ratio:.2f} ({cpu_ratio:.2f})"
            for (wall, cpu), (wall_ratio, cpu_ratio) in zip(
                seconds.median(0).values.tolist(), ratios, strict=True
            )
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, nargs="+", default=[3200, 25000])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", type=int, nargs="+", default=[3], choices=[1, 2, 3])
    parser.add_argument("--profile", default="", help="a file for rank 0's profile of zero3")
    options = parser.parse_args()
    strategies = ("ddp", *(f"zero{stage}" for stage in options.stages))
    for number in options.parameters:
        job = Job(
            world=options.world,
            parameters=number,
            rounds=options.rounds,
            strategies=strategies,
            profile=options.profile,
        )
        with tempfile.TemporaryDirectory() as folder:
            print(table(in_fresh_processes(work, folder, job), job), flush=True)


if __name__ == "__main__":
    main()
