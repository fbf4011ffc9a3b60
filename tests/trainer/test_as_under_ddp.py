"""What users do with a Trainer and its parts gives what it gives under DDP."""

from __future__ import annotations

import copy
import pickle
import random
import sys
import time
import uuid
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, Timer, TQDMProgressBar
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_zero import ZeROStrategy
from tests.oracle.by_trainer import Model, Rows, make_trainer, strategy_of, world
from tests.oracle.ranks import Pools


def trainer_of(name: str, **options: Any) -> Any:
    options = {"max_steps": 2, "enable_checkpointing": False, **options}
    return make_trainer(world(), strategy_of(name), "/nowhere", **options)


def fit(name: str, module: Any, ckpt_path: str | None = None, **options: Any) -> Any:
    trainer = trainer_of(name, **options)
    trainer.fit(module, Rows(), ckpt_path=ckpt_path)
    return trainer


def saved(name: str, module: Any, path: str, **options: Any) -> Any:
    trainer = fit(name, module, **options)
    trainer.save_checkpoint(path)
    return trainer


def use_a_trainer_before_it_is_set_up(name: str, path: str) -> Any:
    torch.manual_seed(0)
    module, other = Model(), Model()
    trainer = trainer_of(name)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path)
    trainer = trainer_of(name)
    trainer.strategy.connect(other)
    trainer._checkpoint_connector.resume_start(path)
    trainer._checkpoint_connector.restore_model()
    return sorted(torch.load(path, weights_only=True)), [
        float((a - b).detach().abs().sum())
        for a, b in zip(module.parameters(), other.parameters(), strict=True)
    ]


class Unoptimized(Model):
    def configure_optimizers(self) -> None:
        return None


def train_without_an_optimizer(name: str, path: str) -> Any:
    saved(name, Unoptimized(), path)
    states = torch.load(path, weights_only=True)["optimizer_states"]
    trainer = fit(name, Unoptimized(), path, max_steps=-1, max_epochs=2)
    return states, trainer.global_step, trainer.current_epoch


class Counted(torch.optim.Adam):
    """Counts calls."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.calls = {"step": 0, "zero_grad": 0, "pre": 0, "post": 0, "state": 0}
        self.register_step_pre_hook(lambda *_: self.count("pre"))
        self.register_step_post_hook(lambda *_: self.count("post"))
        self.register_state_dict_post_hook(lambda *_: self.count("state"))

    def count(self, what: str) -> None:
        self.calls[what] += 1

    def step(self, closure: Any = None) -> Any:
        self.count("step")
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.count("zero_grad")
        super().zero_grad(set_to_none)


class Counting(Model):
    def configure_optimizers(self) -> Any:
        return Counted(self.parameters())


def count_an_optimizers_calls(name: str, path: str) -> Any:
    trainer = saved(name, Counting(), path, max_steps=3, accumulate_grad_batches=2)
    return trainer.optimizers[0].calls


def copy_a_trainer(name: str, path: str) -> Any:
    bar, module = TQDMProgressBar(refresh_rate=0), Model()
    trainer = fit(name, module, callbacks=[bar], enable_progress_bar=True)
    assert module.trainer is trainer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, for what Lightning pickles
        copies = [copy.deepcopy(module), *(pickle.loads(pickle.dumps(x)) for x in (trainer, bar))]
    return [type(each).__name__ for each in copies], copies[1].global_step


class Stateful(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}


def resume_with_other_callbacks(name: str, path: str) -> Any:
    saved(name, Model(), path, callbacks=[Stateful()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(name, Model(), path, callbacks=[Timer()], max_steps=4)
    return trainer.global_step, [str(w.message) for w in caught if "callbacks" in str(w.message)]


class Renaming(Model):
    """Stores a weight under another name, leaves one out, and reads weights as it loads them."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.calls = {"load": 0, "hook": 0, "on_load_checkpoint": 0}
        self.seen: list[float] = []
        self.register_buffer("scale", torch.ones(2))
        self.register_load_state_dict_pre_hook(lambda *_: self.count("hook"))

    def count(self, what: str) -> None:
        self.calls[what] += 1

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {f"mine.{key}": value for key, value in state.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.count("on_load_checkpoint")
        del checkpoint["state_dict"]["mine.net.blocks.0.linear.weight"]

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        self.count("load")
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


def load_in_a_way_of_ones_own(name: str, path: str) -> Any:
    torch.manual_seed(0)
    saved(name, Renaming(), path)
    found = []
    torch.manual_seed(1)
    resumed = Renaming()
    fit(name, resumed, path, max_steps=4)
    modules = {"validate": Renaming(), "test": Renaming(), "predict": Renaming()}
    for call, module in modules.items():
        result = getattr(trainer_of(name), call)(module, Rows(), ckpt_path=path)
        found.append([round(value, 4) for value in result] if call == "predict" else ())
    for module in (resumed, *modules.values()):
        sums = [float(p.detach().sum()) for p in (*module.parameters(), module.scale)]
        found.append((module.calls, [round(value, 4) for value in module.seen + sums]))
    return found


class LoadsStates(Model):
    """Starts with an optimizer's states that some run has left."""

    def __init__(self, make: Callable[..., Optimizer], states: Any = None) -> None:
        super().__init__()
        self.make, self.states = make, states

    def configure_optimizers(self) -> Optimizer:
        return self.make(self.parameters(), lr=0.02)

    def on_train_start(self) -> None:
        if self.states is not None:
            self.trainer.optimizers[0].load_state_dict(self.states)


def load_an_optimizers_states(name: str, path: str) -> Any:
    found = []
    for make in (torch.optim.Adam, torch.optim.Adafactor):  # by element, and by owner
        torch.manual_seed(0)
        saved("ddp", LoadsStates(make), path)
        states = torch.load(path, weights_only=False)["optimizer_states"][0]
        module = LoadsStates(make, states)
        fit(name, module)
        found.append([round(float(p.detach().abs().sum()), 4) for p in module.parameters()])
    return found


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.blocks[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks[0], optimizer)


class Finetuned(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad])


