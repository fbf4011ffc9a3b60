"""Checkpoint plugins are called as often as under DDP; those that pass on need no whole tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from lightning_zero.trainer import checkpointing
from lightning_zero.trainer.plugins import plugins_of
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


class EverySecond(WIDE):
    """Saves every second time."""

    number = 0

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.number += 1
        if self.number % 2:
            super().save_checkpoint(*args, **kwargs)


class Reading(WIDE):
    """Notes a sum of weights in the file."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        total = sum(float(value.sum()) for value in checkpoint["state_dict"].values())
        super().save_checkpoint({**checkpoint, "total": round(total, 4)}, path)

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
    "none": (TorchCheckpointIO, False),
    "async": (AsyncCheckpointIO, False),
    "async around torch's": (lambda: AsyncCheckpointIO(TorchCheckpointIO()), False),
    "wrapper": (WIDE, False),
    "wrapper of async": (lambda: WIDE(AsyncCheckpointIO(TorchCheckpointIO())), False),
    "drops": (Dropping, False),
    "twice": (Twice, False),
    "every second": (EverySecond, False),
    "reads": (Reading, True),
    "own": (Own, True),
    "async around own": (lambda: AsyncCheckpointIO(Own()), True),
}
"""Plugins, and whether they need whole tensors."""
METHODS = ("save_checkpoint", "load_checkpoint", "remove_checkpoint")


def spied(plugin: CheckpointIO, folder: str, calls: list[Any]) -> CheckpointIO:
    """Note calls of a plugin's methods, where Lightning makes them."""
    if type(plugin) is TorchCheckpointIO:
        return plugin  # its methods are ours

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            path = args[1] if name == "save_checkpoint" else args[0]
            calls.append((name, str(path).removeprefix(folder), sorted(kwargs.items())))
            return method(*args, **kwargs)

        return call

    for name in METHODS:
        setattr(plugin, name, noted(name, getattr(plugin, name)))
    return plugin


def save_and_resume(strategy: Any, folder: str, make: Callable[[], CheckpointIO]) -> Any:
    calls: list[Any] = []
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=1, monitor="step")
    options = {"plugins": [spied(make(), folder, calls)], "limit_train_batches": 3}
    trainer = make_trainer(strategy, callbacks=[keep], enable_checkpointing=True, **options)
    trainer.fit(Regression(), rows())
    trainer.save_checkpoint(path := f"{folder}/last.ckpt")
    for plugin in plugins_of(trainer.strategy.checkpoint_io):
        plugin.teardown()  # a wrapper of Lightning's does not pass that on
    trainer.strategy.barrier()
    files = sorted(os.listdir(folder))
    trainer.strategy.barrier()
    path = path if os.path.exists(path) else f"{folder}/{files[0]}"
    found = torch.load(path, weights_only=True)
    facts = [found.get("word"), sorted(found["optimizer_states"][0]["state"])]
    values = [value.double().sum().item() for value in found["state_dict"].values()]
    module = Regression()
    options["plugins"] = [spied(make(), folder, calls)]
    make_trainer(strategy, **{**options, "max_epochs": 2}).fit(module, rows(), ckpt_path=path)
    values += [value.detach().double().sum().item() for value in module.state_dict().values()]
    return calls, files, facts, values


def under_each(folder: str, name: str) -> list[Any]:
    make, _ = PLUGINS[name]
    results = []
    # What is sharded of a checkpoint is so at every stage: they take turns.
    for strategy in ("ddp", 3 - list(PLUGINS).index(name) % 3):
        os.makedirs(place := f"{folder}/{strategy}", exist_ok=True)
        with mock.patch.object(checkpointing, "collected", wraps=checkpointing.collected) as whole:
            found = save_and_resume(strategy, place, make)
        if strategy != "ddp" and make is Reading and dist.get_rank() == 0:
            assert found[0].pop(0) == found[0][0]  # once in vain, as it needs whole tensors
        results.append((found, whole.called))
    return results


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins_are_called_as_under_ddp(ranks: Pools, tmp_path: Path, name: str) -> None:
    for (expected, _), *others in ranks(2).run(under_each, str(tmp_path), name):
        for found, gathers in others:
            assert found[:3] == expected[:3]
            assert found[3] == pytest.approx(expected[3], rel=1e-5, abs=1e-6)
            assert gathers == PLUGINS[name][1]


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
    """Saves twice in a run; the second time, weights have changed."""

    def __init__(self, folder: str) -> None:
        self.folder, self.told = folder, ""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        path = f"{self.folder}/{trainer.global_step}.ckpt"
        if trainer.global_step == 1:
            trainer.save_checkpoint(path)
            found = torch.load(path, weights_only=True)
            assert all(torch.equal(found["kept"][k], v) for k, v in found["state_dict"].items())
        else:
            with pytest.raises(ValueError, match="copy that a hook made earlier") as caught:
                trainer.save_checkpoint(path)
            self.told = str(caught.value)


def keep_copies(folder: str) -> list[str]:
    told = []
    for stage in (2, 3):
        saving = Saving(folder)
        make_trainer(stage, callbacks=[saving]).fit(Keeping(), rows(8))
        told.append(saving.told)
    return told


def test_copies_of_earlier_weights_are_not_taken_for_new_ones(ranks: Pools, tmp_path: Path) -> None:
    for told in ranks(2).run(keep_copies, str(tmp_path)):
        assert all("twice, with other values" in one for one in told)
