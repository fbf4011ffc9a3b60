"""Deep copies and pickles of a Trainer and its parts, at any moment of a run, are as under DDP."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch.optim import Optimizer

from lightning_zero import MemoryMonitor
from tests.oracle.by_trainer import (
    Model,
    Rows,
    assert_close,
    make_trainer,
    model,
    strategy_of,
    world,
)
from tests.oracle.ranks import Pools

HOOKS = [
    "setup",
    "on_fit_start",
    "on_train_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_train_epoch_end",
    "on_save_checkpoint",
    "on_train_end",
    "on_fit_end",
    "teardown",
]
ENDED = ("on_fit_end", "teardown")
WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
}


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        pass

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
        pass


class Copier(Callback):
    """Copies everything in each hook, once.

    Attributes:
        found: Values of the copies, or the error, by hook, thing and way.
    """

    def __init__(self, hooks: list[str]) -> None:
        self.hooks = hooks
        self.found: dict[tuple[str, str, str], Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"hooks": [], "found": {}}

    def copy_all(self, hook: str, trainer: Trainer, module: Any) -> None:
        if any(hook == where for where, _, _ in self.found):
            return
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        things = {
            "trainer": trainer,
            "strategy": trainer.strategy,
            "callbacks": callbacks,
            "module": module,
            "optimizers": trainer.optimizers,
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
            "loggers": trainer.loggers,
        }
        for name, thing in things.items():
            for way, do in WAYS.items():
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        self.found[hook, name, way] = values_of(name, thing, do(thing))
                except Exception as error:
                    self.found[hook, name, way] = error

    def __getattribute__(self, name: str) -> Any:
        if name not in HOOKS or name not in self.hooks:
            return super().__getattribute__(name)
        return lambda trainer, module, *_, **__: self.copy_all(name, trainer, module)


def values_of(name: str, thing: Any, copied: Any) -> Any:
    """Return what is compared of a copy."""
    if name == "module":
        return [p.detach().clone() for p in copied.parameters()]
    if name == "optimizers":
        return [optimizer.state_dict() for optimizer in copied]
    if name == "schedulers":
        return [(s.state_dict(), s.optimizer.state_dict()["param_groups"]) for s in copied]
    if name != "callbacks":
        return type(copied) is type(thing)
    average = next(each for each in copied if isinstance(each, WeightAveraging))._average_model
    return None if average is None else [p.detach().clone() for p in average.parameters()]


def fit(name: str, hooks: list[str], folder: str) -> Copier:
    copier, ours = Copier(hooks), [MemoryMonitor()]
    callbacks = [copier, LearningRateMonitor(), WeightAveraging(), Timer(), Finetuning()]
    callbacks += [ModelCheckpoint(folder), *(ours if name != "ddp" else ())]
    trainer = make_trainer(
        world(),
        strategy_of(name),
        folder,
        max_steps=3,
        callbacks=callbacks,
        logger=CSVLogger(folder),
        val_check_interval=2,
        limit_val_batches=1,
    )
    module: Model = model()
    trainer.fit(module, Rows(), Rows())
    copier.copy_all("after", trainer, module)
    return copier


def under(name: str, hooks: list[str], folder: str) -> None:
    torch.manual_seed(0)
    expected, found = (fit(each, hooks, f"{folder}/{each}").found for each in ("ddp", name))
    num_copies = 0
    for place, value in found.items():
        hook, what, _ = place
        if what in ("optimizers", "schedulers") and hook in (*ENDED, "after"):
            assert "belongs to a run that has ended" in str(value), place
        elif not isinstance(expected[place], Exception):
            assert_close(value, expected[place], f"{place}: {value!r:.200}")
            num_copies += 1
    assert num_copies > 6 * len(hooks)


@pytest.mark.parametrize(("name", "hooks"), [("zero2", HOOKS[4::5]), ("zero3", HOOKS)])
def test_copies_are_those_under_ddp(
    ranks: Pools, tmp_path: Path, name: str, hooks: list[str]
) -> None:
    ranks(2).run(under, name, hooks, str(tmp_path), timeout=120)
