"""What is computed over the ranks: torchmetrics, `self.log`, `all_gather`, `strategy.reduce`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import CatMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAccuracy
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

from tests.oracle.projects import (
    WIDTH,
    Regression,
    Run,
    assert_like_ddp,
    fit,
    make_trainer,
    rows,
    under_all,
)
from tests.oracle.ranks import Pools

# ------------------------------------------------------------------------------- torchmetrics


class Measured(Regression):
    """Holds metrics of every kind, and logs and computes them in every way."""

    def __init__(self) -> None:
        super().__init__(lr=0.1, optimizer=torch.optim.SGD)
        self.train_mse = MeanSquaredError()
        self.val = MetricCollection(
            {"mae": MeanAbsoluteError(), "mse": MeanSquaredError()}, prefix="val_"
        )
        self.positive = BinaryAccuracy()
        # A metric that is kept in checkpoints, with a state that grows and a scalar.
        self.seen = SumMetric()
        self.seen.persistent(True)
        self.largest = CatMetric()
        self.largest.persistent(True)
        self.notes: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        predicted = self(x)
        self.train_mse(predicted, y)
        self.log("train_mse", self.train_mse, on_step=True, on_epoch=True)
        self.seen.update(torch.ones(len(x)) * (1 + self.global_rank))
        self.largest.update(predicted.detach().max())
        self.notes.append(self.positive(predicted[:, 0], (y[:, 0] > 0).long()).item())
        loss = F.mse_loss(predicted, y)
        self.losses.append(loss.item())
        return loss

    def on_train_epoch_end(self) -> None:
        self.notes.append([self.positive.compute().item(), self.seen.compute().item()])
        self.notes.append(sorted(self.largest.compute().tolist()))
        self.positive.reset()
        self.notes.append([self.positive.update_called, str(self.seen.device)])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val.update(self(batch[0]), batch[1])
        self.log_dict(self.val, on_epoch=True)


def _measure(strategy: Any, folder: str) -> Run:
    module = Measured()
    data = rows(20, batch_size=3), rows(8, seed=1)
    trainer = make_trainer(strategy, max_epochs=2)
    trainer.fit(module, *data)
    path = f"{folder}/{strategy}.ckpt"
    trainer.save_checkpoint(path)
    state = torch.load(path)["state_dict"]
    module.notes.append({k: v for k, v in sorted(state.items()) if k.startswith(("seen", "larg"))})

    # Metrics go on where the checkpoint left them.
    resumed = Measured()
    trainer = make_trainer(strategy, max_epochs=3)
    trainer.fit(resumed, *data, ckpt_path=path)
    for other in (module, resumed):
        assert not [name for name, _ in other.named_parameters() if "mse" in name]
    return Run.of(resumed, trainer, [module.notes, resumed.notes])


def test_torchmetrics_in_the_module(ranks: Pools, tmp_path: Any) -> None:
    runs = ranks(2).run(under_all, _measure, str(tmp_path), stages=(1, 3))
    notes, resumed = runs[0]["ddp"].notes
    assert list(notes[-1]) == ["largest.value", "seen.sum_value"]
    assert len(resumed) > 3
    assert_like_ddp(runs)


# ---------------------------------------------------------------------------------- self.log


class Logging(Regression):
    """Logs what differs between ranks and batches, reduced in every way."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        value = torch.tensor(float(10**self.global_rank + batch_idx))
        for reduce_fx in ("mean", "sum", "min", "max", torch.max):
            name = reduce_fx if isinstance(reduce_fx, str) else "function"
            for on_epoch in (False, True):
                self.log(
                    f"{name} {on_epoch}",
                    value,
                    reduce_fx=reduce_fx,
                    sync_dist=reduce_fx is not torch.max,
                    on_step=not on_epoch,
                    on_epoch=on_epoch,
                    batch_size=1 + batch_idx,
                )
        self.log("weight", self.head.weight.norm(), sync_dist=True)
        self.log("int", batch_idx, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("rank 0 only", value, rank_zero_only=True)
        self.log_dict(
            {"both": loss, "twice": 2 * loss}, on_step=True, on_epoch=True, sync_dist=True
        )
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("end", float(self.global_rank), sync_dist=True)


def _log(strategy: Any) -> Run:
    return fit(Logging(), strategy, data=(rows(), rows(8, seed=1)), max_epochs=2)


def test_logged_values(ranks: Pools) -> None:
    runs = ranks(2).run(under_all, _log, stages=(2, 3))
    metrics = runs[0]["ddp"].metrics
    assert float(metrics["sum True"]) == 11 * 4 + 2 * 6
    assert float(metrics["max False"]) == 13
    assert_like_ddp(runs)


# ------------------------------------------------------------------------- between the ranks


class Contrastive(Regression):
    """A loss over all ranks' outputs, whose gradients flow to each; and parameters gathered."""

    def __init__(self) -> None:
        super().__init__(lr=0.1, optimizer=torch.optim.SGD)
        self.notes: list[Any] = []

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            # Lightning calls a function that torch 2.13 deprecates.
            warnings.simplefilter("ignore", FutureWarning)
            return super().all_gather(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        mine = F.normalize(self(x))
        every = self.all_gather(mine, sync_grads=True)
        self.notes.append([list(every.shape), every.requires_grad])
        with torch.no_grad():
            others = self.all_gather({"y": y, "n": [batch_idx], "w": self.head.weight.detach()})
        self.notes.append({name: _lists(value) for name, value in others.items()})
        targets = F.normalize(others["y"].flatten(0, 1))
        loss = (every.flatten(0, 1) @ targets.T).logsumexp(0).mean()
        self.losses.append(loss.item())
        return loss

    def on_after_backward(self) -> None:
        self.notes.append([float(p.grad.norm()) for p in self.parameters()])

    def on_train_epoch_end(self) -> None:
        strategy, rank = self.trainer.strategy, self.global_rank
        value = torch.tensor([1.0 + rank, -1.0])
        self.notes += [
            strategy.reduce(value.clone()).tolist(),
            strategy.reduce(value.clone(), reduce_op="sum").tolist(),
            strategy.reduce({"a": value.clone()}, reduce_op="mean")["a"].tolist(),
            strategy.reduce(value.clone(), reduce_op="max").tolist(),
            strategy.broadcast({"rank": rank, "value": value}, src=1),
            strategy.broadcast(value.clone()).tolist(),
            [strategy.reduce_boolean_decision(rank == 0, all=every) for every in (True, False)],
            strategy.reduce_boolean_decision(True),
            self.all_gather(value).tolist(),
            [strategy.is_global_zero, strategy.global_rank, strategy.world_size],
        ]
        strategy.barrier("here")


def _lists(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else [_lists(one) for one in value]


def _contrast(strategy: Any) -> Run:
    module = Contrastive()
    run = fit(module, strategy, max_epochs=2)
    run.notes = module.notes
    return run


def test_collectives_of_the_module_and_the_strategy(ranks: Pools) -> None:
    runs = ranks(2).run(under_all, _contrast, stages=(1, 3))
    notes = runs[0]["ddp"].notes
    assert notes[0] == [[2, 2, WIDTH], True]
    assert [3.0, -2.0] in notes
    assert_like_ddp(runs)
