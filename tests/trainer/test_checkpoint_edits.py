"""Hooks that edit a checkpoint, and other optimizers than were saved, do what they do under DDP."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from tests.oracle.projects import WIDTH, Regression, Run, make_strategy, make_trainer, rows
from tests.oracle.projects import assert_like_ddp as runs_like_ddp
from tests.oracle.ranks import Pools

Edit = Callable[[Any, dict[str, Any]], object]


class Edited(Regression):
    """Has a batch norm and as many optimizers as asked, and edits checkpoints in its hooks."""

    def __init__(self, num_optimizers: int = 2, on_save: Any = None, on_load: Any = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.norm = nn.BatchNorm1d(WIDTH)
        self.num_optimizers, self.on_save, self.on_load = num_optimizers, on_save, on_load

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.trainer.strategy._lightning_optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for config in self.trainer.lr_scheduler_configs:
            config.scheduler.step()

    def configure_optimizers(self) -> Any:
        kinds = [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.SGD]
        parts = [self.net, self.head, self.norm]
        pairs = list(zip(kinds, parts, strict=True))[: self.num_optimizers]
        optimizers = [kind(part.parameters(), lr=0.02) for kind, part in pairs]
        return optimizers, [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.on_save is not None:
            self.on_save(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.on_load is not None:
            self.on_load(self, checkpoint)


class EditingCallback(Callback):
    """Edits checkpoints in the hooks of a callback."""

    def __init__(self, on_save: Any = None, on_load: Any = None) -> None:
        self.on_save, self.on_load = on_save, on_load

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if self.on_save is not None:
            self.on_save(module, checkpoint)

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if self.on_load is not None:
            self.on_load(module, checkpoint)


# -- edits -----------------------------------------------------------------------------------------


def clear_all_states(module: Any, checkpoint: Any) -> None:
    checkpoint["optimizer_states"], checkpoint["lr_schedulers"] = [], []


def clear_one_state(module: Any, checkpoint: Any) -> None:
    checkpoint["optimizer_states"][0]["state"] = {}


def drop_the_last_optimizer(module: Any, checkpoint: Any) -> None:
    checkpoint["optimizer_states"].pop()


def drop_a_parameters_state(module: Any, checkpoint: Any) -> None:
    checkpoint["optimizer_states"][0]["state"].pop(1)


def change_states(module: Any, checkpoint: Any) -> None:
    states = checkpoint["optimizer_states"][0]["state"]
    states[0]["exp_avg"] = torch.zeros_like(states[0]["exp_avg"])
    states[1]["exp_avg"].mul_(2)
    states[2]["exp_avg_sq"] = states[2]["exp_avg_sq"] * 4


def change_a_rate(module: Any, checkpoint: Any) -> None:
    for state in checkpoint["optimizer_states"]:
        state["param_groups"][0]["lr"] = 0.3


def replace_weights(module: Any, checkpoint: Any) -> None:
    weights = checkpoint["state_dict"]
    weights["head.weight"] = torch.full((WIDTH, WIDTH), 0.25)
    weights["head.bias"] = weights["head.bias"] + 1
    weights["norm.weight"] = weights["norm.weight"].half()


def change_weights(module: Any, checkpoint: Any) -> None:
    checkpoint["state_dict"]["head.bias"].add_(1)


def keep_own_weights(module: Any, checkpoint: Any) -> None:
    own = module.state_dict()
    for name in ("norm.num_batches_tracked", "norm.running_mean", "head.weight"):
        checkpoint["state_dict"][name] = own[name]


def take_as_parameters(module: Any, checkpoint: Any) -> None:
    weights = checkpoint["state_dict"]
    module.head.weight = nn.Parameter(weights["head.weight"])
    module.norm.running_mean = weights["norm.running_mean"]
    weights["head.bias"] = nn.Parameter(weights["head.bias"].clone()) * 2


def drop_weights(module: Any, checkpoint: Any) -> None:
    module.strict_loading = False
    for name in ("norm.num_batches_tracked", "head.weight"):
        del checkpoint["state_dict"][name]


def store_under_another_name(module: Any, checkpoint: Any) -> None:
    checkpoint["state_dict"] = {f"old.{k}": v for k, v in checkpoint["state_dict"].items()}


def give_names_back(module: Any, checkpoint: Any) -> None:
    weights = checkpoint["state_dict"]
    checkpoint["state_dict"] = {k.removeprefix("old."): v for k, v in weights.items()}


def store_in_half(module: Any, checkpoint: Any) -> None:
    weights = checkpoint["state_dict"]
    for name, value in weights.items():
        weights[name] = value.to(torch.bfloat16) if value.is_floating_point() else value
    checkpoint["twice"] = weights["head.weight"].double()


def store_other_tensors(module: Any, checkpoint: Any) -> None:
    checkpoint["state_dict"]["head.weight"] = torch.full((WIDTH, WIDTH), 0.5)
    checkpoint["also"] = checkpoint["state_dict"].pop("head.bias")


def take_the_other_tensors(module: Any, checkpoint: Any) -> None:
    checkpoint["state_dict"]["head.bias"] = checkpoint["also"]


def assign_data(module: Any, checkpoint: Any) -> None:
    for name, parameter in module.named_parameters():
        parameter.data = checkpoint["state_dict"][name]
    module.head.weight.detach().mul_(2)
    checkpoint["state_dict"] = dict(module.state_dict())


def use_other_classes(module: Any, checkpoint: Any) -> None:
    checkpoint["state_dict"] = MappingProxyType(checkpoint["state_dict"])
    for state in checkpoint["optimizer_states"]:
        for group in state["param_groups"]:
            group["params"] = tuple(group["params"])
        state["param_groups"] = tuple(state["param_groups"])
    for of_one in checkpoint["optimizer_states"][0]["state"].values():
        of_one["step"] = of_one["step"].view(1)


def fuse_and_split(module: Any, checkpoint: Any) -> None:
    weights = checkpoint["state_dict"]
    names = [f"net.blocks.{number}.linear.weight" for number in range(3)]
    for name, part in zip(names, torch.cat([weights[n] for n in names]).chunk(3), strict=True):
        weights[name] = part.t()


# -- what is read while it is saved ----------------------------------------------------------------


def computed(module: Any, checkpoint: Any) -> Any:
    weights, states = checkpoint["state_dict"], checkpoint["optimizer_states"][0]["state"]
    weights["head.weight"] = weights["head.weight"] * 2 + weights["net.stem.weight"].t()
    return [value.double().sum().item() for value in weights.values()], [
        state["exp_avg"].norm() for state in states.values()
    ]


def copied(module: Any, checkpoint: Any) -> Any:
    weights, file = checkpoint["state_dict"], io.BytesIO()
    torch.save(weights, file)
    copies = copy.deepcopy(weights), pickle.loads(pickle.dumps(dict(weights)))
    # What is a tensor of its own may be changed in place.
    changed = [weights["head.bias"].clone().mul_(2), copies[0]["head.bias"].add_(1)]
    changed.append(weights["head.bias"].half().mul_(2))
    return [*copies, torch.load(io.BytesIO(file.getvalue())), *changed]


def viewed(module: Any, checkpoint: Any) -> Any:
    weights = checkpoint["state_dict"]
    addresses = {value.data_ptr() for value in weights.values()}
    rows = weights["head.weight"][:2], weights["head.weight"].numpy().tolist()
    return len(addresses), rows, nn.Parameter(weights["head.bias"]), weights["head.bias"].data.cpu()


def cast(module: Any, checkpoint: Any) -> Any:
    values = checkpoint["state_dict"].values()
    ways = [lambda v: v.to("cpu", torch.bfloat16), lambda v: v.type(torch.float64)]
    return [way(value) for value in values for way in ways]


def edited_weights(module: Any, checkpoint: Any) -> Any:
    """The file has what a hook does to the module after its state was taken."""
    with torch.no_grad():
        module.head.weight.mul_(2)
        module.net.blocks[0].linear.bias.zero_()


def read_only(module: Any, checkpoint: Any) -> Any:
    return [read(module, checkpoint) for read in (copied, viewed, cast)]


READING = [computed, read_only, edited_weights]


class Saving(Edited):
    """Saves in the run, and keeps in the file what it has read."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.trainer.save_checkpoint(self.path)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["read"] = self.on_save(self, checkpoint)


