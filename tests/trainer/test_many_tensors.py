"""What each of many small tensors costs a rank at setup and at resume, beside DDP.

Counted are calls of functions, of Python and in C, which are the same on every machine.
"""

from __future__ import annotations

import cProfile
import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.oracle.projects import make_trainer
from tests.oracle.ranks import Pools

SIZES = (100, 200, 400)


class Many(LightningModule):
    """Parameters of few elements, 50 in each child, and AdamW."""

    def __init__(self, number: int) -> None:
        super().__init__()
        layers = (nn.ParameterList(map(torch.ones, [4] * 50)) for _ in range(number // 50))
        self.layers = nn.ModuleList(layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch.mean() * torch.stack([*self.layers.parameters()]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Until(Callback):
    """Ends a profile when the first batch begins."""

    def __init__(self) -> None:
        self.profile = cProfile.Profile()

    def on_train_batch_start(self, *_: Any) -> None:
        self.profile.disable()


def _calls(strategy: str, number: int, path: Path | None, max_steps: int) -> tuple[Any, int]:
    """A Trainer that has trained, and the calls from ``fit`` to its first batch."""
    until, model = Until(), Many(number)
    trainer = make_trainer(strategy, max_steps=max_steps, max_epochs=-1, callbacks=[until])
    data = DataLoader(torch.ones(8), batch_size=1)
    gc.collect()
    gc.disable()  # what earlier runs left would be finalized within the count
    until.profile.enable()
    try:
        trainer.fit(model, data, ckpt_path=path)
    finally:
        gc.enable()
    return trainer, sum(entry.callcount for entry in until.profile.getstats())


def _calls_per_tensor(strategy: str, folder: str) -> tuple[list[float], list[float]]:
    """The calls at setup and at resume for each further tensor, from size to size."""
    found = []
    _calls(strategy, 50, None, 1)  # what only the first run in a process does
    for number in SIZES:
        path = Path(folder, f"{strategy}-{number}.ckpt")
        trainer, setup = _calls(strategy, number, None, 1)
        trainer.save_checkpoint(path)
        _, resume = _calls(strategy, number, path, 2)
        found.append((number, setup, resume))
    steps = [(b[0] - a[0], b[1] - a[1], b[2] - a[2]) for a, b in itertools.pairwise(found)]
    return [setup / more for more, setup, _ in steps], [resume / more for more, _, resume in steps]


@pytest.mark.slow
def test_a_tensor_costs_not_much_more_than_under_ddp(ranks: Pools, tmp_path: Path) -> None:
    ddp, *stages = (
        ranks(2).run(_calls_per_tensor, name, str(tmp_path))[0]
        for name in ("ddp", "zero1", "zero3")
    )
    for zero in stages:
        for (few, many), (_, base), most in zip(zero, ddp, (2.6, 1.7), strict=True):
            assert many == pytest.approx(few, rel=0.05)  # no more, the more there are
            assert many / base < most
