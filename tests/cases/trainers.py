"""What users do with a Trainer and its parts: hooks of their own, copies, patches, files."""

from __future__ import annotations

import copy
import itertools
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
from lightning.pytorch.callbacks import LambdaCallback, LearningRateMonitor, Timer, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy
from torch import nn

from lightning_zero import ZeROStrategy
from tests.cases import scheduled, user
from tests.oracle.play import Player, case, widen
from tests.oracle.projects import ByHand, Regression, Trace, rows


@case("trainer")
def use_a_trainer_before_it_is_set_up(play: Player) -> Trace:
    module, other, path = Regression(), Regression(), str(play.folder / "saved.ckpt")
    trainer = play.trainer()
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path)
    trainer = play.trainer()
    trainer.strategy.connect(other)
    trainer._checkpoint_connector.resume_start(path)
    trainer._checkpoint_connector.restore_model()
    return play.fit(other, notes=sorted(torch.load(path, weights_only=True)))


class Renaming(Regression):
    """Stores a weight under another name, leaves one out, and reads weights as it loads them."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.seen: list[float] = []
        self.register_buffer("scale", torch.ones(2))
        self.register_load_state_dict_pre_hook(lambda *_: self.calls.append("hook"))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {f"mine.{key}": value for key, value in state.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.calls.append("on_load_checkpoint")
        del checkpoint["state_dict"]["mine.net.blocks.0.linear.weight"]

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        self.calls.append("load")
        own = {key.removeprefix("mine."): value for key, value in state.items()}
        found = super().load_state_dict(own, strict)
        with torch.no_grad():
            self.seen += [float(p.sum()) for p in self.parameters()]
            self.scale.copy_(self.scale * 3)
            self.net.blocks[0].linear.weight.copy_(self.net.blocks[0].linear.weight * 0 + 2)
        self.seen += [float(self.net.blocks[0].linear.weight.sum()), *map(len, found)]
        return found


@case("trainer", ulps=16)
def load_in_a_way_of_ones_own(play: Player) -> Trace:
    path, modules = str(play.folder / "saved.ckpt"), [Renaming() for _ in range(4)]
    trainer = play.trainer(max_steps=2)
    trainer.fit(Renaming(), rows())
    trainer.save_checkpoint(path)
    notes = []
    for module, call in zip(modules, ("validate", "test", "predict"), strict=False):
        notes.append(getattr(play.trainer(), call)(module, rows(), ckpt_path=path))
    trace = play.fit(modules[3], ckpt_path=path, max_steps=4)
    trace.notes = [*notes, *([m.calls, m.seen, list(m.parameters()), m.scale] for m in modules)]
    return trace


_PATCHED = {
    time: ("monotonic", "perf_counter", "sleep", "time"),
    uuid: ("uuid1", "uuid4"),
    random: ("choice", "getrandbits", "randint", "random", "sample", "seed", "shuffle"),
    np.random: ("choice", "permutation", "rand", "randint", "seed", "shuffle"),
    nn.utils: ("clip_grad_norm_", "clip_grad_value_"),
}
"""What tests and projects patch or seed."""
HOOKS = (
    "setup", "on_fit_start", "on_before_backward", "on_after_backward", "on_train_batch_end", "on_validation_batch_end",
    "on_train_end", "teardown",
)  # fmt: skip


def generators(*_: Any) -> int:
    """Sum up the states of global generators, which nothing of ours changes."""
    numpys, torchs = np.random.get_state()[1], torch.get_rng_state()
    return zlib.crc32(pickle.dumps((random.getstate(), numpys.tolist(), torchs.tolist())))


@case("trainer")
def patch_functions(play: Player) -> Trace:
    """Nothing of ours reads clocks and global generators by these names; clipping is called as under DDP."""
    callers: list[str] = []

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = str(sys._getframe(1).f_globals.get("__name__"))
            if caller.startswith("lightning_zero") or "clip" in original.__name__:
                callers.append(original.__name__)
            return original(*args, **kwargs)

        return call

    note = lambda trainer, *_, **__: module.notes.append(generators())  # noqa: E731
    pl.seed_everything(3)
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in _PATCHED.items():
            for each in names:
                patch.setattr(owner, each, noted(getattr(owner, each)))
        for kind in ("norm", "value"):
            module = Regression()
            callbacks = [LambdaCallback(**dict.fromkeys(HOOKS, note))]
            how = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": kind}
            trace = play.fit(module, callbacks=callbacks, **how)
            callers += module.notes
    trace.notes = callers
    return trace


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


def patched(make: Any, play: Player) -> Trace:
    path, module, trainer = str(play.folder / "saved.ckpt"), make(), play.trainer()
    with ExitStack() as patches:
        mocks = []
        for name in (*COUNTED, *OVERRIDDEN):
            given: dict[str, Any] = {"wraps": getattr(trainer.strategy, name)}
            if play.is_ddp:  # its own methods call these
                given = {"autospec": True, "side_effect": getattr(Strategy, name)}
            mocks.append(patches.enter_context(mock.patch.object(Strategy, name, **given)))
        trainer.fit(module, rows(8), rows(4))
        trainer.save_checkpoint(path)
        trainer.test(module, rows(4), ckpt_path=path, verbose=False)
        trainer.predict(module, rows(4))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, rows(8), rows(4), ckpt_path=path)
        trainer.strategy.remove_checkpoint(path)
    calls = [each.call_count for each in mocks[: len(COUNTED)]]
    assert all(calls)
    return play.trace(module, trainer, calls)


for make in (Regression, ByHand):
    case("trainer", name=f"patch_methods_{make.__name__}", loop=partial(patched, make), ulps=64)


# -- copies ----------------------------------------------------------------------------------------

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
        things: dict[str, Any] = {
            "trainer": trainer, "strategy": trainer.strategy, "callbacks": trainer.callbacks, "module": module,  # type: ignore[attr-defined]
            "model": trainer.model, "loggers": trainer.loggers, "optimizers": trainer.optimizers,
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
        }  # fmt: skip
        if hook == "teardown":  # an optimizer whose run has ended is refused
            del things["optimizers"], things["schedulers"]
        ways = {"copy": copy.deepcopy, "pickle": lambda thing: pickle.loads(pickle.dumps(thing))}
        for (name, thing), way in itertools.product(things.items(), ways):
            place = f"{hook}, {name}, {way}"
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self.found[place] = values_of(name, ways[way](thing), thing)
            except Exception:
                if isinstance(trainer.strategy, ZeROStrategy) and place not in FAILED:
                    raise
                FAILED.add(place)

    def __getattribute__(self, name: str) -> Any:
        if name not in HOOKS:
            return super().__getattribute__(name)
        return lambda trainer, module, *_, **__: self.copy_all(name, trainer, module)


def values_of(name: str, copied: Any, thing: Any) -> Any:
    """Return what is compared of a copy."""
    if name in ("module", "model"):
        return [p.detach().clone() for p in copied.parameters()]
    if name == "optimizers":
        return [optimizer.state_dict() for optimizer in copied]
    if name == "schedulers":
        return [(s.state_dict(), s.optimizer.state_dict()["param_groups"]) for s in copied]
    if name != "callbacks":
        return type(copied) is type(thing)
    average = next(each for each in copied if isinstance(each, WeightAveraging))._average_model
    return None if average is None else [p.detach().clone() for p in average.parameters()]


class Scheduled(Regression):
    def configure_optimizers(self) -> Any:
        return scheduled(super().configure_optimizers())


@case("trainer")
def copies_at_any_moment(play: Player) -> Trace:
    """Deep copies and pickles of a Trainer and its parts."""
    copier, module = Copier(), Scheduled()
    callbacks = [copier, LearningRateMonitor(), WeightAveraging(), Timer()]
    how: dict[str, Any] = {"val_check_interval": 2, "limit_val_batches": 1, "max_steps": 3}
    trainer = play.trainer(callbacks=callbacks, logger=CSVLogger(play.folder), **how)
    trainer.fit(module, rows(), rows(8))
    found = {place: value for place, value in copier.found.items() if place not in FAILED}
    assert len(found) > 50
    return Trace({}, notes=found)