def read_while_saving(folder: str, read: Edit, strategies: list[Any]) -> list[Any]:
    found = []
    for number, strategy in enumerate(strategies):
        module = Saving(on_save=read)
        module.path = f"{folder}/{number}.ckpt"
        make_trainer(strategy, limit_train_batches=3).fit(module, rows())
        saved = torch.load(module.path, weights_only=False)
        states = [state["state"] for state in saved["optimizer_states"]]
        found.append(Run.of(module, notes=[saved["read"], dict(saved["state_dict"]), states]))
    return found


@pytest.mark.parametrize("read", READING, ids=lambda read: read.__name__)
def test_what_is_saved_may_be_read(ranks: Pools, tmp_path: Path, read: Edit) -> None:
    stage = 1 + READING.index(read) % 2
    found = ranks(2).run(read_while_saving, str(tmp_path), read, ["ddp", stage, 3])
    runs_like_ddp([dict(zip(("ddp", stage, 3), runs, strict=True)) for runs in found])


def change_in_place(module: Any, checkpoint: Any) -> None:
    checkpoint["state_dict"]["head.bias"].mul_(2)


def change_while_saving(folder: str) -> None:
    for kind in ("file", "dcp"):
        with pytest.raises(RuntimeError, match=r"'head.bias' .* was changed in place"):
            read_while_saving(folder, change_in_place, [make_strategy(3, checkpoint=kind)])


