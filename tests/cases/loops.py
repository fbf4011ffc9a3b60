"""Loops: in any order, with their options, loaders, loggers, metrics and errors."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import Parameter
from torchmetrics import CatMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAccuracy
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

from tests.cases import FILES, SAVED, STATES, WEIGHTS, all_gather, scheduled, user
from tests.oracle.play import Player, case, widen
from tests.oracle.projects import Noted, Regression, Trace, rows

VALIDATED = {"data": lambda: (rows(), rows(8, seed=1))}

case("fit", Regression, "fit_and_validate", **VALIDATED, max_epochs=2, rests=True,
     worlds=(1, 2, 3), stages=(1, 2, 3), transports=("windows", "point to point", "backend"))  # fmt: skip
case("fit", Regression, "fit_in_mixed_precision", **VALIDATED, max_epochs=2, rests=True,
     stages=(1, 2, 3, 3), precisions=("bf16-mixed", "16-mixed", "bf16-true", "64-true"))  # fmt: skip
case("fit", Regression, "accumulate", **VALIDATED, max_epochs=2, accumulate_grad_batches=3, rests=True, ulps=16,
     stages=(1, 2, 3, 2, 3, 3), settings=({}, {}, {}, {"accumulate": "local"}, {"accumulate": "local"}, {"reshard_after_forward": False}))  # fmt: skip
case("fit", Regression, "cut_into_units", **VALIDATED, rests=True, stages=(3, 2, 3, 3),
     settings=({"units": "auto"}, {"units": {nn.Linear, nn.LayerNorm}}, {"units": lambda m: bool(m._parameters)}, {"prefetch": 0}))  # fmt: skip
case("fit", Regression, "save_and_resume", **SAVED, readers=("ddp", 1, 3), rests=True)
case("fit", Regression, "save_and_resume_the_loss_scale", **SAVED, readers=("ddp", "own", "of ddp"),
     precisions=("16-mixed",), ulps=16)  # fmt: skip
case("fit", Regression, "save_and_resume_a_directory", **SAVED, readers=(1, 3), settings=({"checkpoint": "dcp"},))  # fmt: skip

case("fit", Regression, "copies_of_shards", **SAVED, worlds=(4,), stages=(1, 2, 3), rests=True, gradient_clip_val=0.5,
     precisions=("32-true", "bf16-mixed"), accumulate_grad_batches=2, readers=(2,), ulps=16,
     settings=({"shard": 2}, {"shard": "node"}, {"shard": 2, **FILES}))  # fmt: skip


# As offload steps by itself, with states of which every file has some, and a schedule.
FUSED = user(Regression, configure_optimizers=lambda m: scheduled(torch.optim.AdamW(m.parameters(), lr=0.02, fused=True)))  # fmt: skip
case("fit", FUSED, "in_files", **SAVED, ulps=64, precisions=("32-true", "bf16-mixed") * 2, rests=True, worlds=(1, 2),
     accumulate_grad_batches=2, stages=(1, 3, 3, 3), readers=("own", "of ddp"), settings=(STATES, STATES, FILES, WEIGHTS))  # fmt: skip
HOST = {"offload_optimizer": "cpu"}
case("fit", FUSED, "offloaded_without_a_device", **SAVED, ulps=16, stages=(1, 3, 3), readers=("own",), gradient_clip_val=0.5,
     settings=(HOST, HOST, {**HOST, "offload_weights": "cpu"}))  # fmt: skip
case("fit", Regression, "copies_that_pad_shards", worlds=(3,), stages=(2, 3), rests=True,
     settings=({"shard": 1},))  # fmt: skip


def validate_on_two(m: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
    """Validate on two loaders, the second of which skips the head."""
    m.log("val", m.net(batch[0]).mean() if dataloader_idx else m.loss(batch), sync_dist=True)


QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
OPTIONS: list[dict[str, Any]] = [
    {"val_check_interval": 2, "limit_val_batches": 1, "inference_mode": False},
    {"fast_dev_run": 2},
    {"overfit_batches": 2, "max_epochs": 2},
    {"detect_anomaly": True, "limit_train_batches": 2},
    {"barebones": True, "log_every_n_steps": None, **dict.fromkeys(QUIET)},
    {"num_sanity_val_steps": 0, "check_val_every_n_epoch": 2, "max_epochs": 2, "reload_dataloaders_every_n_epochs": 1},
]  # fmt: skip
for number, options in enumerate(OPTIONS):
    case("loops", user(Regression, validation_step=validate_on_two), f"options_{number}", **options,
         data=lambda: (rows(), [rows(8, seed=1), rows(4, seed=2)]))  # fmt: skip


@case("loops")
def trainers_and_strategies_in_turn(play: Player) -> Trace:
    """A module that other Trainers have fitted, under DDP or sharded."""
    module = Regression()
    first = play.fit(module)
    play.fit(module, strategy="ddp", max_steps=3)
    return play.fit(module, notes=first.params)


# -- inference mode, loaders, writers ---------------------------------------------------------------


@contextmanager
def inference_mode_under_gloo() -> Any:
    """Lightning never enters inference mode over gloo; let it believe that there is no group."""
    name = "lightning.pytorch.loops.utilities._distributed_is_initialized"
    with mock.patch(name, return_value=False):
        yield


class NotesInference(Noted):
    """Notes whether it is in inference mode; keeps an activation and a running buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[1].norm = nn.BatchNorm1d(6)
        self.kept: list[Tensor] = []

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0]) + dataloader_idx

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


