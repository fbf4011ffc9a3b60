"""Checkpoints that hooks read and edit, other optimizers than were saved, plugins that write them."""

from __future__ import annotations

import copy
import io
import pickle
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from torch import Tensor, nn

from tests.cases import user
from tests.oracle.play import Player, case, widen
from tests.oracle.projects import WIDTH, Regression, Trace, rows


class Edited(Regression):
    """Has a batch norm, and so many optimizers when it begins and when it is resumed."""

    automatic_optimization = False
    numbers = (2, 2)

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.trainer.strategy._lightning_optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for config in self.trainer.lr_scheduler_configs:
            config.scheduler.step()

    def configure_optimizers(self) -> Any:
        # The weights that are there when optimizers are made are those of the checkpoint.
        self.notes += [float(p.detach().sum()) for p in self.parameters()]
        kinds = torch.optim.AdamW, torch.optim.Adafactor, torch.optim.SGD
        pairs = list(zip(kinds, (self.net, self.head, self.norm), strict=True))
        number = self.numbers[self.trainer.ckpt_path is not None]
        optimizers = [kind(part.parameters(), lr=0.02) for kind, part in pairs[:number]]
        return optimizers, [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]


# -- edits -----------------------------------------------------------------------------------------


def clear_all_states(m: Any, checkpoint: Any) -> None:
    checkpoint["optimizer_states"], checkpoint["lr_schedulers"] = [], []


def clear_states(m: Any, checkpoint: Any) -> None:
    """Leave one optimizer without states, and the other out."""
    checkpoint["optimizer_states"][0]["state"] = {}
    checkpoint["optimizer_states"].pop()


def change_states(m: Any, checkpoint: Any) -> None:
    states = checkpoint["optimizer_states"][0]["state"]
    states[0]["exp_avg"] = torch.zeros_like(states[0]["exp_avg"])
    states[1]["exp_avg"].mul_(2)
    states[2]["exp_avg_sq"] = states[2]["exp_avg_sq"] * 4
    states.pop(3)
    for state in checkpoint["optimizer_states"]:
        state["param_groups"][0]["lr"] = 0.3


def change_weights(m: Any, checkpoint: Any) -> None:
    weights = checkpoint["state_dict"]
    weights["head.weight"] = torch.full((WIDTH, WIDTH), 0.25)
    weights["head.bias"].add_(1)
    weights["net.stem.bias"] = weights["net.stem.bias"] + 1
    weights["norm.weight"] = weights["norm.weight"].half()
    own = m.state_dict()
    for name in ("norm.num_batches_tracked", "norm.running_mean", "net.stem.weight"):
        weights[name] = own[name]
    names = [f"net.blocks.{number}.linear.weight" for number in range(3)]
    for name, part in zip(names, torch.cat([weights[n] for n in names]).chunk(3), strict=True):
        weights[name] = part.t()


def take_as_parameters(m: Any, checkpoint: Any) -> None:
    """Take some from the checkpoint, and leave others out."""
    weights, m.strict_loading = checkpoint["state_dict"], False
    m.head.weight = nn.Parameter(weights["head.weight"])
    m.norm.running_mean = weights["norm.running_mean"]
    weights["head.bias"] = nn.Parameter(weights["head.bias"].clone()) * 2
    for name in ("norm.num_batches_tracked", "net.stem.weight"):
        del weights[name]


def assign_data(m: Any, checkpoint: Any) -> None:
    for name, parameter in m.named_parameters():
        parameter.data = checkpoint["state_dict"][name]
    m.head.weight.detach().mul_(2)
    checkpoint["state_dict"] = dict(m.state_dict())


def use_other_classes(m: Any, checkpoint: Any) -> None:
    checkpoint["state_dict"] = MappingProxyType(checkpoint["state_dict"])
    for state in checkpoint["optimizer_states"]:
        for group in state["param_groups"]:
            group["params"] = tuple(group["params"])
        state["param_groups"] = tuple(state["param_groups"])
    for of_one in checkpoint["optimizer_states"][0]["state"].values():
        of_one["step"] = of_one["step"].view(1)


def store_otherwise(m: Any, checkpoint: Any) -> None:
    """Under other names and in half precision, beside other tensors and without a weight."""
    weights = checkpoint["state_dict"]
    checkpoint["also"], checkpoint["twice"] = weights.pop("head.bias"), weights["head.weight"].double()  # fmt: skip
    weights["head.weight"] = torch.full((WIDTH, WIDTH), 0.5)
    halves = {k: v.bfloat16() if v.is_floating_point() else v for k, v in weights.items()}
    checkpoint["state_dict"] = {f"old.{key}": value for key, value in halves.items()}


def load_otherwise(m: Any, checkpoint: Any) -> None:
    weights = {k.removeprefix("old."): v for k, v in checkpoint["state_dict"].items()}
    checkpoint["state_dict"] = {**weights, "head.bias": checkpoint["also"]}


