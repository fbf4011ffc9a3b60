"""A Trainer's run that saves in its course, and one that resumes from what was saved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_zero import ZeROStrategy
from tests.oracle import projects
from tests.oracle.models import Tied
from tests.oracle.parity import unequal

NUM_ROWS = 48


class Model(LightningModule):
    """A tied model with dropout-free loss, a scheduler per step and a hyperparameter."""

    def __init__(self, lr: float = 0.02, extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Tied()
        self.losses: list[float] = []
        self.loaded: list[str] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (text,) = batch
        logits = self.net(text[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, text[:, 1:].flatten())
        self.losses.append(loss.item())
        self.log("loss", loss.detach())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        (text,) = batch
        logits = self.net(text[:, :-1]).flatten(0, 1)
        self.log("val", torch.nn.functional.cross_entropy(logits, text[:, 1:].flatten()))

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.validation_step(batch, index)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = list(checkpoint["state_dict"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Rows:
    """A loader that a checkpoint can stop in the middle.

    Every rank reads the same rows, so that world sizes can be compared.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batches = torch.randint(11, (NUM_ROWS // 4, 4, 5), generator=generator)
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Tensor]]:
        start, self.position = self.position % len(self), self.position % len(self)
        for batch in self.batches[start:]:
            self.position += 1
            yield [batch]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def make_trainer(world: int, strategy: Any, folder: Path | str, **more: Any) -> Trainer:
    options: dict[str, Any] = {
        "devices": world,
        "max_epochs": None,
        "max_steps": 12,
        "log_every_n_steps": 50,
        "enable_checkpointing": True,
        "default_root_dir": str(folder),
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    return projects.make_trainer(strategy, **{**options, **more})


def brief(strategy: Any, max_steps: int, **more: Any) -> Trainer:
    """A trainer that saves only when it is told to."""
    options = {"enable_checkpointing": False, "max_steps": max_steps, **more}
    return make_trainer(world(), strategy, "/nowhere", **options)


def world() -> int:
    return dist.get_world_size()


def model() -> Model:
    torch.default_generator.manual_seed(0)
    return Model()


def strategy_of(name: str) -> Any:
    if name in ("ddp", "auto"):
        return name
    kind: Any = "dcp" if "dcp" in name else "file"
    is_async = name.startswith("async")
    return ZeROStrategy(int(name[-1]), checkpoint=kind, async_checkpoint=is_async)


class Stop(Callback):
    """Saves in the middle of an epoch."""

    def __init__(self, path: str, at: int) -> None:
        self.path, self.at = path, at

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.at:
            trainer.save_checkpoint(self.path)


def train(folder: str, name: str) -> dict[str, Any]:
    """12 steps with a checkpoint after 5; returns losses, and files by name."""
    module = model()
    keep = ModelCheckpoint(
        folder, "{step}", monitor="loss", save_top_k=2, every_n_train_steps=3, save_last=True
    )
    callbacks = [keep, Stop(f"{folder}/mid.ckpt", 5)]
    trainer = make_trainer(world(), strategy_of(name), folder, callbacks=callbacks)
    trainer.fit(module, Rows())
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    trainer.strategy.barrier()
    return {
        "losses": module.losses,
        "files": sorted(os.listdir(folder)),
        "best": os.path.basename(keep.best_model_path),
        "last": os.path.basename(keep.last_model_path),
        "top": sorted(map(os.path.basename, keep.best_k_models)),
        "weights": {k: v.clone() for k, v in module.state_dict().items()},
    }


def resume(path: str, name: str) -> dict[str, Any]:
    module = model()
    trainer = brief(strategy_of(name), 12)
    trainer.fit(module, Rows(), ckpt_path=path)
    return {
        "losses": module.losses,
        "weights": {k: v.clone() for k, v in module.state_dict().items()},
        "loaded": module.loaded,
        "step": trainer.global_step,
    }


def assert_close(found: Any, expected: Any, where: str) -> None:
    told = list(unequal(found, expected, 1e-5, where))
    assert not told, "\n".join(told)