class Writer(BasePredictionWriter):
    """Writes what it is given into one file per rank."""

    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder = folder

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *at: Any) -> None:  # fmt: skip
        torch.save([prediction, indices], self.folder / f"{trainer.global_rank} {at[-1]} {at[-2]}.pt")  # fmt: skip

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        torch.save([predictions, indices], self.folder / f"{trainer.global_rank} all.pt")


@case("loops")
def inference_mode(play: Player) -> Trace:
    """Every loop before and after every other, with one Trainer and between its training steps.

    A prediction writer's files, and those of a logger, are DDP's.
    """
    module, loaders, path = NotesInference(), (rows(16), rows(8, seed=1)), play.folder
    how: dict[str, Any] = {"callbacks": [Writer(path)], "logger": CSVLogger(path, "log", "")}
    with inference_mode_under_gloo():
        trainer = play.trainer(**how, val_check_interval=2)
        for number in range(3):
            module.notes += [
                run(module, loaders[1], verbose=False) for run in (trainer.test, trainer.validate)
            ]
            some = [loaders[1], rows(4, seed=1)]
            predicted = trainer.predict(module, some, return_predictions=number > 0)
            flat = [p for of_loader in predicted or () for p in of_loader]
            module.notes.append([[p.is_inference(), p.tolist()] for p in flat])
            trainer.fit_loop.max_epochs = 2 + number
            trainer.fit(module, *loaders) if number < 2 else None
    assert [True] * 2 in [note[:2] for note in module.notes]
    trainer.strategy.barrier()
    written = {file.name: torch.load(file) for file in sorted(path.glob("*.pt"))}
    header, *log = (path / "log" / "metrics.csv").read_text().splitlines()
    numbers = [[float(cell) if cell else "" for cell in line.split(",")] for line in log]
    assert len(written) == 2 * (2 + 1 + 1)
    return play.trace(module, trainer, [module.notes, list(written.items()), header, numbers])


