"""Averaged weights, in validation and in checkpoints, are those of DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tests.oracle.projects import (
    WIDTH,
    Regression,
    Run,
    assert_like_ddp,
    fit,
    make_strategy,
    make_trainer,
    rows,
    under_all,
)
from tests.oracle.ranks import Pools

EPOCHS = 4


class Averaged(Regression):
    """SGD with momentum, a buffer that training changes, and notes of what validation saw."""

    def __init__(self) -> None:
        super().__init__(lr=0.1, optimizer=torch.optim.SGD)
        self.net.blocks[1].norm = nn.BatchNorm1d(WIDTH)
        self.head.bias.requires_grad_(False)
        self.notes: list[Any] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.notes.append(self.loss(batch).item())


def make_average(name: str) -> Any:
    return {
        "ema": lambda: EMAWeightAveraging(decay=0.5),
        "mean": lambda: WeightAveraging(use_buffers=False),
        "multi": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.7)),
        "swa": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=2),
        "normed": lambda: WeightAveraging(avg_fn=towards_unit_norm),
        "own": OnSaturdays,
    }[name]()


class Late(Averaged):
    """Has its layers from `configure_model`, when callbacks are set up already."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        self.net = self.net or Averaged().net


class OnSaturdays(EMAWeightAveraging):
    """Reads the average in a hook of its own."""

    def __init__(self) -> None:
        super().__init__(decay=0.5)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        pl_module.notes.append(self._average_model.module.head.weight.norm().item())


def towards_unit_norm(average: Tensor, current: Tensor, num_averaged: Tensor) -> Tensor:
    mean = average + (current - average) / (num_averaged + 1)
    return mean / mean.norm().clamp_min(0.1)


def data() -> tuple[Any, Any]:
    return rows(32, batch_size=8), rows(8, seed=1)


def state_of(callback: Any) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in callback._average_model.state_dict().items()}


# ------------------------------------------------------------------------------- numbers, bytes


def _train(strategy: Any, name: str) -> Run:
    module, callback = Late() if name == "mean" else Averaged(), make_average(name)
    trainer = make_trainer(strategy, max_epochs=EPOCHS, callbacks=[callback])
    trainer.fit(module, *data())
    run = Run.of(module, trainer, [module.notes[:], state_of(callback)])
    trainer.validate(module, rows(8, seed=2), verbose=False)
    run.notes.append(module.notes[-4:])
    return run


def _train_all() -> dict[str, dict[Any, Run]]:
    stages = {"mean": (1, 2), "multi": (3,), "swa": (3,), "normed": (3,), "own": (2,)}
    return {name: under_all(_train, name, stages=which) for name, which in stages.items()}


def test_averages_are_those_of_ddp(ranks: Pools) -> None:
    runs = ranks(2).run(_train_all)
    for name in runs[0]:
        assert_like_ddp([run[name] for run in runs], ulps=256)


def _average_in_mixed_precision(strategy: Any) -> Run:
    callback = EMAWeightAveraging(decay=0.9)
    options = {"callbacks": [callback], "precision": "bf16-mixed", "max_epochs": 3}
    return fit(Averaged(), strategy, data=data(), **options)


def test_averages_are_of_masters(ranks: Pools) -> None:
    """Averaging bf16 weights would be off by as much as a whole rounding of bf16."""
    runs = ranks(2).run(under_all, _average_in_mixed_precision, stages=(1, 2, 3))
    for rank in runs:
        for stage in (1, 2, 3):
            for key, value in rank["ddp"].params.items():
                torch.testing.assert_close(rank[stage].params[key], value, rtol=2e-4, atol=2e-4)