def test_weights_in_use_are_not_changed_by_a_save(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(change_while_saving, str(tmp_path))


# -- edits of what is saved and loaded -------------------------------------------------------------

ON_LOAD: list[Edit] = [
    change_weights,
    clear_all_states,
    clear_one_state,
    drop_the_last_optimizer,
    drop_a_parameters_state,
    change_states,
    change_a_rate,
    replace_weights,
    keep_own_weights,
    take_as_parameters,
    drop_weights,
    assign_data,
    use_other_classes,
    fuse_and_split,
]
ON_SAVE: list[tuple[Edit, Edit | None]] = [
    (clear_all_states, None),
    (store_under_another_name, give_names_back),
    (store_in_half, None),
    (store_other_tensors, take_the_other_tensors),
]


def save(strategy: Any, path: str, saved: dict[str, Any]) -> None:
    """Save after two steps of a run with these arguments."""
    callback = EditingCallback(**saved.pop("callback", {}))
    trainer = make_trainer(strategy, max_epochs=1, limit_train_batches=2, callbacks=callback)
    trainer.fit(Edited(**saved), rows())
    trainer.save_checkpoint(path)


def resume(strategy: Any, path: str, loaded: dict[str, Any]) -> tuple[Any, list[str]]:
    """Resume for two steps, in a run with these arguments."""
    callback = EditingCallback(**loaded.pop("callback", {}))
    module = Edited(**loaded)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(strategy, max_epochs=2, limit_train_batches=2, callbacks=callback)
        trainer.fit(module, rows(), ckpt_path=path)
    told = [str(one.message) for one in caught if "states of" in str(one.message)]
    rates = [o.param_groups[0]["lr"] for o in trainer.optimizers]
    values = [value.detach().double().sum().item() for value in module.state_dict().values()]
    return (values, rates, trainer.global_step), told


def under_each(
    folder: str, saved: dict[str, Any] | None, loaded: dict[str, Any], *, stage: int
) -> list[Any]:
    """Save and resume under DDP and at a stage; with None, resume from what lies there."""
    found = []
    for name in ("ddp", stage):
        path = f"{folder}/{name}.ckpt"
        if saved is not None:
            save(name, path, dict(saved))
        found.append(resume(name, path, dict(loaded)))
    return found


def save_each(folder: str) -> None:
    for name in ("ddp", 1, 2, 3):
        save(name, f"{folder}/{name}.ckpt", {})


@pytest.fixture(scope="module")
def saved(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of files that nobody has edited."""
    folder = str(tmp_path_factory.mktemp("saved"))
    ranks(2).run(save_each, folder)
    return folder


def assert_like_ddp(found: list[Any], words: str = "") -> None:
    """Compare a stage's numbers with DDP's; it warns with ``words`` on rank 0."""
    for rank, ((expected, _), (numbers, told)) in enumerate(found):
        for mine, its in zip(numbers, expected, strict=True):
            assert mine == pytest.approx(its, rel=1e-5, abs=1e-6)
        assert len(told) == (1 if words and rank == 0 else 0), told
        assert all(words in one for one in told)


NO_STATES = "Optimizers that begin fresh: 0 (AdamW), 1 (Adafactor)."
ONE_STATE = "Optimizers that begin fresh: 1 (Adafactor)."
WORDS = {clear_all_states: NO_STATES, drop_the_last_optimizer: ONE_STATE}


# What a hook edits has no more to do with who edits it than with the stage: they take turns.
@pytest.mark.parametrize("edit", ON_LOAD, ids=lambda edit: edit.__name__)
def test_edits_of_what_is_loaded(ranks: Pools, saved: str, edit: Edit) -> None:
    number = ON_LOAD.index(edit)
    loaded = {"callback": {"on_load": edit}} if number % 2 else {"on_load": edit}
    found = ranks(2).run(under_each, saved, None, loaded, stage=3 - number % 3)
    assert_like_ddp(found, WORDS.get(edit, ""))


@pytest.mark.parametrize(("edit", "back"), ON_SAVE, ids=lambda edit: getattr(edit, "__name__", ""))
def test_edits_of_what_is_saved(
    ranks: Pools, tmp_path: Path, edit: Edit, back: Edit | None
) -> None:
    number = ON_SAVE.index((edit, back))
    saved = {"callback": {"on_save": edit}} if number % 2 else {"on_save": edit}
    found = ranks(2).run(under_each, str(tmp_path), saved, {"on_load": back}, stage=3 - number % 3)
    assert_like_ddp(found, WORDS.get(edit, ""))


class Started(Edited):
    """Notes the weights that are there when optimizers are made."""

    def configure_optimizers(self) -> Any:
        self.losses += [float(p.detach().sum()) for p in self.parameters()]
        return super().configure_optimizers()


def start_again(folder: str, strategies: list[Any]) -> list[Any]:
    found = []
    for number, strategy in enumerate(strategies):
        path, losses = f"{folder}/{number}.ckpt", []
        for max_epochs, given in ((1, None), (2, path)):
            module = Started()
            trainer = make_trainer(strategy, max_epochs=max_epochs, limit_train_batches=1)
            trainer.fit(module, rows(), ckpt_path=given)
            trainer.save_checkpoint(path)
            losses += module.losses
        found.append(losses)
    return found


def test_optimizers_are_made_when_weights_are_loaded(ranks: Pools, tmp_path: Path) -> None:
    for of_ddp, *others in ranks(2).run(start_again, str(tmp_path), ["ddp", 1, 3]):
        assert all(losses == pytest.approx(of_ddp, rel=1e-5, abs=1e-6) for losses in others)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (1, 3, "Optimizers that begin fresh: 1 (Adafactor), 2 (SGD)."),
        (3, 1, "Unused states: 1, 2."),
    ],
)
def test_other_numbers_of_optimizers(
    ranks: Pools, tmp_path: Path, before: int, after: int, words: str
) -> None:
    saved, loaded = {"num_optimizers": before}, {"num_optimizers": after}
    found = ranks(2).run(under_each, str(tmp_path), saved, loaded, stage=1 + (before + after) % 3)
    assert_like_ddp(found, words)
