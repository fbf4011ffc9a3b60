"""The benchmarks' GPT under Lightning's Trainer, on one device."""

from __future__ import annotations

import itertools
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from contenders import GPT, Job
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import estimate

_NAMES = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
STRATEGIES = {"Trainer": "auto", **{f"Trainer {name}": name for name in _NAMES}}
"""The contenders: Lightning as it is, and the same with one word changed."""


class LitGPT(LightningModule):
    """The GPT, its loss and its optimizer."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.data: torch.Generator | None = None

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = GPT(self.job)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.data is None:
            self.data = torch.Generator(self.device).manual_seed(0)
        shape = (self.job.batch, self.job.length + 1)
        tokens = torch.randint(self.job.vocabulary, shape, generator=self.data, device=self.device)
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4, fused=True)


class Clock(Callback):
    """Times steps from the end of one to the end of the next, and starts memory peaks with them.

    Attributes:
        phases: Seconds of what comes before and after the timed steps, in order: until the Trainer
            sets up, the model is sharded, the first step ends, and the run is torn down.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._on_cuda = job.device == "cuda"
        self._ends: list[Any] = []
        self.loss = torch.zeros(())
        self.phases: dict[str, float] = {}
        self._last = time.perf_counter()

    def end_phase(self, name: str) -> None:
        """Note the seconds since the last phase ended."""
        if self._on_cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.phases[name], self._last = now - self._last, now

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        self.end_phase("launch")

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.end_phase("build and shard")

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.end_phase("steps")

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self.end_phase("first step")
        if batch_idx + 1 < self._job.warmup:
            return
        if self._on_cuda:
            if not self._ends:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._ends.append(end)
        else:
            self._ends.append(time.perf_counter())
        self.loss = outputs["loss"].detach()

    def seconds(self) -> float:
        """Return the median time of a step."""
        if self._on_cuda:
            torch.cuda.synchronize()
            times = [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(self._ends)]
        else:
            times = [b - a for a, b in itertools.pairwise(self._ends)]
        return statistics.median(times)


def trained(rank: int, name: str, job: Job, port: int, answer: Path) -> None:
    """Write a step's time, the last loss and the peak memory under a Trainer to ``answer``."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    clock, num_steps = Clock(job), job.warmup + job.steps
    trainer = Trainer(
        strategy=STRATEGIES[name],
        accelerator=job.device,
        devices=1,
        precision=job.precision,
        max_epochs=1,
        limit_train_batches=num_steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitGPT(job), DataLoader(range(num_steps), batch_size=None))
    clock.end_phase("teardown")
    found = {"seconds": clock.seconds(), "loss": float(clock.loss), "phases": clock.phases}
    if job.device == "cuda":
        found["allocated_mib"] = torch.cuda.max_memory_allocated() / 2**20
    if STRATEGIES[name] != "auto":
        found["predicted_mib"] = predicted_bytes(STRATEGIES[name], job) / 2**20
    answer.write_text(json.dumps(found))


def predicted_bytes(strategy: str, job: Job) -> int:
    """Return the peak on the device that `estimate` predicts for a step."""

    def step(model: Any, tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    with torch.device("meta"):
        model = GPT(job)
    found = estimate(
        model,
        strategy,
        precision=job.precision,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-4, fused=True),
        batch=torch.zeros(job.batch, job.length + 1, dtype=torch.int64),
        step=step,
        device=job.device,
    )
    return found.peak.total
