"""What users do with a Trainer and its parts: hooks of their own, copies, patches, files."""

from __future__ import annotations

import collections
import copy
import pickle
import random
import sys
import time
import uuid
import warnings
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    LearningRateMonitor,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import Optimizer

from lightning_zero import ZeROStrategy
from tests.cases import user
from tests.oracle.by_trainer import Model, Rows
from tests.oracle.play import Player, case, widen
from tests.oracle.projects import ByHand, Regression, Trace, rows


def trainer_of(play: Player, **options: Any) -> Any:
    options = {"max_steps": 2, "max_epochs": None, "use_distributed_sampler": False, **options}
    return play.trainer(strategy=play.strategy(units="auto"), **options)


def fit(play: Player, module: Any, ckpt_path: str | None = None, **options: Any) -> Any:
    trainer = trainer_of(play, **options)
    trainer.fit(module, Rows(), ckpt_path=ckpt_path)
    return trainer


def use_a_trainer_before_it_is_set_up(play: Player, path: str) -> Any:
    torch.manual_seed(0)
    module, other = Model(), Model()
    trainer = trainer_of(play)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path)
    trainer = trainer_of(play)
    trainer.strategy.connect(other)
    trainer._checkpoint_connector.resume_start(path)
    trainer._checkpoint_connector.restore_model()
    fit(play, other)
    return sorted(torch.load(path, weights_only=True)), [
        float((a - b).detach().abs().sum())
        for a, b in zip(module.parameters(), other.parameters(), strict=True)
    ]


class Renaming(Model):
    """Stores a weight under another name, leaves one out, and reads weights as it loads them."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.calls = collections.Counter[str]()
        self.seen: list[float] = []
        self.register_buffer("scale", torch.ones(2))
        self.register_load_state_dict_pre_hook(lambda *_: self.calls.update(["hook"]))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {f"mine.{key}": value for key, value in state.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.calls["on_load_checkpoint"] += 1
        del checkpoint["state_dict"]["mine.net.blocks.0.linear.weight"]

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        self.calls["load"] += 1
        own = {key.removeprefix("mine."): value for key, value in state.items()}
        found = super().load_state_dict(own, strict)
        with torch.no_grad():
            self.seen += [float(p.sum()) for p in self.parameters()]
            self.scale.copy_(self.scale * 3)
            self.net.blocks[0].linear.weight.copy_(self.net.blocks[0].linear.weight * 0 + 2)
        self.seen += [float(self.net.blocks[0].linear.weight.sum()), *map(len, found)]
        return found

    def predict_step(self, batch: Any, index: int) -> Any:
        return float(self.net(batch[0][:, :-1]).sum())


def load_in_a_way_of_ones_own(play: Player, path: str) -> Any:
    torch.manual_seed(0)
    fit(play, Renaming()).save_checkpoint(path)
    found = []
    torch.manual_seed(1)
    resumed = Renaming()
    fit(play, resumed, path, max_steps=4)
    modules = {"validate": Renaming(), "test": Renaming(), "predict": Renaming()}
    for call, module in modules.items():
        result = getattr(trainer_of(play), call)(module, Rows(), ckpt_path=path)
        found.append([round(value, 4) for value in result] if call == "predict" else ())
    for module in (resumed, *modules.values()):
        sums = [float(p.detach().sum()) for p in (*module.parameters(), module.scale)]
        found.append((dict(module.calls), [round(value, 4) for value in module.seen + sums]))
    return found


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.blocks[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks[0], optimizer)


finetuned = user(Model, configure_optimizers=lambda m: torch.optim.Adam([p for p in m.parameters() if p.requires_grad]))  # fmt: skip


def resume_finetuning(play: Player, path: str) -> Any:
    epochs = {"limit_train_batches": 2, "max_steps": -1}
    trainer = fit(play, finetuned(), callbacks=[Finetuning()], max_epochs=2, **epochs)
    trainer.save_checkpoint(path)
    # A module whose optimizer has all parameters, so that the callback repeats some.
    sizes = []
    for module in (finetuned(), Model()):
        trainer = fit(play, module, path, callbacks=[Finetuning()], max_epochs=3, **epochs)
        sizes.append([len(group["params"]) for group in trainer.optimizers[0].param_groups])
    return sizes


_PATCHED = {
    time: ("monotonic", "perf_counter", "sleep", "time"),
    uuid: ("uuid1", "uuid4"),
    random: ("choice", "getrandbits", "randint", "random", "sample", "seed", "shuffle"),
    np.random: ("choice", "permutation", "rand", "randint", "seed", "shuffle"),
    nn.utils: ("clip_grad_norm_", "clip_grad_value_"),
}
"""What tests and projects patch or seed."""


class Seeded(Model):
    """Notes the states of global generators."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[Any] = []

    def note(self, *args: Any, **kwargs: Any) -> None:
        numpys, torchs = np.random.get_state()[1], torch.get_rng_state()
        states = random.getstate(), numpys.tolist(), torchs.tolist()
        self.states.append(zlib.crc32(pickle.dumps(states)))

    on_before_optimizer_step = on_train_batch_start = on_before_zero_grad = note
    setup = on_fit_start = on_train_start = on_train_batch_end = on_fit_end = note