def train_on_dictionary(m: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = Regression.training_step(m, batch["a"], batch_idx)
    others = [m.loss(batch[key]) for key in ("b", "c") if batch[key] is not None]
    return sum(others, loss)


@case("loops")
def combined_loaders(play: Player) -> Trace:
    """Train on a dictionary of loaders, and validate on a sequence of them."""
    module = user(Regression, training_step=train_on_dictionary, validation_step=validate_on_two)
    notes = []
    for mode in ("max_size_cycle", "min_size", "max_size"):
        train = {"a": rows(12), "b": rows(8, seed=1), "c": rows(4, batch_size=1, seed=2)}
        validation = CombinedLoader([rows(8, seed=3), rows(4, seed=4)], "sequential")
        trace = play.fit(module(), CombinedLoader(train, mode), validation, max_epochs=2)
        notes.append([trace.params, trace.metrics, trace.losses])
    assert [len(losses) for _, _, losses in notes] == [6, 4, 6]
    return Trace({}, notes=notes)


# -- what is computed over the ranks ---------------------------------------------------------------


class Measured(Noted):
    """Holds metrics of every kind, and logs and computes them in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.train_mse = MeanSquaredError()
        kinds = {"mae": MeanAbsoluteError(), "mse": MeanSquaredError()}
        self.val = MetricCollection(kinds, prefix="val_")
        self.positive = BinaryAccuracy()
        # Metrics that are kept in checkpoints, one with a state that grows, one with a scalar.
        self.seen, self.largest = SumMetric(), CatMetric()
        self.seen.persistent(True)
        self.largest.persistent(True)

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


# Metrics go on where the checkpoint left them.
case("metrics", Measured, stages=(3, 2), max_epochs=3, save_at=2, readers=("again",), data=lambda: (rows(20, batch_size=3), rows(8, seed=1)))  # fmt: skip


class Logging(Regression):
    """Logs what differs between ranks and batches, reduced in every way."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        value = torch.tensor(float(10**self.global_rank + batch_idx))
        for name, reduce_fx in {"function": torch.max, **{n: n for n in ("mean", "sum", "min", "max")}}.items():  # fmt: skip
            for on_epoch in (False, True):
                how: dict[str, Any] = {"on_step": not on_epoch, "on_epoch": on_epoch}
                how |= {"sync_dist": reduce_fx is not torch.max, "batch_size": 1 + batch_idx}
                self.log(f"{name} {on_epoch}", value, reduce_fx=reduce_fx, **how)
        self.log("weight", self.head.weight.norm(), sync_dist=True)
        self.log("int", batch_idx, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("rank 0 only", value, rank_zero_only=True)
        both = {"both": loss, "twice": 2 * loss}
        self.log_dict(both, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("end", float(self.global_rank), sync_dist=True)


case("metrics", Logging, **VALIDATED, max_epochs=2)


class Contrastive(Noted):
    """A loss over all ranks' outputs, whose gradients flow to each; and parameters gathered."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        every = all_gather(self, F.normalize(self(x)), sync_grads=True)
        self.notes.append([list(every.shape), every.requires_grad])
        with torch.no_grad():
            others = all_gather(self, {"y": y, "n": [batch_idx], "w": self.head.weight.detach()})
        self.notes.append([others["y"], others["n"][0], others["w"]])
        targets = F.normalize(others["y"].flatten(0, 1))
        loss = (every.flatten(0, 1) @ targets.T).logsumexp(0).mean()
        self.losses.append(loss.item())
        return loss

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
            all_gather(self, value).tolist(),
            [strategy.is_global_zero, strategy.global_rank, strategy.world_size],
        ]
        strategy.barrier("here")


case("metrics", Contrastive, max_epochs=2,
     moments={"on_after_backward": lambda m: [float(p.grad.norm()) for p in m.parameters()]})  # fmt: skip


# -- errors, and the module afterwards -------------------------------------------------------------


def raise_in_third_step(m: Any, batch: Any, batch_idx: int) -> Any:
    if batch_idx == 2 and m.is_gloomy:
        raise ArithmeticError(f"rank {m.global_rank} gave up")
    return Regression.training_step(m, batch, batch_idx)


def skip_the_second_step(m: Any, batch: Any, batch_idx: int) -> Any:
    loss = Regression.training_step(m, batch, batch_idx)
    return None if batch_idx == 1 and m.is_gloomy else loss


ENDS: dict[Any, Any] = {
    raise_in_third_step: (ArithmeticError, "gave up"),
    skip_the_second_step: (RuntimeError, "by returning None in distributed training is not"),
}


def ends_early(step: Any, play: Player) -> Trace:
    """Go on after an exception, which leaves the module whole on one rank, else sharded."""
    module = user(Regression, training_step=step, is_gloomy=True)()
    with pytest.raises(ENDS[step][0], match=ENDS[step][1]):
        play.fit(module)
    if play.way.world == 1:
        first = play.trace(module)
        assert all(type(parameter) is Parameter for parameter in module.parameters())
        module.is_gloomy = False
        return play.fit(module, notes=first.params)
    if play.way.strategy == 3:
        with pytest.raises(RuntimeError, match="left sharded when training ended"):
            play.trace(module)
    return play.fit(Regression())


for step in ENDS:
    case("errors", name=step.__name__, loop=partial(ends_early, step), stages=(1, 2, 3))
case("errors", user(Regression, training_step=skip_the_second_step, is_gloomy=True), "no_loss_on_one_device", worlds=(1,), stages=(2, 3))  # fmt: skip


@case("fit", stages=(1, 2, 3))
def the_module_after_fit(play: Player) -> Trace:
    """It is whole and ordinary: a copy, a pickle and a file of it train."""
    module = Regression()
    parameters = list(module.parameters())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
    trace = play.fit(module)
    assert all(ours is theirs for ours, theirs in zip(module.parameters(), parameters, strict=True))
    for parameter in parameters:
        assert type(parameter) is Parameter
        assert parameter.is_contiguous()
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert play.is_ddp or parameter.grad is None
        assert not parameter._post_accumulate_grad_hooks
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    trace.notes = []
    for twin in (*copies, torch.load(file, weights_only=False)):
        twin.zero_grad()
        twin(torch.ones(2, 6)).sum().backward()
        trace.notes.append([parameter.grad for parameter in twin.parameters()])
        pairs = zip(twin.state_dict().values(), module.state_dict().values(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    return trace


class Bare(LightningModule):
    """No parameters, and nothing to train."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("total", batch[0].sum(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0].sum().item()


@case("loops", settings=({"units": "auto"},))
def a_module_without_parameters(play: Player) -> Trace:
    trainer, data = play.trainer(), rows(8)
    totals = [run(Bare(), data, verbose=False) for run in (trainer.validate, trainer.test)]
    return Trace({}, notes=[totals, trainer.predict(Bare(), data)])


class Sometimes(Regression):
    """Steps in which all ranks have a gradient for the scale, one has, and none has."""

    def __init__(self) -> None:
        super().__init__(0.01, lambda p, lr: torch.optim.SGD(p, lr, 0.5, weight_decay=0.5))
        self.scale = nn.Parameter(torch.ones(6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        has_grad = batch_idx == 0 or (batch_idx == 1 and self.global_rank == 0)
        return Gated.apply(self(batch[0]), self.scale, has_grad).pow(2).sum()  # type: ignore[no-any-return]


class Gated(torch.autograd.Function):
    """Scales values; the scale gets a gradient only on request."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: Tensor, has_grad: bool) -> Tensor:
        ctx.save_for_backward(values, scale)
        ctx.has_grad = has_grad
        return values * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, scale = ctx.saved_tensors
        return grad * scale, (grad * values).sum(0) if ctx.has_grad else None, None


for steps in (1, 2):
    case("fit", Sometimes, f"no_gradient_on_some_ranks_{steps}", accumulate_grad_batches=steps,
         max_steps=3, ulps=8 * (steps - 1))  # fmt: skip

widen("raise_in_third_step", "options_0", "Logging")