FRESH = "Optimizers that begin fresh: "
WARNS = {
    clear_all_states: f"{FRESH}0 (AdamW), 1 (Adafactor).",
    clear_states: f"{FRESH}1 (Adafactor).",
}
AGAIN: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 2, "save_at": 1, "readers": ("again",), "ulps": 64}  # fmt: skip
BY_MODULE = (change_weights, change_states, take_as_parameters, assign_data, use_other_classes, clear_all_states,
             clear_states)  # fmt: skip
EDITS: list[tuple[str, Any, dict[str, Any], Any]] = [
    *((f"load_{edit.__name__}", user(Edited, on_load_checkpoint=edit), {}, edit) for edit in BY_MODULE),
    # By a callback, which comes when weights are loaded.
    *((f"callback_{edit.__name__}", Edited, {"on_load_checkpoint": edit}, edit) for edit in (change_states, clear_all_states)),
    *((f"save_{edit.__name__}", user(Edited, on_load_checkpoint=back), {"on_save_checkpoint": edit}, edit)
      for edit, back in ((store_otherwise, load_otherwise), (clear_all_states, lambda *_: None))),
]  # fmt: skip
# What a hook edits has no more to do with the stage: they take turns.
for number, (name, module, moments, edit) in enumerate(EDITS):
    case("checkpoints", module, name, moments=moments, warns=WARNS.get(edit, ""), stages=(3 - number % 3,), **AGAIN)  # fmt: skip
for numbers, words in {(1, 3): f"{FRESH}1 (Adafactor), 2 (SGD).", (3, 1): "Unused states: 1, 2."}.items():  # fmt: skip
    case("checkpoints", user(Edited, numbers=numbers), f"{numbers[0]}_optimizers_and_{numbers[1]}", warns=words, **AGAIN)  # fmt: skip


# -- what is read while it is saved ----------------------------------------------------------------


def computed(m: Any, checkpoint: Any) -> Any:
    """The file has what a hook computes, and what it does to the module after its state was taken."""
    weights, states = checkpoint["state_dict"], checkpoint["optimizer_states"][0]["state"]
    weights["head.weight"] = weights["head.weight"] * 2 + weights["net.stem.weight"].t()
    sums = [value.double().sum().item() for value in weights.values()]
    with torch.no_grad():
        m.net.blocks[1].linear.weight.mul_(2)
        m.net.blocks[0].linear.bias.zero_()
    return sums, [state["exp_avg"].norm() for state in states.values()]


def copied(m: Any, checkpoint: Any) -> Any:
    weights, file = checkpoint["state_dict"], io.BytesIO()
    torch.save(weights, file)
    copies = copy.deepcopy(weights), pickle.loads(pickle.dumps(dict(weights)))
    # What is a tensor of its own may be changed in place.
    changed = [weights["head.bias"].clone().mul_(2), copies[0]["head.bias"].add_(1)]
    changed.append(weights["head.bias"].half().mul_(2))
    cast = [(v.to("cpu", torch.bfloat16), v.type(torch.float64)) for v in weights.values()]
    viewed = [weights["head.weight"][:2], nn.Parameter(weights["head.bias"]), weights["head.bias"].data.cpu()]  # fmt: skip
    facts = len({value.data_ptr() for value in weights.values()}), weights["head.weight"].numpy().tolist()  # fmt: skip
    return [*copies, torch.load(io.BytesIO(file.getvalue())), *changed, *cast, *viewed, *facts]


for read in (computed, copied):

    def keep(m: Any, checkpoint: Any, read: Any = read) -> None:
        checkpoint["read"] = read(m, checkpoint)

    case("checkpoints", Edited, f"reads_{read.__name__}", moments={"on_save_checkpoint": keep}, **AGAIN)  # fmt: skip


def save_copies(m: Any, checkpoint: Any) -> None:
    """Save copies of weights that were made at the first save beside new ones."""
    weights = checkpoint["state_dict"].items()
    m.kept = m.kept or {name: (value.clone(), value.double()) for name, value in weights}
    checkpoint["kept"] = m.kept


@case("checkpoints")
def copies_of_earlier_weights(play: Player) -> Trace:
    paths, trainer = [str(play.folder / f"{n}.ckpt") for n in (1, 2)], play.trainer(max_steps=2)
    save = lambda m, *_: trainer.save_checkpoint(paths[trainer.global_step - 1])  # noqa: E731
    module = user(Regression, kept=None, on_save_checkpoint=save_copies, on_train_batch_end=save)
    trainer.fit(module(), rows())
    trainer.strategy.barrier()
    files = [torch.load(path, weights_only=True) for path in paths]
    return Trace({}, notes=[[file["kept"], file["state_dict"]] for file in files])


# -- where a run begins ----------------------------------------------------------------------------


