"""Loggers that draw the model's graph on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from tests.oracle.projects import (
    WIDTH,
    Regression,
    Run,
    assert_like_ddp,
    fit,
    make_trainer,
    rows,
    wired,
)
from tests.oracle.ranks import Pools


class Drawn(Regression):
    """It has a buffer, which ranks broadcast when they run the model together."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.example_input_array = torch.ones(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.scale * x)

    def on_train_start(self) -> None:
        if isinstance(self.logger, Sketch):
            self.logger.log_graph(self)


class Sketch(Logger):
    """Runs the model, or fails to, and keeps what came of it."""

    name = version = "sketch"

    def __init__(self, *, error: str = "") -> None:
        super().__init__()
        self.error = error
        self.outputs: list[torch.Tensor] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Keep nothing."""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Keep nothing."""

    def log_graph(self, model: Any, input_array: torch.Tensor | None = None) -> None:
        if self.error:
            raise ArithmeticError(self.error)
        if model.global_rank == 0:
            self.outputs.append(model(model.example_input_array).detach().clone())


def draw(strategy: Any) -> Run:
    logger = Sketch()
    run = fit(Drawn(), strategy, logger=logger)
    run.notes = logger.outputs
    return run


def draw_everywhere(folder: str) -> tuple[dict[Any, Run], list[int]]:
    runs: dict[Any, Run] = {"ddp": draw("ddp")}
    nodes = []
    for way, stages in (("windows", (1, 2, 3)), ("point to point", (3,)), ("backend", (3,))):
        with wired(way):
            for stage in stages:
                runs[f"{stage} by {way}"] = draw(stage)
    for strategy in ("ddp", 3):
        module = Drawn()
        logger = TensorBoardLogger(folder, name=str(strategy), log_graph=True)
        trainer = make_trainer(strategy, logger=logger)
        trainer.fit(module, rows())
        assert "log_graph" not in vars(logger)
        if trainer.is_global_zero:
            nodes.append(num_nodes(logger.log_dir))
    with pytest.raises((ArithmeticError, RuntimeError), match="no pencil"):
        fit(Drawn(), 3, logger=Sketch(error="no pencil"))
    return runs, nodes


def num_nodes(folder: str) -> int:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder)
    events.Reload()
    return len(events.Graph().node)


def test_the_graph_is_logged_as_under_ddp(ranks: Pools, tmp_path: Path) -> None:
    answers = ranks(2).run(draw_everywhere, str(tmp_path))
    assert_like_ddp([runs for runs, _ in answers])
    (under_ddp, under_zero), nothing = (nodes for _, nodes in answers)
    assert under_ddp == under_zero > 20
    assert nothing == []
    # Once by the Trainer, once by the module.
    assert [len(runs["ddp"].notes) for runs, _ in answers] == [2, 0]