def patch_functions(play: Player, path: str) -> Any:
    """Nothing of ours reads clocks and global generators by these names, or changes a generator.

    Functions that clip are called as often as under DDP.
    """
    callers: list[str] = []

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = str(sys._getframe(1).f_globals.get("__name__"))
            if caller.startswith("lightning_zero") or "clip" in original.__name__:
                callers.append(original.__name__)
            return original(*args, **kwargs)

        return call

    modules = Seeded(), Seeded()
    pl.seed_everything(3)
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in _PATCHED.items():
            for each in names:
                patch.setattr(owner, each, noted(getattr(owner, each)))
        modules[0].note()
        for module, kind in zip(modules, ("norm", "value"), strict=True):
            fit(play, module, gradient_clip_val=0.05, gradient_clip_algorithm=kind)
    return callers, [(module.states, [round(loss, 4) for loss in module.losses]) for module in modules]  # fmt: skip


def used(use: Callable[[Player, str], Any], play: Player) -> Trace:
    return Trace({}, notes=use(play, str(play.folder / "saved.ckpt")))


for use in (use_a_trainer_before_it_is_set_up, load_in_a_way_of_ones_own, resume_finetuning, patch_functions):  # fmt: skip
    case("trainer", name=use.__name__, loop=partial(used, use))


case("trainer", user(configure_optimizers=lambda m: None), "Unoptimized", max_epochs=2, save_at=1, readers=("again",),
     moments={"on_train_end": lambda m: (m.global_step, m.current_epoch)})  # fmt: skip
widen("Unoptimized")


# -- methods of Lightning's `Strategy` that are patched by ones that call the instance's -----------

COUNTED = ("backward", "training_step", "validation_step", "test_step", "predict_step")
"""Methods that Lightning's hooks leave to it, so a patch is called as often as under DDP."""
OVERRIDDEN = (
    "lightning_module_state_dict", "save_checkpoint", "remove_checkpoint", "load_checkpoint",
    "load_model_state_dict", "load_optimizer_state_dict", "optimizer_state", "pre_backward",
)  # fmt: skip
"""Methods of ours: a patch of Lightning's has no effect, and no recursion."""


@case("trainer", ulps=64)
def patch_methods_of_the_strategy(play: Player) -> Trace:
    notes, path = [], str(play.folder / "saved.ckpt")
    for module in (Regression(), ByHand()):
        trainer = play.trainer(enable_checkpointing=False)
        with ExitStack() as patches:
            mocks = []
            for name in (*COUNTED, *OVERRIDDEN):
                given: dict[str, Any] = {"wraps": getattr(trainer.strategy, name)}
                if play.is_ddp:  # its own methods call these
                    given = {"autospec": True, "side_effect": getattr(Strategy, name)}
                patch = mock.patch.object(Strategy, name, **given)
                mocks.append(patches.enter_context(patch))
            trainer.fit(module, rows(8), rows(4))
            trainer.save_checkpoint(path)
            trainer.test(module, rows(4), ckpt_path=path, verbose=False)
            trainer.predict(module, rows(4))
            trainer.fit_loop.max_epochs = 2
            trainer.fit(module, rows(8), rows(4), ckpt_path=path)
            trainer.strategy.remove_checkpoint(path)
        calls = [each.call_count for each in mocks[: len(COUNTED)]]
        assert all(calls)
        notes.append([calls, play.trace(module).params])
    return Trace({}, notes=notes)


# -- copies ----------------------------------------------------------------------------------------

HOOKS = (
    "setup", "on_fit_start", "on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "on_train_batch_end", "on_validation_batch_end", "on_train_end", "on_fit_end", "teardown",
)  # fmt: skip
WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
}


FAILED: set[str] = set()
"""What DDP cannot copy where."""


class Copier(Callback):
    """Copies everything in each hook, once, and notes values of the copies."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"found": dict.fromkeys(HOOKS)}

    def copy_all(self, hook: str, trainer: Trainer, module: Any) -> None:
        if any(key.startswith(hook) for key in self.found):
            return
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        things: dict[str, Any] = {
            "trainer": trainer, "strategy": trainer.strategy, "callbacks": callbacks, "module": module,
            "loggers": trainer.loggers, "optimizers": trainer.optimizers,
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
        }  # fmt: skip
        if hook in ("on_fit_end", "teardown"):  # an optimizer whose run has ended is refused
            del things["optimizers"], things["schedulers"]
        for name, thing in things.items():
            for way, do in WAYS.items():
                place = f"{hook}, {name}, {way}"
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        self.found[place] = values_of(name, do, thing)
                    except Exception:
                        if isinstance(trainer.strategy, ZeROStrategy) and place not in FAILED:
                            raise
                        FAILED.add(place)

    def __getattribute__(self, name: str) -> Any:
        if name not in HOOKS:
            return super().__getattribute__(name)
        return lambda trainer, module, *_, **__: self.copy_all(name, trainer, module)


def values_of(name: str, do: Callable[[Any], Any], thing: Any) -> Any:
    """Return what is compared of a copy."""
    copied = do(thing)
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


@case("trainer")
def copies_at_any_moment(play: Player) -> Trace:
    """Deep copies and pickles of a Trainer and its parts."""
    copier, module = Copier(), Model()
    callbacks = [copier, LearningRateMonitor(), WeightAveraging(), Timer(), Finetuning()]
    how: dict[str, Any] = {"val_check_interval": 2, "limit_val_batches": 1, "max_steps": 3}
    trainer = trainer_of(play, callbacks=callbacks, logger=CSVLogger(play.folder), **how)
    trainer.fit(module, Rows(), Rows())
    found = {place: value for place, value in copier.found.items() if place not in FAILED}
    assert len(found) > 70
    return Trace({}, notes=found)