@case("checkpoints", settings=({}, {"checkpoint": "dcp"}), ulps=16)
def best_and_last(play: Player) -> Trace:
    data, module = (rows(), rows(8, seed=1)), Regression()
    keep = ModelCheckpoint(play.folder, monitor="val_loss", save_last="link", every_n_epochs=1)
    trainer = play.trainer(callbacks=[keep], enable_checkpointing=True, max_epochs=2)
    trainer.fit(module, *data)
    assert (play.folder / "last.ckpt").is_symlink()
    found = [trainer.test(module, data[1], ckpt_path=w, verbose=False) for w in ("best", "last")]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, *data, ckpt_path="last")
    return play.trace(module, trainer, found)


class FailsOnce(Regression):
    def on_after_backward(self) -> None:
        if self.global_step == 5 and not self.notes:
            self.notes.append("failed")
            raise KeyError


@case("checkpoints", stages=(3, 1, 2), precisions=("32-true", "bf16-mixed"), ulps=16)
def a_module_that_a_failed_run_has_left(play: Player) -> Trace:
    """It may be sharded, and gets its values from the checkpoint."""
    module, path = FailsOnce(), str(play.folder / "mid.ckpt")
    trainer = play.trainer()
    trainer.fit(module, rows())
    trainer.save_checkpoint(path)
    with pytest.raises(KeyError):
        play.fit(module, max_epochs=2, ckpt_path=path)
    return play.fit(module, max_epochs=2, ckpt_path=path)


# -- plugins: they are called as under DDP, and only Lightning's own are replaced by a faster way ---


class Twice(AsyncCheckpointIO):
    """Saves a second file."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        super().save_checkpoint(checkpoint, f"{path}.copy", storage_options=storage_options)


class Reading(_WrappingCheckpointIO):
    """Notes a sum of weights in the file, leaves optimizer states out, and swallows errors."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        try:
            total = sum(float(value.sum()) for value in checkpoint["state_dict"].values())
            states = [{**state, "state": {}} for state in checkpoint["optimizer_states"]]
            more = {"optimizer_states": states, "total": round(total, 4)}
            super().save_checkpoint({**checkpoint, **more}, path)
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
    "async_around_torchs": (lambda: AsyncCheckpointIO(TorchCheckpointIO()), True),
    "wrapper": (_WrappingCheckpointIO, False),
    "reader": (Reading, False),
    "twice": (Twice, False),
    "own": (Own, False),
    "async_around_own": (lambda: AsyncCheckpointIO(Own()), False),
    "async_around_a_reader": (lambda: AsyncCheckpointIO(Reading(TorchCheckpointIO())), False),
}
"""Plugins, and whether all ranks write in their place."""


def written_by(make: Callable[[], CheckpointIO], is_ours: bool, play: Player) -> Trace:
    """Save by a callback and by hand, and go on from there."""
    path, how = str(play.folder / "last.ckpt"), {"limit_train_batches": 3}
    keep = ModelCheckpoint(play.folder, "{step}", every_n_train_steps=1, save_top_k=1, monitor="step")  # fmt: skip
    trainer = play.trainer(plugins=[make()], callbacks=[keep], enable_checkpointing=True, **how)
    trainer.fit(Regression(), rows())
    options: Any = {"storage_options": {"a": 1}} if make is Own else {}
    trainer.save_checkpoint(path, **options)
    plugin: Any = trainer.strategy.checkpoint_io
    while plugin is not None:
        plugin.teardown()  # a wrapper of Lightning's does not pass that on
        plugin = getattr(plugin, "checkpoint_io", None)
    trainer.strategy.barrier()
    with zipfile.ZipFile(path) as archive:
        found = any(name.endswith("lightning_zero.json") for name in archive.namelist())
    assert found == (is_ours and not play.is_ddp)
    file = torch.load(path, weights_only=True)
    facts = [sorted(file), sorted(file["optimizer_states"][0]["state"]), file["state_dict"], file.get("options")]  # fmt: skip
    return play.fit(Regression(), plugins=[make()], max_epochs=2, ckpt_path=path, notes=facts, **how)  # fmt: skip


for name, (make, is_ours) in PLUGINS.items():
    case("checkpoints", name=f"written_{name}", loop=partial(written_by, make, is_ours), ulps=16)


class ByName(TorchCheckpointIO):
    """Keeps one checkpoint, whose name is no path."""

    def __init__(self, folder: Path) -> None:
        self.place = folder / "kept"

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        torch.save(checkpoint, self.place)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        return torch.load(self.place, weights_only=False)


@case("checkpoints", worlds=(1,), ulps=16)
def a_checkpoint_need_not_be_a_path(play: Player) -> Trace:
    trainer = play.trainer(plugins=[ByName(play.folder)])
    trainer.fit(Regression(), rows())
    trainer.save_checkpoint("run 1")
    how: dict[str, Any] = {"plugins": [ByName(play.folder)], "max_epochs": 2}
    return play.fit(Regression(), ckpt_path="run 1", **how)


widen("load_change_states", "reads_computed", "written_own")
