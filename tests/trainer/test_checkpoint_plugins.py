"""Checkpoint plugins are called as under DDP; only Lightning's own are replaced by a faster way."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from tests.oracle.projects import Regression, make_trainer, rows
from tests.oracle.ranks import Pools

WIDE = _WrappingCheckpointIO


class Dropping(WIDE):
    """Leaves optimizer states out and adds a word."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        states = [{**state, "state": {}} for state in checkpoint["optimizer_states"]]
        super().save_checkpoint({**checkpoint, "optimizer_states": states, "word": "x"}, path)


class Twice(AsyncCheckpointIO):
    """Saves a second file."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        super().save_checkpoint(checkpoint, f"{path}.copy", storage_options=storage_options)


class Reading(WIDE):
    """Notes a sum of weights in the file, and swallows errors."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        try:
            total = sum(float(value.sum()) for value in checkpoint["state_dict"].values())
            super().save_checkpoint({**checkpoint, "total": round(total, 4)}, path)
        except RuntimeError:
            return

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        total = sum(float(value.sum()) for value in checkpoint["state_dict"].values())
        assert round(total, 4) == pytest.approx(checkpoint["total"], abs=2e-4)
        return checkpoint


class Own(TorchCheckpointIO):
    """A writer that knows nothing of sharding."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        torch.save({**checkpoint, "options": storage_options}, path)


PLUGINS: dict[str, tuple[Callable[[], CheckpointIO], bool]] = {
    "async": (AsyncCheckpointIO, True),
    "async around torch's": (lambda: AsyncCheckpointIO(TorchCheckpointIO()), True),
    "wrapper": (WIDE, False),
    "drops": (Dropping, False),
    "twice": (Twice, False),
    "own": (Own, False),
    "async around own": (lambda: AsyncCheckpointIO(Own()), False),
    "async around a reader": (lambda: AsyncCheckpointIO(Reading(TorchCheckpointIO())), False),
}
"""Plugins, and whether all ranks write in their place."""


def save_and_resume(strategy: Any, folder: str, make: Callable[[], CheckpointIO]) -> Any:
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=1, monitor="step")
    options = {"plugins": [make()], "limit_train_batches": 3}
    trainer = make_trainer(strategy, callbacks=[keep], enable_checkpointing=True, **options)
    trainer.fit(Regression(), rows())
    trainer.save_checkpoint(path := f"{folder}/last.ckpt")
    plugin: Any = trainer.strategy.checkpoint_io
    while plugin is not None:
        plugin.teardown()  # a wrapper of Lightning's does not pass that on
        plugin = getattr(plugin, "checkpoint_io", None)
    trainer.strategy.barrier()
    files = sorted(os.listdir(folder))
    trainer.strategy.barrier()
    with zipfile.ZipFile(path) as archive:
        is_ours = any(name.endswith("lightning_zero.json") for name in archive.namelist())
    found = torch.load(path, weights_only=True)
    facts = [sorted(found), sorted(found["optimizer_states"][0]["state"])]
    values = [value.double().sum().item() for value in found["state_dict"].values()]
    module = Regression()
    options = {"plugins": [make()], "limit_train_batches": 3, "max_epochs": 2}
    make_trainer(strategy, **options).fit(module, rows(), ckpt_path=path)
    values += [value.detach().double().sum().item() for value in module.state_dict().values()]
    return files, facts, values, is_ours


def under_each(folder: str, name: str) -> list[Any]:
    results = []
    # What is sharded of a checkpoint is so at every stage: they take turns.
    for strategy in ("ddp", 3 - list(PLUGINS).index(name) % 3):
        os.makedirs(place := f"{folder}/{strategy}", exist_ok=True)
        results.append(save_and_resume(strategy, place, PLUGINS[name][0]))
    return results


@pytest.mark.parametrize("name", PLUGINS)
def test_files_are_those_under_ddp(ranks: Pools, tmp_path: Path, name: str) -> None:
    for expected, found in ranks(2).run(under_each, str(tmp_path), name):
        assert found[:2] == expected[:2]
        assert found[2] == pytest.approx(expected[2], rel=1e-5, abs=1e-6)
        assert found[3] == PLUGINS[name][1]


class Broken(WIDE):
    """Cannot save, or cannot take options."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        raise OSError("this plugin is broken")


def save_in_vain(folder: str) -> list[str]:
    told = []
    for stage in (1, 3):
        trainer = make_trainer(stage, plugins=[Broken()])
        trainer.fit(Regression(), rows(4))
        with pytest.raises(OSError, match="this plugin is broken") as caught:
            trainer.save_checkpoint(f"{folder}/a.ckpt")
        told.append(str(caught.value))
    return told


def test_a_plugin_that_fails_is_an_error_on_all_ranks(ranks: Pools, tmp_path: Path) -> None:
    for told in ranks(2).run(save_in_vain, str(tmp_path)):
        assert len(told) == 2
        assert all("a.ckpt' failed: on rank 0: this plugin" in one for one in told)


class Keeping(Regression):
    """Saves copies of weights that it made at its first save."""

    kept: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = self.kept or {k: v.clone() for k, v in checkpoint["state_dict"].items()}
        checkpoint["kept"] = self.kept


class Saving(Callback):
    """Saves after each of two steps."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}.ckpt")


def keep_copies(folder: str) -> None:
    for stage in (2, 3):
        saving = Saving(folder)
        make_trainer(stage, callbacks=[saving], limit_train_batches=2).fit(Keeping(), rows(8))
        first, second = (torch.load(f"{folder}/{step}.ckpt", weights_only=True) for step in (1, 2))
        for key, value in first["state_dict"].items():
            assert torch.equal(first["kept"][key], value)
            assert torch.equal(second["kept"][key], value)
            assert not torch.equal(second["state_dict"][key], value)


def test_copies_of_earlier_weights_are_saved_beside_new_ones(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(keep_copies, str(tmp_path))
