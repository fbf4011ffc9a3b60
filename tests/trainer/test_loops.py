"""Loops with their trimmings: inference mode, combined loaders, writers, loggers and profilers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn

from tests.oracle.projects import (
    Regression,
    Run,
    assert_like_ddp,
    fit,
    make_trainer,
    rows,
    under_all,
)
from tests.oracle.ranks import Pools

# ----------------------------------------------------------------------------- inference mode


@contextmanager
def _inference_mode_under_gloo() -> Iterator[None]:
    """Lightning never enters inference mode over gloo; let it believe that there is no group."""
    with mock.patch(
        "lightning.pytorch.loops.utilities._distributed_is_initialized", return_value=False
    ):
        yield


class _NotesInference(Regression):
    """Notes whether it is in inference mode; keeps an activation and a running buffer."""

    def __init__(self) -> None:
        super().__init__(lr=0.1, optimizer=torch.optim.SGD)
        self.net.blocks[1].norm = nn.BatchNorm1d(6)
        self.notes: list[Any] = []
        self.kept: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.notes.append([torch.is_inference_mode_enabled(), loss.is_inference(), loss.item()])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.kept.append(self(batch[0]))

    def on_validation_epoch_end(self) -> None:
        self.notes.append([kept.sum().item() for kept in self.kept])
        self.kept.clear()


def _infer(strategy: Any, *, inference_mode: bool) -> Run:
    """Every loop, with evaluation between training steps and before the first of them."""
    module = _NotesInference()
    loaders = rows(16), rows(8, seed=1)
    with _inference_mode_under_gloo():
        trainer = make_trainer(
            strategy, max_epochs=2, val_check_interval=2, inference_mode=inference_mode
        )
        trainer.validate(module, loaders[1], verbose=False)
        trainer.fit(module, *loaders)
        trainer.test(module, loaders[1], verbose=False)
        predictions = trainer.predict(module, loaders[1])
        module.notes.append([[p.is_inference(), p.tolist()] for p in predictions])
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, *loaders)
    return Run.of(module, trainer, module.notes)


@pytest.mark.parametrize("inference_mode", [True, False])
def test_inference_mode(ranks: Pools, inference_mode: bool) -> None:
    runs = ranks(2).run(under_all, _infer, inference_mode=inference_mode, stages=(2, 3))
    assert runs[0]["ddp"].notes[0][0] is inference_mode
    assert [True] * 2 in [note[:2] for note in runs[0][3].notes] or not inference_mode
    assert_like_ddp(runs)


# ------------------------------------------------------------------------- what goes in and out


class _Combined(Regression):
    """Trains on a dictionary of loaders, validates on a sequence of them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch["a"], batch_idx)
        for other in ("b", "c"):
            if batch[other] is not None:
                loss = loss + self.loss(batch[other])
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


def _combine(strategy: Any, mode: str) -> Run:
    train = {"a": rows(12), "b": rows(8, seed=1), "c": rows(4, batch_size=1, seed=2)}
    validation = [rows(8, seed=3), rows(4, seed=4)]
    data = CombinedLoader(train, mode), CombinedLoader(validation, "sequential")
    return fit(_Combined(), strategy, data=data, max_epochs=2)


def _combine_in_each_mode(strategy: Any) -> Run:
    runs = [_combine(strategy, mode) for mode in ("max_size_cycle", "min_size", "max_size")]
    return Run({}, notes=[[run.params, run.metrics, run.losses] for run in runs])


def test_combined_loaders(ranks: Pools) -> None:
    runs = ranks(2).run(under_all, _combine_in_each_mode, stages=(1, 3))
    assert [len(losses) for _, _, losses in runs[0]["ddp"].notes] == [6, 4, 6]
    assert_like_ddp(runs)


class _Writer(BasePredictionWriter):
    """Writes what it is given into one file per rank."""

    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder = folder

    def write_on_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        where = self.folder / f"{trainer.global_rank} {dataloader_idx} {batch_idx}.pt"
        torch.save([prediction, batch_indices], where)

    def write_on_epoch_end(
        self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any
    ) -> None:
        torch.save([predictions, batch_indices], self.folder / f"{trainer.global_rank} all.pt")


class _PredictsFromTwo(Regression):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return super().predict_step(batch, batch_idx) + dataloader_idx


def _write(strategy: Any, folder: str) -> Run:
    module = _PredictsFromTwo()
    path = Path(folder) / str(strategy)
    path.mkdir(parents=True, exist_ok=True)
    trainer = make_trainer(strategy, callbacks=[_Writer(path)], logger=CSVLogger(path, "log", ""))
    with _inference_mode_under_gloo():
        trainer.predict(module, [rows(8), rows(4, seed=1)], return_predictions=False)
        trainer.fit(module, rows(), rows(8, seed=1))
        trainer.predict(module, [rows(8), rows(4, seed=1)])
        trainer.test(module, rows(8, seed=2), verbose=False)
    trainer.strategy.barrier()
    written = {file.name: torch.load(file) for file in sorted(path.glob("*.pt"))}
    log = (path / "log" / "metrics.csv").read_text().splitlines()
    numbers = [[float(cell) if cell else "" for cell in line.split(",")] for line in log[1:]]
    return Run.of(module, trainer, [list(written.items()), log[0], numbers])


def test_what_is_written(ranks: Pools, tmp_path: Path) -> None:
    """A prediction writer's files, and those of a logger."""
    runs = ranks(2).run(under_all, _write, str(tmp_path), stages=(2, 3))
    written, header, numbers = runs[0]["ddp"].notes
    assert len(written) == 2 * (2 + 1 + 1)
    assert "train_loss" in header
    assert "test_loss" in header
    assert len(numbers) == 4 + 1 + 1
    assert_like_ddp(runs)


# ---------------------------------------------------------------------------------- profilers


def _profile(stage: int, folder: str) -> tuple[list[str], list[str]]:
    """Our verbs as torch's profiler recorded them, and those of them that its report shows.

    Stages are all one to the others, which time Lightning's own calls.
    """
    folder = f"{folder}/{stage}-{torch.distributed.get_rank()}"
    profiler = PyTorchProfiler(folder, "torch", export_to_chrome=False, row_limit=-1)
    others = SimpleProfiler(folder, "simple"), AdvancedProfiler(folder, "advanced")
    for each in (profiler, *(others if stage == 3 else ())):
        fit(Regression(), stage, data=(rows(32), rows(8)), profiler=each)
    reports = {path.name: path.read_text() for path in Path(folder).iterdir()}
    for name, report in reports.items():
        if "torch" not in name:
            assert "[Strategy]ZeROStrategy.training_step" in report, name
    recorded = sorted({e.name for e in profiler.function_events if e.name.startswith("zero.")})
    (report,) = (text for name, text in reports.items() if "torch" in name)
    return recorded, [name for name in recorded if name in report]


def test_profilers_show_our_verbs(ranks: Pools, tmp_path: Path) -> None:
    for stage in (2, 3):
        verbs = ["unshard", "wait", "reduce", "finish_reduce"] + ["reshard"] * (stage == 3)
        units = ["root", *(f"net.blocks.{number}" for number in range(3))]
        expected = {f"zero.{verb} {unit}" for verb in verbs for unit in units}
        for recorded, reported in ranks(2).run(_profile, stage, str(tmp_path)):
            assert set(recorded) >= expected
            assert reported == recorded