class OfTwoDtypes(LightningModule):
    """A parameter in bf16 before others in fp32."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
            self.net = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.net(batch[0]) * self.scale).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _average_of_two_dtypes(strategy: Any) -> dict[str, torch.Tensor]:
    callback = EMAWeightAveraging(decay=0.9)
    strategy = make_strategy(strategy, units="auto") if isinstance(strategy, int) else strategy
    fit(OfTwoDtypes(), strategy, data=data(), callbacks=[callback], precision="bf16-true")
    return dict(callback._average_model.state_dict())


def test_averages_keep_their_dtypes(ranks: Pools) -> None:
    for rank in ranks(2).run(under_all, _average_of_two_dtypes, stages=(1, 3)):
        for stage in (1, 3):
            for key, value in rank["ddp"].items():
                torch.testing.assert_close(rank[stage][key], value, rtol=1e-2, atol=1e-2)


# ------------------------------------------------------------------------------- checkpoints


def _part(strategy: Any, name: str, folder: str, until: int, resumed: str | None) -> Run:
    if strategy == "directory":
        strategy = make_strategy(3, checkpoint="dcp")
    module, callback = Averaged(), make_average(name)
    save = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer = make_trainer(
        strategy, max_epochs=until, callbacks=[callback, save], enable_checkpointing=True
    )
    trainer.fit(module, *data(), ckpt_path=resumed)
    return Run.of(module, trainer, [module.notes, state_of(callback)])


RESUMED = {
    "ema": (("ddp", 3), (3, "ddp"), (2, 1), ("directory", 1)),
    "swa": (("ddp", 2), (3, "ddp"), (1, 3)),
}
"""Which strategy goes on from whose file, for one average or the other."""


def _resume_everywhere(folder: str, name: str) -> dict[Any, Run]:
    """Run to the end under DDP and others; then go on from the files of each under another."""
    runs: dict[Any, Run] = {}
    for strategy, _ in RESUMED[name]:
        runs[strategy] = _part(strategy, name, f"{folder}/{strategy}", EPOCHS, None)
    for first, second in RESUMED[name]:
        path = f"{folder}/{first}/epoch=1.ckpt"
        run = _part(second, name, f"{folder}/{first}-{second}", EPOCHS, path)
        # What was seen before the break is in the first run's lists.
        for late, whole in (
            (run.notes[0], runs["ddp"].notes[0]),
            (run.losses, runs["ddp"].losses),
        ):
            assert 0 < len(late) < len(whole)
            late[:0] = whole[: len(whole) - len(late)]
        runs[f"{first} to {second}"] = run
    return runs


def _resume_all(folder: str) -> dict[str, dict[Any, Run]]:
    return {name: _resume_everywhere(f"{folder}/{name}", name) for name in RESUMED}


def test_averages_resume_anywhere(ranks: Pools, tmp_path: Path) -> None:
    runs = ranks(2).run(_resume_all, str(tmp_path))
    for name, resumed in RESUMED.items():
        assert_like_ddp([run[name] for run in runs], ulps=256)
        for epoch in range(EPOCHS):
            theirs, *ours = [
                torch.load(tmp_path / name / str(strategy) / f"epoch={epoch}.ckpt")
                for strategy, _ in resumed
                if strategy != "directory"
            ]
            for checkpoint in ours:
                assert_same(checkpoint, theirs, name)


def assert_same(ours: Any, theirs: Any, where: str) -> None:
    """Fail unless nested values are the same but for rounding, of the same types and shapes."""
    if isinstance(theirs, Tensor):
        assert ours.dtype == theirs.dtype, where
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=where)
    elif isinstance(theirs, dict):
        assert set(ours) == set(theirs), where
        for key in theirs:
            # The path in a ModelCheckpoint's state is the strategy's own.
            if not str(key).startswith("ModelCheckpoint"):
                assert_same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for index, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(mine, its, f"{where}.{index}")
    elif isinstance(theirs, float):
        assert abs(ours - theirs) < 1e-5, where


# ------------------------------------------------------------------------------- other beginnings


def _begin_from_plain(strategy: Any, folder: str) -> Run:
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(Averaged(), *data())
    path = f"{folder}/{strategy}.ckpt"
    trainer.save_checkpoint(path)
    return _part(strategy, "ema", f"{folder}/after", 3, path)


def test_an_average_begins_with_the_weights_of_a_checkpoint(ranks: Pools, tmp_path: Path) -> None:
    assert_like_ddp(
        ranks(2).run(under_all, _begin_from_plain, str(tmp_path), stages=(1, 3)), ulps=256
    )