def resume_finetuning(name: str, path: str) -> Any:
    epochs = {"limit_train_batches": 2, "max_steps": -1}
    saved(name, Finetuned(), path, callbacks=[Finetuning()], max_epochs=2, **epochs)
    # A module whose optimizer has all parameters, so that the callback repeats some.
    sizes = []
    for module in (Finetuned(), Model()):
        trainer = fit(name, module, path, callbacks=[Finetuning()], max_epochs=3, **epochs)
        sizes.append([len(group["params"]) for group in trainer.optimizers[0].param_groups])
    return sizes


class Unmonitored(Model):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        scheduler = {"scheduler": plateau, "monitor": "nothing", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def warn_of_a_scheduler(name: str, path: str) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(name, Unmonitored(), max_steps=-1, max_epochs=1, limit_train_batches=1)
    return [str(w.message) for w in caught if "ReduceLROnPlateau" in str(w.message)]


class OptionsIO(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.options = storage_options
        super().save_checkpoint(checkpoint, path)


def give_storage_options(name: str, path: str) -> Any:
    plugin = OptionsIO()
    trainer = fit(name, Model(), plugins=[plugin])
    trainer.save_checkpoint(path, storage_options={"a": 1})
    return getattr(plugin, "options", None)


def name_a_missing_checkpoint(name: str, path: str) -> Any:
    told = []
    for call in ("fit", "validate", "test"):
        try:
            getattr(trainer_of(name), call)(Model(), Rows(), ckpt_path=f"{path}.nothing")
        except FileNotFoundError as error:
            told.append(f"Checkpoint file not found: {path}.nothing" in str(error))
    return told


def replace_clipping(name: str, path: str) -> Any:
    calls: list[str] = []

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(*args: Any, **kwargs: Any) -> Any:
            calls.append(original.__name__)
            return original(*args, **kwargs)

        return clip

    losses = []
    with pytest.MonkeyPatch.context() as patch:
        for function in ("clip_grad_norm_", "clip_grad_value_"):
            patch.setattr(nn.utils, function, noted(getattr(nn.utils, function)))
        for algorithm in ("norm", "value"):
            torch.manual_seed(0)
            module = Model()
            fit(name, module, gradient_clip_val=0.05, gradient_clip_algorithm=algorithm)
            losses.append([round(loss, 4) for loss in module.losses])
    return calls, losses


class Looking(Model):
    seen: Any = ()

    def on_train_batch_end(self, *args: Any) -> None:
        plugin = self.trainer.precision_plugin
        self.seen = plugin.precision, plugin.device, plugin.scaler.get_scale()


def look_at_the_precision(name: str, path: str) -> Any:
    module = Looking()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    fit(name, module, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    return module.seen


_PATCHED = {
    time: ("clock_gettime", "monotonic", "perf_counter", "process_time", "sleep", "time"),
    uuid: ("uuid1", "uuid4"),
    random: ("choice", "getrandbits", "randint", "random", "sample", "seed", "shuffle"),
    np.random: ("choice", "permutation", "rand", "randint", "seed", "shuffle"),
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

    configure_gradient_clipping = on_train_batch_start = on_before_zero_grad = note
    setup = on_fit_start = on_train_start = on_train_batch_end = on_fit_end = note


def patch_clocks_and_generators(name: str, path: str) -> Any:
    """Nothing of ours reads them by the names that are patched, or changes a global generator."""
    callers: list[str] = []

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = str(sys._getframe(1).f_globals.get("__name__"))
            if caller.startswith("lightning_zero"):
                callers.append(f"{caller}: {original.__name__}")
            return original(*args, **kwargs)

        return call

    module = Seeded()
    pl.seed_everything(3)
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in _PATCHED.items():
            for each in names:
                patch.setattr(owner, each, noted(getattr(owner, each)))
        module.note()
        fit(name, module)
        if name != "ddp":
            folder = str(Path(path).parent)
            files: dict[str, Any] = {"offload_optimizer": "nvme", "offload_path": folder}
            options: dict[str, Any] = {"max_steps": 2, "enable_checkpointing": False}
            strategy = ZeROStrategy(int(name[-1]), **files)
            trainer = make_trainer(world(), strategy, "/nowhere", **options)
            trainer.fit(Model(), Rows())
            trainer.save_checkpoint(path)
    return [True, callers, module.states]


def patch_the_clock(name: str, path: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", iter([0.0, 1.0]).__next__)  # for a Timer, say
        return fit(name, Model()).global_step


class Bare(LightningModule):
    """No parameters, and nothing to train."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("total", batch[0].sum(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0].sum().item()


def use_a_module_without_parameters(name: str, path: str) -> Any:
    trainer, data = trainer_of(name), DataLoader(torch.arange(8.0).view(8, 1), batch_size=2)
    totals = [run(Bare(), data, verbose=False) for run in (trainer.validate, trainer.test)]
    return totals, trainer.predict(Bare(), data)


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


class Sometimes(LightningModule):
    """Steps in which all ranks have a gradient for the scale, one has, and none has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        has_grad = index == 0 or (index == 1 and self.global_rank == 0)
        values = self.first(batch[0][:, :4] / 8.0)
        return Gated.apply(values, self.scale, has_grad).pow(2).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.5, weight_decay=0.5)


def return_no_gradient(name: str, path: str) -> Any:
    found = []
    for accumulate in (1, 2):
        module = Sometimes()
        fit(name, module, max_steps=3, accumulate_grad_batches=accumulate)
        found += module.scale.tolist()
    return found


BOTH = ("zero1", "zero3")
"""Where weights are whole, and where they come and go."""
CASES = {
    return_no_gradient: BOTH,
    use_a_module_without_parameters: BOTH,
    use_a_trainer_before_it_is_set_up: BOTH,
    train_without_an_optimizer: ("zero1",),
    count_an_optimizers_calls: ("zero3",),
    copy_a_trainer: ("zero3",),
    resume_with_other_callbacks: ("zero1",),
    load_in_a_way_of_ones_own: BOTH,
    load_an_optimizers_states: ("zero3",),
    resume_finetuning: BOTH,
    warn_of_a_scheduler: ("zero1",),
    give_storage_options: ("zero3",),
    name_a_missing_checkpoint: ("zero1",),
    replace_clipping: BOTH,
    look_at_the_precision: ("zero1",),
    patch_the_clock: ("zero3",),
    patch_clocks_and_generators: ("zero3",),
}


def under_each(case: Callable[[str, str], Any], folder: str) -> list[Any]:
    return [case(name, f"{folder}/{name}.ckpt") for name in ("ddp", *CASES[case])]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_trainer_is_used_as_under_ddp(
    ranks: Pools, tmp_path: Path, case: Callable[[str, str], Any]
) -> None:
    results = ranks(2).run(under_each, case, str(tmp_path))
    assert results[0][0]  # the other ranks neither warn nor save
    for expected, *others in results:
        for found in others:
            assert found == expected
